"""The agents that are part of the gym, by the name of their implementation. Begin at `simple`."""

from palestra.gym.agents.gymnasium import GymnasiumAgent
from palestra.gym.agents.remote import RemoteAgent
from palestra.gym.agents.simple import SimpleAgent

__all__ = ["GymnasiumAgent", "RemoteAgent", "SimpleAgent"]
