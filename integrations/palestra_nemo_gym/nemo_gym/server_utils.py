"""The base of every server, and the client by which servers call each other by name."""

from __future__ import annotations

import difflib
import logging
import os
import urllib.error
import urllib.request
from abc import abstractmethod
from typing import Any, ClassVar, Unpack

from aiohttp import ClientResponse
from aiohttp.client import _RequestOptions
from fastapi import FastAPI
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict

from nemo_gym.calls import (
    MAX_NUM_TRIES,
    GlobalAIOHTTPAsyncClientConfig,
    get_global_aiohttp_client,
    get_response_json,
    is_global_aiohttp_client_request_debug_enabled,
    is_global_aiohttp_client_setup,
    raise_for_status,
    request,
    set_global_aiohttp_client,
)
from nemo_gym.config_types import (
    ROLLOUT_PATH_PREFIX,
    TOKEN_CAPTURE_PATH_SEGMENT,
    BaseRunServerInstanceConfig,
    BaseServerConfig,
)
from nemo_gym.global_config import (
    HEAD_SERVER_KEY_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    OBSERVABILITY_ENABLED_KEY_NAME,
    get_first_server_config_dict,
    get_global_config_dict,
)
from nemo_gym.middleware import add_exception_handling, add_sessions
from nemo_gym.rollout_correlation import current_rollout_id, maybe_rollout_id_from_run_body
from nemo_gym.serving import is_nemo_gym_fastapi_entrypoint, serve

__all__ = [
    "MAX_NUM_TRIES",
    "SESSION_ID_KEY",
    "BaseRunServerInstanceConfig",
    "BaseServer",
    "BaseServerConfig",
    "ClientResponse",
    "GlobalAIOHTTPAsyncClientConfig",
    "ServerClient",
    "SimpleServer",
    "apply_rollout_prefix",
    "get_first_server_config_dict",
    "get_global_aiohttp_client",
    "get_global_config_dict",
    "get_response_json",
    "get_server_url",
    "is_global_aiohttp_client_request_debug_enabled",
    "is_global_aiohttp_client_setup",
    "is_nemo_gym_fastapi_entrypoint",
    "raise_for_status",
    "request",
    "rollout_path_prefix",
    "set_global_aiohttp_client",
]

log = logging.getLogger("nemo_gym")

_FOR_THE_GYM = frozenset(
    [
        "datasets",
        "verified",
        "verified_url",
        "description",
        "value",
        "isolation",
        "expose_tools_over_mcp",
        "skip_verification",
        "skip_verification_reward",
        "token_id_capture",
    ]
)
"""Settings of any server: the gym reads them, or they are for people."""

SESSION_ID_KEY = "session_id"
POLL_S = 5.0
REPEATABLE = ("/seed_session", "/verify", "/aggregate_metrics", "/reset", "/close", "/close_session")
"""Said twice they do what they do once."""
_MODEL_PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")


def rollout_path_prefix(rollout_id: str | None, *, token_capture: bool = False) -> str:
    """`token_capture`: the model server records the call's tokens, too."""
    if not rollout_id:
        return ""
    return f"/{ROLLOUT_PATH_PREFIX}/{rollout_id}" + (f"/{TOKEN_CAPTURE_PATH_SEGMENT}" if token_capture else "")


def apply_rollout_prefix(base_url: str, rollout_id: str | None, *, token_capture: bool = False) -> str:
    """For clients that are told an address once."""
    prefix = rollout_path_prefix(rollout_id, token_capture=token_capture)
    return base_url.rstrip("/") + prefix if prefix else base_url


def get_server_url(server_name: str) -> str:
    found = get_first_server_config_dict(get_global_config_dict(), server_name)
    return f"http://{found['host']}:{found['port']}"


