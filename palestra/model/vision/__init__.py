"""Pictures: the tower that reads them, and where their rows stand in sequences. Begin at `tower`, then `placed`."""
