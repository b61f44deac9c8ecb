"""Processes for untrusted code, which can do nothing but compute. Begin at `process`."""
