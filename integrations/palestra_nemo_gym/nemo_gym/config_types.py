"""The parts of a config that servers see."""

from enum import StrEnum
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nemo_gym.json_types import JsonObject

__all__ = [
    "AGENT_REF_KEY",
    "ROLLOUT_PATH_PREFIX",
    "TOKEN_CAPTURE_PATH_SEGMENT",
    "AgentServerRef",
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseNeMoGymCLIConfig",
    "BaseRunServerConfig",
    "BaseRunServerInstanceConfig",
    "BaseServerConfig",
    "ConfigError",
    "DictConfig",
    "Domain",
    "ModelServerRef",
    "OmegaConf",
    "ResourcesServerRef",
    "ServerRef",
    "is_server_ref",
]

AGENT_REF_KEY = "agent_ref"
ROLLOUT_PATH_PREFIX = "ng-rollout"
TOKEN_CAPTURE_PATH_SEGMENT = "training-token-capture"


class ConfigError(Exception):
    """A config is wrong."""


class BaseNeMoGymCLIConfig(BaseModel):
    """The config of a command: settings beside its own options are ignored."""

    model_config = ConfigDict(extra="ignore")


class ModelServerRef(BaseModel):
    type: Literal["responses_api_models"] = "responses_api_models"
    name: str


class ResourcesServerRef(BaseModel):
    type: Literal["resources_servers"] = "resources_servers"
    name: str


class AgentServerRef(BaseModel):
    type: Literal["responses_api_agents"] = "responses_api_agents"
    name: str


ServerRef = ModelServerRef | ResourcesServerRef | AgentServerRef
_SERVER_REF: TypeAdapter[ServerRef] = TypeAdapter(ServerRef)


def is_server_ref(config_dict: object) -> ServerRef | None:
    """The reference, where it is one: exactly a type and a name."""
    if isinstance(config_dict, DictConfig):
        config_dict = OmegaConf.to_container(config_dict, resolve=True)
    if not isinstance(config_dict, dict) or set(config_dict) != {"type", "name"}:
        return None
    try:
        return _SERVER_REF.validate_python(config_dict)
    except ValidationError:
        return None


class Domain(StrEnum):
    MATH = "math"
    CODING = "coding"
    AGENT = "agent"
    KNOWLEDGE = "knowledge"
    INSTRUCTION_FOLLOWING = "instruction_following"
    LONG_CONTEXT = "long_context"
    SAFETY = "safety"
    GAMES = "games"
    TRANSLATION = "translation"
    E2E = "e2e"
    RLHF = "rlhf"
    OTHER = "other"


class BaseServerConfig(BaseModel):
    host: str
    port: int
    num_workers: int | None = None


class BaseRunServerConfig(BaseServerConfig):
    entrypoint: str
    domain: Domain | None = None


class BaseRunServerInstanceConfig(BaseRunServerConfig):
    name: str


class AggregateMetricsRequest(BaseModel):
    verify_responses: list[JsonObject]


class AggregateMetrics(BaseModel):
    group_level_metrics: list[JsonObject] = Field(default_factory=list)
    agent_metrics: JsonObject = Field(default_factory=dict)
    key_metrics: JsonObject = Field(default_factory=dict)
    repeat_level_metrics: list[JsonObject] = Field(default_factory=list, exclude=True)
    """Nothing fills it: figures are per task and over all rollouts."""
