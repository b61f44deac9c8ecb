"""Generation: requests in, tokens out. Begin at `sampler`, then `scheduler`."""
