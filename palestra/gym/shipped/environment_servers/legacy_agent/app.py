"""`legacy_agent`, under its name in NeMo Gym's configs."""

from palestra.gym.servers.relays import LegacyAgent

SERVER = LegacyAgent
