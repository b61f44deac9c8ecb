"""Evaluations by themselves: a model, anywhere, on held-out tasks. Begin at `run`."""
