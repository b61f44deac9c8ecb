"""Targets of an audit, by their name on the command line.

| name | |
| --- | --- |
| `stockroom`, `package.module:Class`, and every other name that `palestra eval` takes | an environment |
| `run.yaml` | all environments of a config, or the agents of a gym's config |
| `gym:mcqa`, or the folder of a gym server | a gym's resources server with its agent and rows |
| `mail`, `mail-move_only`, `platform`, `platform:mail?difficulty=1` | an app of the platform, a template, all of them |
| `coding`, `1-fix-typo`, a folder | coding tasks |
| `http://…` | an MCP or an OpenEnv server |
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from pydantic import ValidationError

from palestra.audit.findings import FindingKind
from palestra.audit.server_urls import server_entry
from palestra.coding import CodingTask, read_tasks
from palestra.coding.shipped_tasks import SHIPPED
from palestra.config.environment_entries import EnvironmentEntry
from palestra.config.errors import ConfigError
from palestra.config.load import read_file
from palestra.environments.platform import APPS
from palestra.environments.registry import registry
from palestra.evaluation.targets import GYM, entry_named, gym_entries
from palestra.gym.records import ServerKind
from palestra.gym.search_folders import find_below, search_roots
from palestra.types.rollouts import CODING
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

CONFIGS = (".yaml", ".yml", ".json")
PLATFORM = "platform"
URLS = ("http://", "https://")


class AuditTarget(Struct, frozen=True, kw_only=True):
    name: str
    entry: EnvironmentEntry | None = None
    """None: coding tasks."""
    coding: list[CodingTask] = []
    accepted: dict[str, str] = {}
    """Kinds of findings that are meant here, each with the reason."""


def targets_named(name: str, folder: Path, tasks: Path | None = None) -> list[AuditTarget]:
    """Returns what a name stands for. `folder` gets files that a target needs; `tasks` is a file with its tasks. Raises
    ConfigError, TaskError and TargetUnreachable."""
    if name.startswith(URLS):
        entry = server_entry(name, folder)
        no_rewards: dict[str, str] = {FindingKind.UNGRADED: "tools of an MCP server have no rewards"}
        return [AuditTarget(name=name, entry=entry, accepted=no_rewards if entry.name == "fleet_task" else {})]
    if name.endswith(CONFIGS):
        return list(_of_config(Path(name)))
    place = Path(name) if Path(name).is_dir() else SHIPPED / name
    if name == CODING or (place.is_dir() and not _is_gym_server(place) and name not in registry):
        return [AuditTarget(name=name, coding=read_tasks(SHIPPED if name == CODING else place))]
    if place.is_dir() and _is_gym_server(place):
        place = place.absolute()
        config = place / "configs" / f"{place.name}.yaml"
        return [_target(name, _entry(gym_entries(f"gym:{place.name}", str(config), place.parents[1])[0]))]
    content = entry_named(_platform_name(name))
    if tasks is not None:
        content = {**content, "tasks": str(tasks)}
    return [_target(name, _entry(content))]


def _platform_name(name: str) -> str:
    """Names of the platform's apps and templates, in full; any other name as it is."""
    app, _, template = name.partition("-")
    if name == PLATFORM:
        return "platform:"
    if name in registry or app not in APPS:
        return name
    return f"platform:{app}?template={template}" if template else f"platform:{app}"


def _is_gym_server(folder: Path) -> bool:
    return folder.absolute().parent.name in set(ServerKind) and (folder / "configs").is_dir()


def _of_config(file: Path) -> Iterator[AuditTarget]:
    content = read_file(file)
    entries = content.get("environments")
    if not isinstance(entries, list):
        own = file.absolute()
        entries = gym_entries(f"gym:{file.stem}", str(own), own.parents[min(3, len(own.parents) - 1)])
    for number, one in enumerate(entries):
        entry = _entry(one, f"{file}: environments.{number}")
        name = f"{file}: {entry.name} (environments.{number})"
        if entry.name != CODING:
            yield _target(name, entry)
        elif entry.tasks is None and entry.eval_tasks is None:
            yield AuditTarget(name=name, coding=read_tasks(SHIPPED))
        else:
            folders = [place for place in (entry.tasks, entry.eval_tasks) if place is not None]
            yield AuditTarget(name=name, coding=[task for place in folders for task in read_tasks(place)])


def _target(name: str, entry: EnvironmentEntry) -> AuditTarget:
    """Returns the target of an entry, with what the files of its gym accept. Raises ConfigError."""
    if not entry.name.startswith(GYM):
        return AuditTarget(name=name, entry=entry)
    accepted: dict[str, str] = {}
    roots = search_roots([Path(one) for one in entry.config.get("search_dirs", ())])
    for file in entry.config.get("files", ()):
        if (place := find_below(roots, file)) is not None:
            accepted |= _accepted(place)
    return AuditTarget(name=name, entry=entry, accepted=accepted)


def _accepted(file: Path) -> JsonObject:
    """Returns `accepted_findings` of all servers in a gym's file. Raises ConfigError."""
    found: JsonObject = {}
    for instance in read_file(file).values():
        for kind in instance.values() if isinstance(instance, dict) else ():
            for settings in kind.values() if isinstance(kind, dict) else ():
                found |= settings.get("accepted_findings") or {} if isinstance(settings, dict) else {}
    for kind, reason in found.items():
        where = f"{file}: accepted_findings.{kind}"
        if kind not in set(FindingKind):
            raise ConfigError([f"{where}: there is no such kind; {did_you_mean(kind, FindingKind)}"])
        if not isinstance(reason, str) or not reason:
            raise ConfigError([f"{where}: say in a sentence why it is meant"])
    return found


def _entry(content: JsonObject, where: str = "the target") -> EnvironmentEntry:
    try:
        return EnvironmentEntry.model_validate(content)
    except ValidationError as error:
        found = error.errors()[0]
        raise ConfigError([f"{where}.{'.'.join(map(str, found['loc']))}: {found['msg']}"]) from None
