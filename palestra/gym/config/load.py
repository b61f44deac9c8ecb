"""Loads a gym that can be started from files and the command line."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from palestra.gym.config.directives import apply_directives, merge_placeholders
from palestra.gym.config.interpolation import resolved
from palestra.gym.config.merging import UNSET, dotted, leaves
from palestra.gym.config.ports import ReservedPorts
from palestra.gym.config.servers import (
    FoundServers,
    ServerEntry,
    field_problems,
    find_servers,
    lone_relays,
    reference_problems,
)
from palestra.gym.config.settings import (
    COPIED_TO_AGENTS,
    DEFAULTS,
    HEAD,
    HEAD_PORT,
    check_settings,
    is_on_ray,
    our_settings,
)
from palestra.gym.config.sources import GymSources, MergedSources
from palestra.gym.errors import GymConfigError
from palestra.gym.nemo_gym_compat import missing_names
from palestra.gym.records import GymConfig, Isolation, ServerInstance, ServerKind
from palestra.gym.registry import OURS, Implementation, locate
from palestra.gym.requirements.folder_requirements import has_requirements, requirements_of
from palestra.gym.server_code import setup_code
from palestra.gym.venvs import present_interpreter, python_version
from palestra.util.json_types import JsonObject


def load_gym(
    sources: GymSources,
    *,
    ports: ReservedPorts | None = None,
    is_code_needed: bool = True,
    report: Callable[[str], None] = lambda notice: None,
) -> GymConfig:
    """Loads a config. `ports` holds the chosen ports; without it the config is only inspected. `is_code_needed=False`:
    the servers' folders need not exist. `report` gets notes that are not errors. Raises GymConfigError."""
    merged = MergedSources(sources, report)
    data = apply_directives(merged.data)
    merge_placeholders(data)
    data = DEFAULTS | {key: value for key, value in data.items() if value is not None or key not in DEFAULTS}
    _check_nothing_unset(data, merged)
    found = find_servers(data)
    for name in found.partial:
        report(f"{name} has no entrypoint, so no server is started for it")
    # An address may be set by interpolation, and interpolations may refer to addresses.
    known = resolved(data, merged.source_of, is_final=False)
    _fill_addresses(data, found.entries, known, ReservedPorts(is_binding=False) if ports is None else ports)
    settings = resolved(data, merged.source_of)
    entries = _checked(settings, found, report)
    _copy_to_agents(settings, entries)
    servers = {
        entry.name: _instance(entry, settings, merged.roots if is_code_needed else None, report) for entry in entries
    }
    _check_stock_names(servers.values())
    _check_requirements(servers.values(), settings)
    return GymConfig(
        servers=servers,
        settings=settings,
        head_host=settings[HEAD]["host"],
        head_port=settings[HEAD]["port"],
        secret=secrets.token_hex(32),
    )


def _check_nothing_unset(data: JsonObject, merged: MergedSources) -> None:
    unset = [path for path, value in leaves(data) if value == UNSET]
    if unset:
        lines = "".join(f"\n  {dotted(path)} ({merged.source_of(path)})" for path in unset)
        example = dotted(unset[0])
        raise GymConfigError(f"{len(unset)} values must be set:{lines}\n  as in: ++{example}=VALUE, or in env.yaml")


def _checked(settings: JsonObject, found: FoundServers, report: Callable[[str], None]) -> list[ServerEntry]:
    """Returns the servers again, with everything filled in; those that cannot be are an error or left out, as the
    settings say."""
    entries = find_servers({entry.name: settings[entry.name] for entry in found.entries}).entries
    almost = dict(found.almost)
    for entry in entries:
        if problems := field_problems(entry):
            almost[entry.name] = problems
    lines = "\n".join(line for problems in almost.values() for line in problems)
    if almost and settings.get("error_on_almost_servers", True):
        raise GymConfigError(f"{lines}\n  to continue without them: ++error_on_almost_servers=false")
    if almost:
        report(f"not started: {', '.join(almost)}\n{lines}")
    sound = [entry for entry in entries if entry.name not in almost]
    for entry in lone_relays(sound):
        report(f"{entry.name} stands before an agent that is not in this gym, so no server is started for it")
        sound.remove(entry)
    if problems := reference_problems(sound):
        raise GymConfigError("\n".join(problems))
    return sound


