"""What NeMo RL says to its bridge, and the gym that is meant by it.

Owns: the keys of its config, what of them is refused. Never touches: servers.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from palestra.gym.config import GymSources
from palestra.gym.errors import GymConfigError
from palestra.util.json_types import JsonMapping, JsonObject

ENV_FILE = Path("nemo_gym_env.yaml")
PORT_LOW, PORT_HIGH = 5000, 5999
INVALID_TOOL_CALLS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
THINKING_TAGS = ("<think>", "</think>")
UNSUPPORTED = {
    "require_routed_experts": "experts are not replayed",
    "tokenizer_config": "images are not processed",
    "pad_dynamic_image_shapes": "images are not processed",
    "token_capture": "tokens come with the answers; leave it out",
}
WITHOUT_EFFECT = ("use_fastokens", "routed_experts_dtype")
TRAINERS_OWN = ("effort_levels", "is_trajectory_collection", "num_gpu_nodes", *UNSUPPORTED)
"""Keys that NeMo RL keeps beside a gym's own."""


class BridgeSettings(Struct, frozen=True, kw_only=True):
    model_name: str
    base_urls: list[str]
    """One for each replica of the engine; a session stays with its own."""
    initial_global_config_dict: JsonObject = {}
    """`env.nemo_gym`: config_paths, and what is laid over them."""
    port_range_low: int = PORT_LOW
    port_range_high: int = PORT_HIGH
    invalid_tool_call_patterns: list[str] | None = None
    thinking_tags: list[str] | None = None
    is_strict: bool = False
    """As NeMo Gym's: the first row that fails ends the stream, and so does one whose tokens do not hang together."""
    has_tensors: bool = True
    """Ids and logprobs as torch's, which NeMo RL wants. False: lists."""
    attempts: int = 3
    """How often a row that fails is played."""
    row_timeout_s: float = 3600.0

    @property
    def invalid_tool_calls(self) -> tuple[str, ...]:
        return tuple(self.invalid_tool_call_patterns or INVALID_TOOL_CALLS)

    @property
    def thoughts(self) -> tuple[str, ...]:
        return tuple(self.thinking_tags or THINKING_TAGS)

    def sources(self) -> GymSources:
        """The servers are called from the bridge's own machine only, so that loopback will do for them, unless the
        config says otherwise."""
        given = {key: value for key, value in self.initial_global_config_dict.items() if key not in TRAINERS_OWN}
        policy = {
            "policy_model_name": self.model_name,
            "policy_api_key": "dummy_key",
            "policy_base_url": self.base_urls,
            "port_range_low": self.port_range_low,
            "port_range_high": self.port_range_high,
        }
        head = {"head_server": {"host": "127.0.0.1", "port": 0}}
        return GymSources(initial={**head, **given, **policy}, env_file=ENV_FILE if ENV_FILE.is_file() else None)


def read_bridge_settings(given: JsonMapping) -> BridgeSettings:
    """Raises GymConfigError. Keys that mean nothing here may be there as long as they are off."""
    known = {one.name for one in msgspec.structs.fields(BridgeSettings)}
    for key, value in given.items():
        if key in known or key in WITHOUT_EFFECT or not value:
            continue
        why = UNSUPPORTED.get(key, f"there are: {', '.join(sorted(known))}")
        raise GymConfigError(f"the bridge does not support {key}={value!r}: {why}")
    try:
        return msgspec.convert({key: given[key] for key in known if given.get(key) is not None}, BridgeSettings)
    except msgspec.ValidationError as error:
        raise GymConfigError(f"the bridge's config: {error}") from None
