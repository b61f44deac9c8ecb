"""The base of resources servers: sessions are seeded, tools called, rollouts judged."""

from __future__ import annotations

from abc import abstractmethod
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.episode_types import EpisodeId, EpisodeModel, TaskId
from nemo_gym.json_types import JsonObject
from nemo_gym.judge import judge_failsafe
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.reward_profile import AggregateMetricsMixin, compute_aggregate_metrics
from nemo_gym.rollout_correlation import RolloutContextMiddleware
from nemo_gym.sandbox.access import SandboxAccess
from nemo_gym.server_utils import BaseRunServerInstanceConfig, BaseServer, SimpleServer

NEMO_GYM_MCP_SESSION_TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
NEMO_GYM_MCP_METADATA_KEY = "mcp"
RESERVED_MCP_TOOL_NAMES = frozenset({"verify", "seed_session", "close_session", "aggregate_metrics", "mcp"})
VerificationInputT = TypeVar("VerificationInputT")


def normalize_tool_name(name: str, server_name: str | None = None) -> str:
    """`mcp__<server>__<tool>` is `<tool>`: of that server, where one is given."""
    if not name.startswith("mcp__"):
        return name
    if server_name is not None:
        return name.removeprefix(f"mcp__{server_name}__")
    _, _, rest = name.removeprefix("mcp__").partition("__")
    return rest or name


class ReverifyMode(StrEnum):
    STATELESS = "stateless"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


class BaseResourcesServerConfig(BaseRunServerInstanceConfig):
    expose_tools_over_mcp: bool = False
    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.UNKNOWN


class BaseResourcesServer(BaseServer):
    config: BaseResourcesServerConfig  # pyright: ignore[reportIncompatibleVariableOverride]


class BaseRunRequest(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    capture_rollout_id: str | None = Field(default=None, alias="_ng_rollout_id", exclude=True)


class BaseVerifyRequest(BaseRunRequest):
    response: NeMoGymResponse


class BaseVerifyResponse(BaseVerifyRequest):
    reward: float
    mask_sample: bool = False
    """The reward says nothing about the policy: not to be trained on."""
    failure_kind: str | None = None
    """One of `nemo_gym.failure_kinds`, or `<server>:<kind>`."""
    failure_reason: str | None = None


class BaseMultiRewardVerifyResponse(BaseVerifyResponse):
    """`reward` is the sum of the components, whose names are the same for every task."""

    reward_components: dict[str, float]


class BaseSeedSessionRequest(BaseModel):
    pass


class BaseSeedSessionResponse(BaseModel):
    pass


class MCPServerMetadata(BaseModel):
    """How an agent reaches the tools of its session over MCP."""

    server_name: str
    url_path: str = "/mcp"
    transport: str = "http"
    headers: dict[str, str]


class ResourcesSeedSessionRequest(EpisodeModel):
    """A session whose id the caller chose: said twice, it is one session."""

    resources_session_id: str = Field(min_length=1)
    episode_id: EpisodeId
    task_id: TaskId
    task_data: JsonObject


class ResourcesSeedSessionResponse(EpisodeModel):
    resources_session_id: str
    resources_tools: MCPServerMetadata | None = None
    sandbox_access: SandboxAccess | None = None


class ResourcesVerifyRequest(EpisodeModel, Generic[VerificationInputT]):
    episode_id: EpisodeId
    task_id: TaskId
    verification_input: VerificationInputT


class ResourcesCloseSessionRequest(EpisodeModel):
    resources_session_id: str
    episode_id: EpisodeId


class ResourcesCloseSessionResponse(EpisodeModel):
    resources_session_id: str


class SimpleResourcesServer(BaseResourcesServer, AggregateMetricsMixin, SimpleServer):
    config: BaseResourcesServerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.add_middleware(RolloutContextMiddleware)
        app.post("/seed_session")(self.seed_session)
        app.post("/close_session")(self.close_resources_session)
        app.post("/verify")(judge_failsafe(self.verify))
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        app.get("/reverify_mode")(self.get_reverify_mode)
        return app

    def keeps_sessions(self) -> bool:
        return self.config.REVERIFY_MODE is not ReverifyMode.STATELESS

    def normalize_tool_name(self, name: str) -> str:
        return normalize_tool_name(name, self.config.name)

    def mcp_tools(self, harvested: list[Any], catchall: object) -> list[Any] | None:
        """Which tools are shown over MCP; more of them come from `catchall.tool(name, schema, description)`."""
        return harvested

    def mcp_allowed_tools_for_session(self, seed_body: JsonObject) -> list[str] | None:
        """None: all."""
        return None

    async def seed_session(
        self, body: ResourcesSeedSessionRequest | BaseSeedSessionRequest
    ) -> ResourcesSeedSessionResponse | BaseSeedSessionResponse:
        if isinstance(body, ResourcesSeedSessionRequest):
            return ResourcesSeedSessionResponse(resources_session_id=body.resources_session_id)
        return BaseSeedSessionResponse()

    async def close_resources_session(self, body: ResourcesCloseSessionRequest) -> ResourcesCloseSessionResponse:
        """For servers that keep something to be released."""
        return ResourcesCloseSessionResponse(resources_session_id=body.resources_session_id)

    @abstractmethod
    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse: ...

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        return compute_aggregate_metrics(body.verify_responses, self.compute_metrics, self.get_key_metrics)

    async def get_reverify_mode(self) -> ReverifyMode:
        return self.config.REVERIFY_MODE
