"""`palestra agent`: command-line agents and coding tasks. Begin at `commands`."""
