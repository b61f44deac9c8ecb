"""Models behind endpoints, by name: at a running server, or at one that is started for them. Begin at `models`."""
