"""The base of agents: a row comes in, its result goes out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import wraps
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from pydantic import Field

from nemo_gym.agent_sessions import (
    AgentCloseSessionResponse,
    AgentSeedSessionRequest,
    AgentSessions,
    AgentSessionState,
)
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.config_types import (
    ROLLOUT_PATH_PREFIX,
    TOKEN_CAPTURE_PATH_SEGMENT,
    AggregateMetrics,
    AggregateMetricsRequest,
)
from nemo_gym.global_config import (
    OBSERVABILITY_ENABLED_KEY_NAME,
    TOKEN_ID_CAPTURE_BLOCK,
    get_first_server_config_dict,
)
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.reward_profile import AggregateMetricsMixin, compute_aggregate_metrics
from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body, rollout_context
from nemo_gym.server_utils import (
    BaseRunServerInstanceConfig,
    BaseServer,
    SimpleServer,
    apply_rollout_prefix,
    rollout_path_prefix,
)
from nemo_gym.tool_access import ToolAccess

__all__ = [
    "AgentCloseSessionResponse",
    "AgentSeedSessionRequest",
    "AgentSessionState",
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseResponsesAPIAgent",
    "BaseResponsesAPIAgentConfig",
    "BaseRunRequest",
    "BaseVerifyResponse",
    "Body",
    "SimpleResponsesAPIAgent",
]


class BaseResponsesAPIAgentConfig(BaseRunServerInstanceConfig):
    skip_verification: bool = False
    skip_verification_reward: float = 0.0
    token_id_capture: bool = False
    """Let the model server record the tokens of this agent's calls, where the gym's `token_id_capture` is enabled."""
    tool_accesses: list[ToolAccess] = Field(default_factory=list)


class BaseResponsesAPIAgent(BaseServer):
    config: BaseResponsesAPIAgentConfig  # pyright: ignore[reportIncompatibleVariableOverride]


class SimpleResponsesAPIAgent(BaseResponsesAPIAgent, AgentSessions, AggregateMetricsMixin, SimpleServer):
    config: BaseResponsesAPIAgentConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.post("/v1/responses")(self.responses)
        recorded = f"/{ROLLOUT_PATH_PREFIX}/{{rollout_id}}"
        app.post(f"{recorded}/v1/responses")(self.responses)
        app.post(f"{recorded}/{TOKEN_CAPTURE_PATH_SEGMENT}/v1/responses")(self.responses)
        app.post("/run")(self._run_in_context())
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        return app

    def _run_in_context(self) -> Any:
        """`run`, whose calls know which rollout they are for. FastAPI sees the signature of the original."""
        run = self.run

        @wraps(run)
        async def in_context(*args: Any, **kwargs: Any) -> Any:
            body = kwargs.get("body") or next((one for one in args if isinstance(one, BaseRunRequest)), None)
            with rollout_context(self.rollout_id_from_run(body)):
                return await run(*args, **kwargs)

        return in_context

    def rollout_id_from_run(self, body: Any) -> str | None:
        """None where calls are not recorded."""
        return maybe_rollout_id_from_run_body(body) if self._capture_correlation_enabled() else None

    def _setting(self, name: str) -> Any:
        settings = getattr(self.server_client, "global_config_dict", None)
        return settings.get(name) if isinstance(settings, Mapping) else None

    def _model_call_capture_enabled(self) -> bool:
        return bool(self._setting(OBSERVABILITY_ENABLED_KEY_NAME))

    def _token_id_capture_enabled(self) -> bool:
        """For this agent: by its own config, or for all agents of the gym."""
        gym = self._setting(TOKEN_ID_CAPTURE_BLOCK)
        is_enabled = isinstance(gym, Mapping) and gym.get("enabled")
        return bool(is_enabled and (gym.get("all_agents") or self.config.token_id_capture))

    def _capture_correlation_enabled(self) -> bool:
        return self._model_call_capture_enabled() or self._token_id_capture_enabled()

    def url_path_for_run(self, url_path: str, body: object) -> str:
        """For calls made by `run`: to the model, or to its own `/v1/responses`."""
        captures = self._token_id_capture_enabled()
        return rollout_path_prefix(self.rollout_id_from_run(body), token_capture=captures) + url_path

    def base_url_for_run(self, base_url: str, body: object) -> str:
        """For clients that are told an address once."""
        captures = self._token_id_capture_enabled()
        return apply_rollout_prefix(base_url, self.rollout_id_from_run(body), token_capture=captures)

    def url_path_for_request(self, url_path: str, request: Request | None) -> str:
        """For calls made by `responses`: the id is in the path it was called by."""
        parameters = getattr(request, "path_params", None)
        found = parameters.get("rollout_id") if isinstance(parameters, Mapping) else None
        path = getattr(getattr(request, "url", None), "path", "")
        return rollout_path_prefix(found, token_capture=f"/{TOKEN_CAPTURE_PATH_SEGMENT}/" in path) + url_path

    def resolve_model_base_url(self, model_server_name: str, rollout_id: str | None = None) -> str:
        found = get_first_server_config_dict(self.server_client.global_config_dict, model_server_name)
        base_url = self.server_client._build_server_base_url(found)
        return f"{apply_rollout_prefix(base_url, rollout_id, token_capture=self._token_id_capture_enabled())}/v1"

    @abstractmethod
    async def responses(self, body: Annotated[NeMoGymResponseCreateParamsNonStreaming, Body()]) -> NeMoGymResponse: ...

    @abstractmethod
    async def run(self, body: Annotated[BaseRunRequest, Body()]) -> BaseVerifyResponse: ...

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        return compute_aggregate_metrics(body.verify_responses, self.compute_metrics, self.get_key_metrics)
