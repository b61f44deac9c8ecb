"""A gym of model, agent and resources servers, and rollouts collected through them.

Begin at `start`, which runs one, and `collect/collection`.
"""
