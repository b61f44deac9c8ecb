"""The base of agents: a row comes in, its result goes out.

Owns: their routes, the rollout's id on calls. Never touches: any loop of turns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import wraps
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.config_types import ROLLOUT_PATH_PREFIX, AggregateMetrics, AggregateMetricsRequest
from nemo_gym.global_config import OBSERVABILITY_ENABLED_KEY_NAME, get_first_server_config_dict
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

__all__ = [
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
    pass


class BaseResponsesAPIAgent(BaseServer):
    config: BaseResponsesAPIAgentConfig  # pyright: ignore[reportIncompatibleVariableOverride]


class SimpleResponsesAPIAgent(BaseResponsesAPIAgent, AggregateMetricsMixin, SimpleServer):
    config: BaseResponsesAPIAgentConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.post("/v1/responses")(self.responses)
        app.post(f"/{ROLLOUT_PATH_PREFIX}/{{rollout_id}}/v1/responses")(self.responses)
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
        settings = getattr(self.server_client, "global_config_dict", None)
        if not isinstance(settings, Mapping) or not settings.get(OBSERVABILITY_ENABLED_KEY_NAME):
            return None
        return maybe_rollout_id_from_run_body(body)

    def url_path_for_run(self, url_path: str, body: Any) -> str:
        """For calls made by `run`: to the model, or to its own `/v1/responses`."""
        return rollout_path_prefix(self.rollout_id_from_run(body)) + url_path

    def base_url_for_run(self, base_url: str, body: Any) -> str:
        """For clients that are told an address once."""
        return apply_rollout_prefix(base_url, self.rollout_id_from_run(body))

    def url_path_for_request(self, url_path: str, request: Request | None) -> str:
        """For calls made by `responses`: the id is in the path it was called by."""
        parameters = getattr(request, "path_params", None)
        found = parameters.get("rollout_id") if isinstance(parameters, Mapping) else None
        return rollout_path_prefix(found) + url_path

    def resolve_model_base_url(self, model_server_name: str, rollout_id: str | None = None) -> str:
        found = get_first_server_config_dict(self.server_client.global_config_dict, model_server_name)
        return apply_rollout_prefix(self.server_client._build_server_base_url(found), rollout_id) + "/v1"

    @abstractmethod
    async def responses(self, body: Annotated[NeMoGymResponseCreateParamsNonStreaming, Body()]) -> NeMoGymResponse: ...

    @abstractmethod
    async def run(self, body: Annotated[BaseRunRequest, Body()]) -> BaseVerifyResponse: ...

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        return compute_aggregate_metrics(body.verify_responses, self.compute_metrics, self.get_key_metrics)
