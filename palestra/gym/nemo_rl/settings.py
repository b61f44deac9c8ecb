"""The config that NeMo RL gives to a gym."""

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
"""Keys of NeMo RL itself that stand beside those of the gym."""


class NemoRlSettings(Struct, frozen=True, kw_only=True):
    model_name: str
    base_urls: list[str]
    """Addresses of the engine's replicas; a session stays with its replica."""
    initial_global_config_dict: JsonObject = {}
    """`env.nemo_gym`: config_paths, and the values that override them."""
    port_range_low: int = PORT_LOW
    port_range_high: int = PORT_HIGH
    invalid_tool_call_patterns: list[str] | None = None
    thinking_tags: list[str] | None = None
    is_strict: bool = False
    """End the stream with the first row that fails or whose tokens do not continue each other, as NeMo Gym does."""
    has_tensors: bool = True
    """Return ids and logprobs as torch tensors, which NeMo RL needs; False: as lists."""
    attempts: int = 3
    """Attempts at a row that fails."""
    row_timeout_s: float = 3600.0

    @property
    def invalid_tool_calls(self) -> tuple[str, ...]:
        return tuple(self.invalid_tool_call_patterns or INVALID_TOOL_CALLS)

    @property
    def thoughts(self) -> tuple[str, ...]:
        return tuple(self.thinking_tags or THINKING_TAGS)

    def sources(self) -> GymSources:
        """Returns the sources of the config. The servers are called from this machine only, so loopback is the
        default."""
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


def read_nemo_rl_settings(given: JsonMapping) -> NemoRlSettings:
    """Reads the settings. Raises GymConfigError. Unsupported keys are allowed as long as they are off."""
    known = {one.name for one in msgspec.structs.fields(NemoRlSettings)}
    for key, value in given.items():
        if key in known or key in WITHOUT_EFFECT or not value:
            continue
        why = UNSUPPORTED.get(key, f"there are: {', '.join(sorted(known))}")
        raise GymConfigError(f"{key}={value!r} is not supported: {why}")
    try:
        return msgspec.convert({key: given[key] for key in known if given.get(key) is not None}, NemoRlSettings)
    except msgspec.ValidationError as error:
        raise GymConfigError(f"the config of the gym: {error}") from None
