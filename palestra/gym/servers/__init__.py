"""The servers of a gym: what all have in common, and the kinds. Begin at `base`."""
