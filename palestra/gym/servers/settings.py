"""A server's settings as a record.

Owns: checking them, what a reference to another server looks like. Never touches: files.
"""

from __future__ import annotations

import difflib
import logging
import typing
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerInstance

log = logging.getLogger(__name__)

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
        "description",
        "value",
        "isolation",
        "skip_verification",
        "skip_verification_reward",
        "token_id_capture",
        "expose_tools_over_mcp",
    ]
)
"""What any server may say: the gym reads it, or it is for people."""

S = TypeVar("S", bound=Struct)


class Reference(Struct, frozen=True):
    """To another server of the gym: `{type: resources_servers, name: mcqa}`."""

    name: str
    type: str | None = None


def settings_type(server: type, default: type[Struct]) -> Any:
    """What a server class says in brackets, or the one that it derives from."""
    for one in server.__mro__:
        for base in one.__dict__.get("__orig_bases__", ()):
            for argument in typing.get_args(base):
                if isinstance(argument, type) and issubclass(argument, Struct):
                    return argument
    return default


def settings_of(instance: ServerInstance, kind: type[S]) -> S:
    """Raises GymConfigError. A key that nobody reads is no error, as in NeMo Gym, but it is told."""
    try:
        found = msgspec.convert(instance.settings, kind, strict=False)
    except msgspec.ValidationError as error:
        words = str(error).replace("`$.", "`").replace("Object missing required field", "there is no")
        raise GymConfigError(f"{instance.name} ({instance.kind}/{instance.implementation}): {words}") from None
    known = {one.encode_name for one in msgspec.structs.fields(kind)}
    for key in sorted(set(instance.settings) - known - COMMON):
        near = difflib.get_close_matches(key, known, n=1)
        log.warning("%s: nobody reads %r%s", instance.name, key, f"; did you mean {near[0]}?" if near else "")
    return found
