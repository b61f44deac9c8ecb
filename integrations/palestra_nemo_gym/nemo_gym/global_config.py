"""The merged config of the gym, as a server of it gets it: in an environment variable."""

from __future__ import annotations

import os
import random
import socket
from functools import lru_cache
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict

NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME = "NEMO_GYM_CONFIG_DICT"
NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME = "NEMO_GYM_CONFIG_PATH"
CONFIG_PATHS_KEY_NAME = "config_paths"
ENTRYPOINT_KEY_NAME = "entrypoint"
DEFAULT_HOST_KEY_NAME = "default_host"
HEAD_SERVER_KEY_NAME = "head_server"
DISALLOWED_PORTS_KEY_NAME = "disallowed_ports"
PYTHON_VERSION_KEY_NAME = "python_version"
USE_ABSOLUTE_IP = "use_absolute_ip"
HF_TOKEN_KEY_NAME = "hf_token"
RAY_HEAD_NODE_ADDRESS_KEY_NAME = "ray_head_node_address"
PORT_RANGE_LOW_KEY_NAME = "port_range_low"
PORT_RANGE_HIGH_KEY_NAME = "port_range_high"
DRY_RUN_KEY_NAME = "dry_run"
VERBOSE_KEY_NAME = "verbose"
OBSERVABILITY_ENABLED_KEY_NAME = "observability_enabled"
MODEL_CALL_CAPTURE_DIR_KEY_NAME = "model_call_capture_dir"
TOKEN_ID_CAPTURE_BLOCK = "token_id_capture"
CACHE_DIR_KEY_NAME = "cache_dir"
RESULTS_DIR_KEY_NAME = "results_dir"

TASK_INDEX_KEY_NAME = "_ng_task_index"
ROLLOUT_INDEX_KEY_NAME = "_ng_rollout_index"
ROLLOUT_ID_KEY_NAME = "_ng_rollout_id"
ATTEMPT_INDEX_KEY_NAME = "_ng_attempt_index"
RESPONSES_CREATE_PARAMS_KEY_NAME = "responses_create_params"
RESPONSE_KEY_NAME = "response"
AGENT_REF_KEY_NAME = "agent_ref"
SKILLS_REF_KEY_NAME = "skills_ref"

POLICY_BASE_URL_KEY_NAME = "policy_base_url"
POLICY_API_KEY_KEY_NAME = "policy_api_key"
POLICY_MODEL_NAME_KEY_NAME = "policy_model_name"
POLICY_MODEL_KEY_NAME = "policy_model"

DEFAULT_HEAD_SERVER_PORT = 11000
LOWEST_PORT, HIGHEST_PORT = 10_001, 20_000
PORT_TRIES = 50


def get_global_config_dict(*_: object, **__: object) -> DictConfig:
    """Raises RuntimeError outside a gym."""
    return _read(os.environ.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, ""))


def maybe_get_global_config_dict() -> DictConfig | None:
    """None outside a gym."""
    return get_global_config_dict() if os.environ.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME) else None


@lru_cache(maxsize=1)
def _read(text: str) -> DictConfig:
    made = OmegaConf.create(text)
    if not text or not isinstance(made, DictConfig):
        raise RuntimeError(
            f"{NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME} is not set: this is a server of a gym, which gives it its config. "
            "Type: palestra gym run -c FILE"
        )
    return made


def get_first_server_config_dict(global_config_dict: Any, top_level_path: str) -> Any:
    """The settings of a server by its name, below its kind and its implementation. Raises KeyError."""
    entry = global_config_dict.get(top_level_path)
    if entry is None:
        raise KeyError(f"there is no server {top_level_path!r} in this gym")
    of_kind = next(iter(entry.values()))
    return next(iter(of_kind.values()))


class GlobalConfigDictParserConfig(BaseModel):
    """For tests of a server's verifier, which NeMo Gym's own commands run."""

    model_config = ConfigDict(extra="allow")

    NO_MODEL_GLOBAL_CONFIG_DICT: ClassVar[DictConfig] = OmegaConf.create({})


class GlobalConfigDictParser:
    def parse(self, parse_config: GlobalConfigDictParserConfig | None = None) -> DictConfig:
        raise NotImplementedError("a server is given its config here; to see one: palestra gym resolve -c FILE")


def get_hf_token() -> str | None:
    return get_global_config_dict().get(HF_TOKEN_KEY_NAME)


def get_wandb_run() -> None:
    """Tracking is the collection's: a server has no run."""
    return


def find_open_port(disallowed_ports: list[int] | None = None, max_retries: int = PORT_TRIES) -> int:
    """In the gym's range. Raises RuntimeError where none is found in as many tries."""
    config = get_global_config_dict()
    low, high = config.get(PORT_RANGE_LOW_KEY_NAME, LOWEST_PORT), config.get(PORT_RANGE_HIGH_KEY_NAME, HIGHEST_PORT)
    taken = set(disallowed_ports or ())
    for _ in range(max_retries):
        port = random.randint(low, high)
        with socket.socket() as probe:
            if port not in taken and probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError(f"no free port between {low} and {high} in {max_retries} tries")
