"""Runs: listed, charted, compared. Begin at `catalogue` and `run_detail`."""
