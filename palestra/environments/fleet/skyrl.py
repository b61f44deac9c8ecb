"""`fleet_task` for SkyRL's own loops, where skyrl-gym is installed.

For example:

    import palestra.environments.fleet.skyrl as fleet
    fleet.register()                                       # in each process that makes or aggregates
    env = skyrl_gym.make("fleet_task", env_config=..., extras=...)
"""

from __future__ import annotations

from palestra.environments.fleet.env import FleetTaskEnv as OurEnv

try:
    from skyrl_gym import register as _register  # pyright: ignore[reportMissingImports]
    from skyrl_gym.envs.base_text_env import BaseTextEnv as TheirTextEnv  # pyright: ignore[reportMissingImports]
    from skyrl_gym.envs.registration import registry  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"this module needs {e.name}; to install: pip install skyrl-gym", name=e.name) from None

ID = "fleet_task"


class FleetTaskEnv(OurEnv, TheirTextEnv):  # pyright: ignore[reportIncompatibleMethodOverride, reportUntypedBaseClass]
    """Our class as an instance of their base class, which `skyrl_gym.make` requires."""


def register() -> None:
    """Registers the environment; may be called repeatedly."""
    if ID not in registry:
        _register(ID, FleetTaskEnv)
