"""Text completions. Begin at `calls`."""
