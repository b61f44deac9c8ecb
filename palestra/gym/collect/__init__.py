"""Rollouts collected through running agent servers: rows in, results out, in files. Begin at `collection`."""
