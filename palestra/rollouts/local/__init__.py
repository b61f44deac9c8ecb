"""Rollouts that are played in this process, token by token."""
