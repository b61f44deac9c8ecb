"""Sandboxes that a server asks for by a provider's name. No provider is part of this: they come from other packages."""

from nemo_gym.sandbox.api import AsyncSandbox as AsyncSandbox
from nemo_gym.sandbox.api import Sandbox as Sandbox
from nemo_gym.sandbox.config import resolve_provider_config as resolve_provider_config
from nemo_gym.sandbox.config import resolve_provider_metadata as resolve_provider_metadata
from nemo_gym.sandbox.providers import *  # noqa: F403
from nemo_gym.sandbox.utils import rewrite_image as rewrite_image
