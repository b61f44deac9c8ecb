"""Fleet tasks: text environments whose world is an app that tools act on, here or elsewhere. Begin at `env`."""

from palestra.environments.fleet.backend import Attempt, Backend, Grade, ToolAnswer
from palestra.environments.fleet.env import FleetTaskEnv
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.platform_tasks import export_tasks, fleet_row
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.task_env import OpenEnvTask
from palestra.environments.fleet.task_files import clear_caches
from palestra.environments.platform.verifiers.source import verifier_source

__all__ = [
    "Attempt",
    "Backend",
    "BackendError",
    "FleetSettings",
    "FleetTask",
    "FleetTaskEnv",
    "Grade",
    "OpenEnvTask",
    "ToolAnswer",
    "clear_caches",
    "export_tasks",
    "fleet_row",
    "verifier_source",
]
