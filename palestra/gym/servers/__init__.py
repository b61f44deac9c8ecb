"""The servers of a gym: their common base and their kinds. Begin at `base`."""
