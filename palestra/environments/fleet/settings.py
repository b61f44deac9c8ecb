"""Settings of a Fleet task in `env_config`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from palestra.environments.fleet.actions import ActionGrammar
from palestra.environments.fleet.prompts import PromptStyle
from palestra.util.json_types import JsonObject
from palestra.util.suggest import nearest

log = logging.getLogger(__name__)

AUTO, PLATFORM, REMOTE, FLEET, MCP, OPENENV = "auto", "platform", "remote", "fleet", "mcp", "openenv"


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`env_config` of the environment `fleet_task`."""

    tasks_file: str | None = None
    api_key: str | None = None
    """The key for hosted Fleet. Default: FLEET_API_KEY."""
    base_url: str | None = None
    """The address of its orchestrator. Default: FLEET_BASE_URL, then the SDK's own."""
    ttl_seconds: int = 600
    """Seconds after which an instance ends that is not closed."""
    backend: str = AUTO
    """platform: the apps here, in this process. remote: those of a `palestra platform serve`. fleet: hosted Fleet, by
    its SDK. mcp: any MCP server. openenv: any OpenEnv server. Or `package.module:factory`. auto: platform if the task's
    app is one of those here, else fleet."""
    mcp: JsonObject = {}
    """For the backend mcp: `url` or `command`, `headers`, `env`, `verifier`."""
    openenv: JsonObject = {}
    """For the backend openenv: `url`, `reset`, `finish`, `headers`."""
    grammar: ActionGrammar = ActionGrammar.LENIENT
    prompt_style: PromptStyle = PromptStyle.FULL
    enable_context_tools: bool = False
    partial_reward: bool = False
    """A score of 0 becomes the share of passed checks; never 1. The score of a long task is the share of its sub-goals
    that are met, less one for each change that the task does not ask for."""
    turn_rewards: bool = False
    """Gives each turn of a long task the share of sub-goals that it has met or undone, and the last turn what is
    missing to the reward of the whole."""
    user: JsonObject = {}
    """The model that plays the users of tasks that have one: `base_url`, `model`, and `api`, `key_env`, `temperature`,
    `timeout_s`. Empty: they are scripted."""
    hints: bool = False
    """Adds to the last step's metadata what the verifier printed and which calls failed."""
    request_timeout_s: float = 60.0
    """Time limit of one tool call."""
    verifier_timeout_s: float = 30.0
    verifier_memory_mib: int = 512

    @classmethod
    def of(cls, env_config: object) -> FleetSettings:
        """Reads any mapping with `get`. Raises ValueError."""
        get = getattr(env_config, "get", None)
        if env_config is not None and get is None:
            raise ValueError(f"env_config should be a mapping, but is a {type(env_config).__name__}")
        found = {name: _plain(value) for name in cls.__struct_fields__ if get and (value := get(name)) is not None}
        _warn_of_others(env_config, cls.__struct_fields__)
        try:
            return msgspec.convert(found, cls, strict=False)
        except msgspec.ValidationError as e:
            raise ValueError(f"env_config: {e}") from None


def _plain(value: Any) -> Any:
    """Converts mappings of other libraries to plain ones."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(key): _plain(one) for key, one in value.items()}
    is_list = not isinstance(value, str) and hasattr(value, "__iter__")
    return [_plain(one) for one in value] if is_list else value


def _warn_of_others(env_config: object, known: tuple[str, ...]) -> None:
    for name in env_config.keys() - set(known) if isinstance(env_config, Mapping) else ():
        near = nearest(name, known)
        log.warning("env_config has the unknown key %r%s", name, f"; {near}?" if near else "")
