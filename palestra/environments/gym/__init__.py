"""A gym as its clients see it: rows as tasks, addresses of its agents, playing one row. Begin at `playing`."""
