"""Fleet tasks: text environments whose world is an app with tools, here or elsewhere. Begin at `env`."""

from typing import TYPE_CHECKING

from palestra.environments.fleet.backend import FleetAttempt, FleetBackend, FleetGrade, ToolAnswer
from palestra.environments.fleet.env import FleetTaskEnv
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.platform_tasks import export_tasks, fleet_row
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.task_env import OpenEnvTask
from palestra.environments.fleet.task_files import clear_caches
from palestra.environments.platform.verifiers.source import verifier_source
from palestra.util.renamed import renamed

__all__ = [
    "BackendError",
    "FleetAttempt",
    "FleetBackend",
    "FleetGrade",
    "FleetSettings",
    "FleetTask",
    "FleetTaskEnv",
    "OpenEnvTask",
    "ToolAnswer",
    "clear_caches",
    "export_tasks",
    "fleet_row",
    "verifier_source",
]

if not TYPE_CHECKING:  # type checkers know the new names only
    __getattr__ = renamed(__name__, Attempt="FleetAttempt", Backend="FleetBackend", Grade="FleetGrade")
