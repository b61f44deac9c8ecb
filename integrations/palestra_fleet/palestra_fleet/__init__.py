"""The name under which verifiers finds our environment; the work is in palestra itself."""

from palestra.environments.fleet.verifiers_env import FleetEnv, FleetHarness, FleetTaskset

__all__ = ["FleetEnv", "FleetHarness", "FleetTaskset"]
