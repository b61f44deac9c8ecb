"""`remote_agent`, under its name in NeMo Gym's configs."""

from palestra.gym.agents import RemoteAgent

SERVER = RemoteAgent
