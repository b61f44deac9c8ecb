"""`palestra chat`: talk to a model in the terminal. Begin at `command`."""