def _fill_addresses(data: JsonObject, entries: list[ServerEntry], known: JsonObject, ports: ReservedPorts) -> None:
    """Fills in addresses. `known` is the same config with interpolations filled in. A port that is set is used, or it
    is an error."""
    check_settings(known)
    host = _own_address() if known["use_absolute_ip"] else known.get("default_host") or "127.0.0.1"
    data[HEAD] = {**(known.get(HEAD) or {})}
    servers_host = _own_address() if is_on_ray(known) and not known.get("default_host") else host
    data[HEAD]["host"] = data[HEAD].get("host") or host
    port = data[HEAD].get("port")
    data[HEAD]["port"] = ports.reserve(data[HEAD]["host"], HEAD_PORT if port is None else port, f"{HEAD}.port")
    fixed: list[ServerEntry] = []
    for entry in entries:
        fields = known[entry.name][entry.kind][entry.implementation]
        entry.fields["host"] = fields.get("host") or servers_host
        if fields.get("port"):
            entry.fields["port"] = fields["port"]
            fixed.append(entry)
    _reserve_fixed(fixed, data[HEAD]["port"], ports)
    avoid = {one for one in known.get("disallowed_ports") or [] if isinstance(one, int)}
    for entry in entries:
        if not entry.fields.get("port"):
            entry.fields["port"] = ports.reserve_any(
                entry.fields["host"],
                known["port_range_low"],
                known["port_range_high"],
                avoid=avoid,
                who=f"{entry.where}.port",
            )
    data["disallowed_ports"] = ports.numbers()


def _reserve_fixed(entries: list[ServerEntry], head_port: int, ports: ReservedPorts) -> None:
    owners = {head_port: HEAD}
    for entry in entries:
        port = entry.fields["port"]
        if port in owners:
            raise GymConfigError(f"{entry.where}.port: {port} is also the port of {owners[port]}; change one of them")
        owners[port] = entry.name
        if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536:
            ports.reserve(entry.fields["host"], port, f"{entry.where}.port")


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise GymConfigError(f"use_absolute_ip: this machine's address cannot be found ({error})") from None


def _copy_to_agents(settings: JsonObject, entries: list[ServerEntry]) -> None:
    for entry in entries:
        if entry.kind is ServerKind.AGENT:
            for key in COPIED_TO_AGENTS:
                if key in settings:
                    entry.fields.setdefault(key, settings[key])


def _instance(
    entry: ServerEntry, settings: JsonObject, roots: Sequence[Path] | None, report: Callable[[str], None]
) -> ServerInstance:
    ours = our_settings(settings)
    code = (
        Implementation(None, is_stock=False)
        if roots is None
        else locate(entry.kind, entry.implementation, entry.fields["entrypoint"], roots, ours.use_stock)
    )
    needs_process = code.is_stock or (code.folder is not None and has_requirements(code.folder))
    isolation = Isolation(entry.fields.get("isolation") or (Isolation.PROCESS if needs_process else ours.isolation))
    if needs_process and isolation is Isolation.SHARED:
        raise GymConfigError(
            f"{entry.where}.isolation cannot be shared: {code.folder} has its own requirements or belongs to NeMo Gym"
        )
    if (entry.fields.get("num_workers") or 1) > 1:
        report(f"{entry.where}.num_workers: this server runs in one process, which keeps its sessions")
    return ServerInstance(
        name=entry.name,
        kind=entry.kind,
        implementation=entry.implementation,
        settings=entry.fields,
        host=entry.fields["host"],
        port=entry.fields["port"],
        isolation=isolation,
        folder=code.folder,
        is_stock=code.is_stock,
    )


def _check_stock_names(servers: Iterable[ServerInstance]) -> None:
    """Checks imports before anything is started: a server's own ImportError would come late, and in its log."""
    folders = {one.folder: one for one in servers if one.is_stock and one.folder is not None}
    problems: list[str] = []
    for folder, one in folders.items():
        missing = missing_names(folder / one.settings["entrypoint"])
        if missing:
            root = folder.parents[1]
            lines = sorted({f"\n  {each.text} ({each.file.relative_to(root)}:{each.line})" for each in missing})
            problems.append(f"{folder} imports names that our stand-in for NeMo Gym does not have:{''.join(lines)}")
            if one.implementation in OURS.get(one.kind, ()):
                problems.append(
                    f"  Palestra has its own implementation: remove {one.implementation} from gym.use_stock"
                )
    if problems:
        raise GymConfigError("\n".join(problems))


def _check_requirements(servers: Iterable[ServerInstance], settings: JsonObject) -> None:
    """Checks, before anything is started, that requirements can be had from where the folders say, and that what
    installs programs as the user was allowed to."""
    allowed = our_settings(settings).allow_setup
    problems: list[str] = []
    for folder, one in {one.folder: one for one in servers if one.folder is not None}.items():
        if present_interpreter(folder, settings) is None:
            requirements_of(folder, python_version(settings))
        if one.is_stock and one.implementation not in allowed:
            root = folder.parents[1]
            found = setup_code(folder / one.settings["entrypoint"])
            lines = [f"\n  {each.file.relative_to(root)}:{each.line} ({each.what})" for each in found]
            if lines:
                problems.append(
                    f"{folder} has set-up code, which would run as you and may install programs:{''.join(lines)}\n"
                    f"  read it; then, to let it run: gym.allow_setup=[{one.implementation}]"
                )
    if problems:
        raise GymConfigError("\n".join(problems))
