"""Network plumbing that every server of the house shares. Begin at `serving`."""
