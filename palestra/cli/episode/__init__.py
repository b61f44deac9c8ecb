"""`palestra episode`. Begin at `commands`."""
