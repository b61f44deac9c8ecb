"""Metrics, traces and health of the server. Begin at `metrics`."""
