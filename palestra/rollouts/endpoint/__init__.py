"""Rollouts with a model behind an endpoint: chat calls, no tokens."""
