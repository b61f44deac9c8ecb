"""A server's settings as a record."""

from __future__ import annotations

import typing
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerInstance
from palestra.gym.search_folders import did_you_mean

COMMON = frozenset(
    [
        "entrypoint",
        "host",
        "port",
        "num_workers",
        "name",
        "domain",
        "datasets",
        "verified",
        "verified_url",
        "accepted_findings",
        "description",
        "value",
        "isolation",
        "skip_verification",
        "skip_verification_reward",
        "token_id_capture",
        "expose_tools_over_mcp",
    ]
)
"""Keys that any server may have: the gym reads them, or they are for people."""

S = TypeVar("S", bound=Struct)


class ServerReference(Struct, frozen=True, forbid_unknown_fields=True):
    """Reference to another server of the gym: `{type: resources_servers, name: mcqa}`."""

    name: str
    type: str | None = None


def settings_type(server: type, default: type[Struct]) -> Any:
    """Returns the type in brackets of a server class, or of its base. Raises GymConfigError if it lacks fields of
    `default`, which the base class reads."""
    for one in server.__mro__:
        for base in one.__dict__.get("__orig_bases__", ()):
            for argument in typing.get_args(base):
                if isinstance(argument, type) and issubclass(argument, Struct):
                    return _derived(server, argument, default)
    return default


def _derived(server: type, found: type[Struct], default: type[Struct]) -> type[Struct]:
    if issubclass(found, default):
        return found
    head = f"class {found.__name__}({default.__name__}, frozen=True, kw_only=True)"
    raise GymConfigError(f"{server.__name__}: its settings must derive from {default.__name__}, as in: {head}")


def settings_of(instance: ServerInstance, kind: type[S]) -> S:
    """Reads the settings. Raises GymConfigError."""
    check_known(instance, kind)
    try:
        return msgspec.convert(instance.settings, kind, strict=False)
    except msgspec.ValidationError as error:
        message = str(error).replace("`$.", "`").replace("Object missing required field", "there is no")
        raise GymConfigError(f"{instance.where}: {message}") from None


def check_known(instance: ServerInstance, kind: type[Struct]) -> None:
    """Raises GymConfigError for unknown keys, which would have no effect."""
    own = [one.encode_name for one in msgspec.structs.fields(kind)]
    unknown = sorted(set(instance.settings) - {*own, *COMMON})
    if unknown:
        others = f"\n  there are: {', '.join(sorted(own))}"
        lines = [
            f"{instance.where}.{key}: unknown setting{did_you_mean(key, {*own, *COMMON}) or others}" for key in unknown
        ]
        raise GymConfigError("\n".join(lines))
