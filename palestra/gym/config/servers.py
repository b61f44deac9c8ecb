"""Finds the servers among the entries of a config, and validates each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from palestra.gym.config.settings import RESERVED
from palestra.gym.records import Isolation, ServerKind
from palestra.gym.search_folders import did_you_mean
from palestra.util.json_types import JsonObject

TYPES = ("train", "validation", "example", "benchmark")
LICENSES = (
    "Apache 2.0",
    "MIT",
    "Creative Commons Attribution 4.0 International",
    "Creative Commons Attribution-ShareAlike 4.0 International",
    "CC BY-SA 4.0",
    "CC BY-NC 3.0",
    "NVIDIA Internal Use Only, Do Not Distribute",
    "NVIDIA Evaluation Dataset License Agreement",
    "TBD",
    "GNU General Public License v3.0",
)
SOURCES = {"gitlab": ("dataset_name", "version", "artifact_fpath"), "huggingface": ("repo_id",)}
LEGACY = ("gitlab_identifier", "huggingface_identifier")


def dataset_problems(entries: object) -> list[str]:
    """Returns one line for each mistake, starting with the key below the server."""
    if entries is None:
        return []
    if not isinstance(entries, list):
        return [f"datasets: should be a list, but is a {type(entries).__name__}"]
    return [f"datasets[{index}]{problem}" for index, entry in enumerate(entries) for problem in _of_one(entry)]


def _of_one(entry: object) -> list[str]:
    if not isinstance(entry, dict):
        return [f": should be a mapping, but is {entry!r}"]
    kind = entry.get("type")
    if kind not in TYPES:
        return [f".type: {kind!r} is not one of {', '.join(TYPES)}{did_you_mean(str(kind), TYPES)}"]
    needed = ["name", "jsonl_fpath", *(["prepare_script"] if kind == "benchmark" else [])]
    problems = [f".{key} is missing" for key in needed if not isinstance(entry.get(key), str)]
    repeats = entry.get("num_repeats", 1)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        problems.append(f".num_repeats: should be a positive whole number, but is {repeats!r}")
    return problems if kind == "benchmark" else problems + _license(entry, kind) + _source(entry)


def _license(entry: JsonObject, kind: str) -> list[str]:
    given = entry.get("license")
    if given is None:
        return [".license is missing; train and validation data need it"] if kind in ("train", "validation") else []
    if given in LICENSES:
        return []
    return [f".license: {given!r} is not one of: {'; '.join(LICENSES)}{did_you_mean(str(given), LICENSES)}"]


def _source(entry: JsonObject) -> list[str]:
    source = entry.get("source")
    if source is None:
        return []
    if legacy := [key for key in LEGACY if entry.get(key) is not None]:
        return [f".source and {legacy[0]} are both given; keep only source"]
    kind = source.get("type") if isinstance(source, dict) else None
    if kind not in SOURCES:
        return [f".source.type: {kind!r} is not one of {', '.join(SOURCES)}"]
    return [f".source.{key} is missing" for key in SOURCES[kind] if not isinstance(source.get(key), str)]


KINDS = tuple(str(kind) for kind in ServerKind)
_DOMAINS = "math coding agent knowledge instruction_following long_context safety games translation e2e rlhf other"
DOMAINS = _DOMAINS.split()
RELAY = "legacy_agent"
"""The one environment server that runs here: it passes everything to one agent."""


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """A top-level entry with the structure of a server: `name: {kind: {implementation: fields}}`."""

    name: str
    kind: ServerKind
    implementation: str
    fields: JsonObject
    """The same mapping object as in the config: filling in a port here fills it in there."""

    @property
    def where(self) -> str:
        return f"{self.name}.{self.kind}.{self.implementation}"


@dataclass(slots=True)
class FoundServers:
    entries: list[ServerEntry]
    almost: dict[str, list[str]]
    """Entries that look like servers but cannot be, with their mistakes."""
    partial: list[str]
    """Entries that name a kind but have no entrypoint: nothing is started for them."""


def find_servers(data: JsonObject) -> FoundServers:
    """Finds servers by their structure alone: values may still be interpolations."""
    found = FoundServers([], {}, [])
    for name, value in data.items():
        if name in RESERVED or not isinstance(value, dict):
            continue
        kinds = [kind for kind in KINDS if kind in value]
        if not kinds:
            if unknown := _unknown_kind(value):
                near = did_you_mean(unknown, KINDS)
                found.almost[name] = [f"{name}.{unknown} is not a kind of server; there are {', '.join(KINDS)}{near}"]
            continue
        runnable = [one for kind in kinds for one in _implementations(value[kind]) if "entrypoint" in one[1]]
        if not runnable:
            found.partial.append(name)
        elif len(kinds) > 1:
            found.almost[name] = [f"{name} has {' and '.join(kinds)}, but an instance has one kind"]
        elif len(value[kinds[0]]) > 1:
            several = ", ".join(map(str, value[kinds[0]]))
            found.almost[name] = [
                f"{name}.{kinds[0]} has {several}, but an instance has one implementation (_delete_key removes one)"
            ]
        else:
            implementation, fields = runnable[0]
            if kinds[0] == ServerKind.ENVIRONMENT and implementation != RELAY:
                found.almost[name] = [f"{name}: of NeMo Gym's environment servers only {RELAY} runs here"]
                continue
            found.entries.append(ServerEntry(name, ServerKind(kinds[0]), implementation, fields))
    return found


def _unknown_kind(value: JsonObject) -> str | None:
    """Returns the unknown kind of an entry that otherwise looks like a server."""
    return next(
        (str(kind) for kind in value if any("entrypoint" in one for _, one in _implementations(value[kind]))), None
    )


def _implementations(value: object) -> Iterator[tuple[str, JsonObject]]:
    if isinstance(value, dict):
        yield from ((str(name), fields) for name, fields in value.items() if isinstance(fields, dict))


def field_problems(entry: ServerEntry) -> list[str]:
    """Returns mistakes in the fields that every server has, after interpolation."""
    fields = entry.fields
    problems = dataset_problems(fields.get("datasets"))
    entrypoint = fields["entrypoint"]
    if not isinstance(entrypoint, str) or not entrypoint.endswith(".py") or PurePath(entrypoint).is_absolute():
        problems.append(
            f"entrypoint: should be a Python file in the server's folder, such as app.py, but is {entrypoint!r}"
        )
    if not isinstance(fields.get("host", ""), str | None):
        problems.append(f"host: should be an address, but is {fields['host']!r}")
    port, workers = fields.get("port"), fields.get("num_workers")
    if port is not None and not (isinstance(port, int) and 0 < port < 65536):
        problems.append(f"port: should be from 1 to 65535, but is {port!r}")
    if workers is not None and not (isinstance(workers, int) and workers > 0):
        problems.append(f"num_workers: should be a positive whole number, but is {workers!r}")
    isolation = fields.get("isolation")
    if isolation is not None and isolation not in list(Isolation):
        problems.append(f"isolation: {isolation!r} is not one of {', '.join(Isolation)}")
    if entry.kind is ServerKind.RESOURCES:
        problems += _domain_problems(fields.get("domain"))
    return [f"{entry.where}.{problem}" for problem in problems]


def _domain_problems(domain: object) -> list[str]:
    if domain in DOMAINS:
        return []
    if domain is None:
        return [f"domain is missing; a resources server needs one of {', '.join(DOMAINS)}"]
    return [f"domain: {domain!r} is not one of {', '.join(DOMAINS)}{did_you_mean(str(domain), DOMAINS)}"]


def lone_relays(entries: list[ServerEntry]) -> list[ServerEntry]:
    """Returns relays without their agent: NeMo Gym's files have one for each agent, and agents can be left out."""
    agents = {one.name for one in entries if one.kind is ServerKind.AGENT}
    relays = [one for one in entries if one.kind is ServerKind.ENVIRONMENT]
    references = ((one, one.fields.get("agent_server")) for one in relays)
    return [one for one, agent in references if isinstance(agent, dict) and agent.get("name") not in agents]


def reference_problems(entries: list[ServerEntry]) -> list[str]:
    """Returns mistakes for direct fields `{type, name}` that name a server which does not exist."""
    by_kind = {kind: [one.name for one in entries if one.kind == kind] for kind in ServerKind}
    problems: list[str] = []
    for entry in entries:
        for field, value in entry.fields.items():
            if not is_reference(value) or value["name"] in by_kind[ServerKind(value["type"])]:
                continue
            known = by_kind[ServerKind(value["type"])]
            hint = did_you_mean(value["name"], known) or f"\n  there are: {', '.join(known) or 'none'}"
            problems.append(f"{entry.where}.{field}: no {value['type']} instance is called {value['name']!r}{hint}")
    return problems


def is_reference(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"type", "name"}
        and value["type"] in KINDS
        and isinstance(value["name"], str)
    )
