"""`palestra checkpoint`: checkpoints of runs and servers. Begin at `commands`."""
