"""The second half of a layer: one feed-forward network for all tokens, or experts that a router picks from."""