class ServerClient(BaseModel):
    """Calls servers by their names. An answer of any status is an answer; none at all is an error."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    head_server_config: BaseServerConfig
    global_config_dict: DictConfig

    @classmethod
    def load_head_server_config(cls) -> BaseServerConfig:
        return BaseServerConfig.model_validate(get_global_config_dict()[HEAD_SERVER_KEY_NAME])

    @classmethod
    def load_from_global_config(cls, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """A client for the gym that this process is part of."""
        return cls(
            head_server_config=head_server_config or cls.load_head_server_config(),
            global_config_dict=get_global_config_dict(),
        )

    def _build_server_base_url(self, server_config_dict: Any) -> str:
        return f"http://{server_config_dict['host']}:{server_config_dict['port']}"

    async def request(
        self, server_name: str, url_path: str, method: str, **kwargs: Unpack[_RequestOptions]
    ) -> ClientResponse:
        found = get_first_server_config_dict(self.global_config_dict, server_name)
        body = kwargs.get("json")
        if isinstance(body, BaseModel):
            kwargs["json"] = body = body.model_dump(exclude_unset=True)
        path = self._with_rollout(server_name, url_path, body)
        tries = MAX_NUM_TRIES if self._may_repeat(server_name, url_path, method) else 1
        url = f"{self._build_server_base_url(found)}{path}"
        return await request(method, url, _internal=True, _tries=tries, **kwargs)

    async def get(self, server_name: str, url_path: str, **kwargs: Unpack[_RequestOptions]) -> ClientResponse:
        return await self.request(server_name=server_name, url_path=url_path, method="GET", **kwargs)

    async def post(self, server_name: str, url_path: str, **kwargs: Unpack[_RequestOptions]) -> ClientResponse:
        return await self.request(server_name=server_name, url_path=url_path, method="POST", **kwargs)

    def poll_for_status(self, server_name: str) -> str:
        """Whether it is there: `success`, `connection_error`, `timeout` or `unknown_error`. Blocks, for a while."""
        is_head = server_name == HEAD_SERVER_KEY_NAME
        settings = self.global_config_dict
        found = settings[server_name] if is_head else get_first_server_config_dict(settings, server_name)
        try:
            with urllib.request.urlopen(self._build_server_base_url(found), timeout=POLL_S):
                return "success"
        except urllib.error.HTTPError:
            return "success"  # it answers
        except TimeoutError:
            return "timeout"
        except OSError:
            return "connection_error"
        except Exception:  # of an address that is none
            return "unknown_error"

    def _may_repeat(self, server_name: str, url_path: str, method: str) -> bool:
        """A model keeps nothing. A tool's call is not sent again once it may have begun."""
        entry = self.global_config_dict.get(server_name) or {}
        return method == "GET" or "responses_api_models" in entry or url_path in REPEATABLE

    def _with_rollout(self, server_name: str, url_path: str, body: Any) -> str:
        """Where calls are recorded, the path says for which rollout."""
        if not self.global_config_dict.get(OBSERVABILITY_ENABLED_KEY_NAME) or url_path.startswith(
            f"/{ROLLOUT_PATH_PREFIX}/"
        ):
            return url_path
        entry = self.global_config_dict.get(server_name) or {}
        rollout_id = current_rollout_id()
        if "resources_servers" in entry:
            if url_path == "/verify":
                rollout_id = rollout_id or maybe_rollout_id_from_run_body(body)
            return rollout_path_prefix(rollout_id) + url_path
        if "responses_api_models" in entry and url_path.partition("?")[0] in _MODEL_PATHS:
            return rollout_path_prefix(rollout_id) + url_path
        return url_path


def _tell_ignored(name: str, given: dict[Any, Any], config_class: type[BaseModel]) -> None:
    known = {*config_class.model_fields, *(field.alias for field in config_class.model_fields.values() if field.alias)}
    for key in sorted(map(str, given.keys() - known - _FOR_THE_GYM)):
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        log.warning("%s: %s does not know the setting %r%s", name, config_class.__name__, key, hint)


class BaseServer(BaseModel):
    config: BaseRunServerInstanceConfig

    @classmethod
    def load_config_from_global_config(cls) -> BaseRunServerInstanceConfig:
        """The config of the server that this process is. Raises pydantic's ValidationError, also for unknown keys
        where the class forbids them; where it ignores them, as pydantic does by default, the log has them."""
        settings = get_global_config_dict()
        name = os.environ[NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME]
        found = get_first_server_config_dict(settings, name)
        plain = OmegaConf.to_container(found, resolve=True)
        assert isinstance(plain, dict)
        config_class: Any = cls.model_fields["config"].annotation
        if config_class.model_config.get("extra", "ignore") == "ignore":
            _tell_ignored(name, plain, config_class)
        return config_class.model_validate({**plain, "name": name})

    def setup_liveness(self, app: FastAPI) -> None:
        @app.get("/", include_in_schema=False)
        @app.get("/health", include_in_schema=False)
        @app.get("/healthz", include_in_schema=False)
        @app.get("/livez", include_in_schema=False)
        @app.get("/readyz", include_in_schema=False)
        async def alive() -> dict[str, str]:
            return {"status": "ok"}


class SimpleServer(BaseServer):
    server_client: ServerClient
    ray_enabled: ClassVar[bool | None] = None
    """Nothing to us: a server that uses Ray starts it."""

    @abstractmethod
    def setup_webserver(self) -> FastAPI: ...

    def get_session_middleware_key(self) -> str:
        """The name of its cookie."""
        return f"{self.__class__.__name__}___{self.config.name}"

    def keeps_sessions(self) -> bool:
        """Whether a session is lost with the process."""
        return False

    def setup_session_middleware(self, app: FastAPI) -> None:
        add_sessions(app, self.get_session_middleware_key(), self.keeps_sessions())

    def setup_exception_middleware(self, app: FastAPI) -> None:
        add_exception_handling(app, self.get_session_middleware_key())

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        """Until it is told to end. In a worker: its app, which uvicorn serves."""
        return serve(cls)
