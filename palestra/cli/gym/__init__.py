"""`palestra gym`. Begin at `commands`."""
