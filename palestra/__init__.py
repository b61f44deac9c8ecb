"""Palestra: reinforcement learning for LLM agents on machines you own."""

__version__ = "0.1.0"
