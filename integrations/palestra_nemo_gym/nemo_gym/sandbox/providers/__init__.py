"""Providers of sandboxes: what they are, which there are."""

from nemo_gym.sandbox.providers.base import *  # noqa: F403
from nemo_gym.sandbox.providers.registry import *  # noqa: F403
