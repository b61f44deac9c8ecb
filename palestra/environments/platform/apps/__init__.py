"""The apps: tables, seeds, tools and tasks of each. Begin at `keys`, the smallest."""
