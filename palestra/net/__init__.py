"""Network code that all servers of this project share. Begin at `serving`."""
