"""Rollouts that a command-line agent plays in sandboxes."""
