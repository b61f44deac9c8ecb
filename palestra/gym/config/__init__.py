"""The config of a gym: reads NeMo Gym's files and command line into a `GymConfig`. Begin at `load`."""

from palestra.gym.config.load import load_gym
from palestra.gym.config.ports import ReservedPorts
from palestra.gym.config.settings import OurSettings, our_settings
from palestra.gym.config.sources import GymSources
from palestra.gym.config.text import from_yaml, masked, shown, to_yaml

__all__ = [
    "GymSources",
    "OurSettings",
    "ReservedPorts",
    "from_yaml",
    "load_gym",
    "masked",
    "our_settings",
    "shown",
    "to_yaml",
]
