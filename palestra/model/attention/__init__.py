"""Attention: over packed sequences in training, over pages of the KV cache in sampling. Begin at `packed`."""
