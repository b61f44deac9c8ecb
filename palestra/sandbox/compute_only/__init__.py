"""Processes for untrusted code that can do nothing but compute. Begin at `process`."""
