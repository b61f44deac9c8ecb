"""Processes for code of strangers, that can do nothing but compute. Begin at `process`."""
