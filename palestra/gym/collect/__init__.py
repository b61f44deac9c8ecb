"""Rollouts collected through running agent servers, from files of rows to files of results. Begin at `collection`."""
