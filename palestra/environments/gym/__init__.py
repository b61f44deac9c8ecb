"""A gym as its clients see it: rows as tasks, where its agents are, playing one row. Begin at `playing`."""
