"""What the server says about itself: metrics, traces, health. Begin at `metrics`."""
