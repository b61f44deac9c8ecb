"""`simple_agent`, under its name in NeMo Gym's configs."""

from palestra.gym.agents import SimpleAgent

SERVER = SimpleAgent
