"""Samples: who samples them, and what waits. Begin at `requests`."""
