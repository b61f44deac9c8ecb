"""Rollouts that verifiers plays by itself, with its own client, harnesses and rewards."""
