"""`gymnasium_agent`, by the name of NeMo Gym's configs."""

from palestra.gym.agents import GymnasiumAgent

SERVER = GymnasiumAgent
