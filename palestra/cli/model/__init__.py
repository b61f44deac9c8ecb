"""`palestra model`: folders with models. Begin at `commands`."""
