"""Rollouts that are rows of a gym, played by its servers."""
