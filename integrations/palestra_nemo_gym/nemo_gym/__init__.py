"""The stand-in for NeMo Gym: servers that were written for it import this, and run unchanged in a Palestra gym."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.7.0+palestra"

ROOT_DIR = Path(__file__).absolute().parent
NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME = "NEMO_GYM_EXTRA_ROOTS"
_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
_PUBLIC = {
    "base_resources_server": (
        "BaseMultiRewardVerifyResponse",
        "BaseResourcesServerConfig",
        "BaseRunRequest",
        "BaseSeedSessionRequest",
        "BaseSeedSessionResponse",
        "BaseVerifyRequest",
        "BaseVerifyResponse",
        "ReverifyMode",
        "SimpleResourcesServer",
    ),
    "base_responses_api_agent": ("BaseResponsesAPIAgentConfig", "SimpleResponsesAPIAgent"),
    "base_responses_api_model": ("BaseResponsesAPIModelConfig", "SimpleResponsesAPIModel"),
    "config_types": (
        "AggregateMetrics",
        "AggregateMetricsRequest",
        "BaseRunServerInstanceConfig",
        "BaseServerConfig",
        "Domain",
        "ModelServerRef",
    ),
    "openai_utils": (
        "NeMoGymAsyncOpenAI",
        "NeMoGymChatCompletion",
        "NeMoGymChatCompletionCreateParamsNonStreaming",
        "NeMoGymResponse",
        "NeMoGymResponseCreateParamsNonStreaming",
    ),
    "server_utils": ("SESSION_ID_KEY", "ServerClient", "get_response_json", "raise_for_status"),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]
    "CACHE_DIR",
    "PARENT_DIR",
    "RESULTS_DIR",
    "ROOT_DIR",
    "WORKING_DIR",
    "component_search_roots",
    *_HOMES,
]


def _parent() -> Path:
    """The folder that has `resources_servers` and its like: servers run in their own folder, two below it."""
    here = Path.cwd()
    found = (folder for folder in (here, *here.parents) if any((folder / kind).is_dir() for kind in _KINDS))
    return next(found, here)


PARENT_DIR = _parent()
WORKING_DIR = PARENT_DIR
CACHE_DIR = WORKING_DIR / "cache"
RESULTS_DIR = WORKING_DIR / "results"


def component_search_roots() -> list[Path]:
    """Where relative paths are looked for, nearest first."""
    extra = [Path(one) for one in os.environ.get(NEMO_GYM_EXTRA_ROOTS_ENV_VAR_NAME, "").split(os.pathsep) if one]
    return list(dict.fromkeys([*extra, Path.cwd(), PARENT_DIR]))


def _resolve_under_cwd_or_install(rel_path: str | Path, *, validator: Callable[[Path], bool] | None = None) -> Path:
    """The first below the roots that exists; else where it would be."""
    roots = component_search_roots()
    is_valid = validator or Path.exists
    return next((root / rel_path for root in roots if is_valid(root / rel_path)), roots[0] / rel_path)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'nemo_gym' has no attribute {name!r}")
    return getattr(import_module(f"nemo_gym.{home}"), name)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.extend(str(root) for root in component_search_roots() if str(root) not in sys.path)
