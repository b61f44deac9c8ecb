"""Forward and backward passes over packed micro-batches, losses and the optimizer. Begin at `trainer`."""
