"""`palestra platform`. Begin at `commands`."""
