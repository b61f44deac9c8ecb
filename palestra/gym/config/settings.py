"""The settings beside the servers: NeMo Gym's top-level keys, and our own below `gym`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.gym.errors import GymConfigError
from palestra.gym.records import Isolation
from palestra.gym.search_folders import did_you_mean
from palestra.util.json_types import JsonObject

OURS = "gym"
CONFIG_PATHS = "config_paths"
HEAD = "head_server"
HEAD_PORT = 11000
READINESS = "model_endpoint_readiness_timeout_seconds"
COPIED_TO_AGENTS = ("skip_verification", "skip_verification_reward")

_RESERVED = """config_paths entrypoint default_host head_server disallowed_ports head_server_deps python_version
    pip_install_verbose use_absolute_ip uv_pip_set_python skip_venv_if_present hf_token ray_head_node_address
    port_range_low port_range_high dry_run model_endpoint_readiness_timeout_seconds allow_openai_version_skew
    uv_cache_dir uv_venv_dir results_dir cache_dir _inherit_from _copy nemo_gym_log_dir verbose json query
    observability_enabled model_call_capture_dir token_id_capture component_name skip_verification
    skip_verification_reward gym"""
_OTHERS = """policy_base_url policy_api_key policy_model_name global_aiohttp_connector_limit
    global_aiohttp_connector_limit_per_host global_aiohttp_client_request_debug
    global_aiohttp_tcp_keepalive_idle_seconds global_aiohttp_tcp_keepalive_interval_seconds
    global_aiohttp_tcp_keepalive_probes profiling_enabled profiling_results_dirpath uvicorn_logging_show_200_ok
    uvicorn_timeout_worker_healthcheck error_on_almost_servers upload_rollouts wandb_project wandb_name wandb_api_key
    mlflow_tracking_uri mlflow_tracking_token mlflow_experiment_name mlflow_run_name peer_timeout_s peer_reconnect_s"""

RESERVED = frozenset(_RESERVED.split())
"""Keys that are never the name of a server."""
KNOWN = RESERVED | frozenset(_OTHERS.split())

DEFAULTS = {
    "use_absolute_ip": False,
    "port_range_low": 10_001,
    "port_range_high": 20_000,
    "skip_venv_if_present": False,
    "dry_run": False,
    READINESS: 600,
}


class OurSettings(BaseModel):
    """`gym:` in a file, `gym.KEY=VALUE` on the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    isolation: Isolation = Isolation.SHARED
    """For servers that do not set it themselves and have no requirements of their own."""
    use_stock: list[str] = []
    """Implementations of ours, such as `simple_agent`, to be taken from a folder of NeMo Gym's instead."""
    allow_setup: list[str] = []
    """Folders of NeMo Gym's, such as `cline_agent`, whose own set-up code may run as you; it may install programs."""
    ray: bool = False
    """Place servers on a Ray cluster. Also set by `ray_head_node_address`."""
    admin_key: str | None = None
    """Key for the head server's config route, if it listens beyond loopback. By default one is made."""
    ready_timeout_s: float = Field(default=300, gt=0)
    """Seconds from its start until a server must be healthy, without the time to build its venv."""
    probe_interval_s: float = Field(default=2, gt=0)
    """Seconds between two health checks of a server."""
    probe_timeout_s: float = Field(default=10, gt=0)
    """How long a server may take to answer a health check."""
    probe_failures: int = Field(default=3, ge=1)
    """After this number of failed checks in a row a server counts as hung: it is killed and restarted."""
    max_restarts: int = Field(default=6, ge=0)
    """After this number of restarts in a row the gym gives up. A healthy minute resets the count."""
    stop_timeout_s: float = Field(default=3, gt=0)
    """Seconds after which a server that was told to stop is killed."""


def our_settings(settings: JsonObject) -> OurSettings:
    given = settings.get(OURS) or {}
    if not isinstance(given, dict):
        raise GymConfigError(f"{OURS}: should be a mapping of settings, but is {given!r}")
    try:
        return OurSettings.model_validate(given)
    except ValidationError as error:
        raise GymConfigError("\n".join(_problem(one) for one in error.errors())) from None


def is_on_ray(settings: JsonObject) -> bool:
    return bool(settings.get("ray_head_node_address")) or our_settings(settings).ray


def _problem(error: Any) -> str:
    key = ".".join([OURS, *map(str, error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown setting{did_you_mean(str(error['loc'][-1]), OurSettings.model_fields)}"
    return f"{key}: {error['msg'][:1].lower()}{error['msg'][1:]}, is {error['input']!r}"


def check_settings(settings: JsonObject) -> None:
    """Checks the settings that users of this module compute with."""
    low, high = settings["port_range_low"], settings["port_range_high"]
    if not (isinstance(low, int) and isinstance(high, int) and 1 <= low <= high <= 65535):
        raise GymConfigError(f"port_range_low={low!r}, port_range_high={high!r}: should be two ports, low before high")
    wait_s = settings[READINESS]
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or wait_s < 0:
        raise GymConfigError(f"{READINESS}: should be a number of seconds, or 0 to skip the check, but is {wait_s!r}")
    head = settings.get(HEAD) or {}
    if not isinstance(head, dict):
        raise GymConfigError(f"{HEAD}: should be a mapping with host and port, but is {head!r}")
    port = head.get("port")
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536):
        raise GymConfigError(f"{HEAD}.port: should be from 0 (any) to 65535, but is {port!r}")
    our_settings(settings)
