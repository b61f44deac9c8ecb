"""A gym of model, agent and resources servers, and rollouts collected through them."""
