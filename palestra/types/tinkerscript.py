"""TinkerScript on the wire: states of the engine as AgentJet's clients know them, bodies and answers of its calls."""

from __future__ import annotations

from enum import StrEnum

from msgspec import UNSET, Struct, UnsetType

from palestra.types.episodes import EpisodeKind
from palestra.types.readiness import make_ready
from palestra.util.json_types import JsonObject


class EngineStatus(StrEnum):
    OFFLINE = "ENGINE.OFFLINE"
    BOOTING = "ENGINE.BOOTING"
    ROLLING = "ENGINE.ROLLING"
    """Episodes can be claimed, only in this state."""
    WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"
    WEIGHT_EXPORTING = "ENGINE.WEIGHT_EXPORTING"


S = EngineStatus
ENGINE_MOVES: dict[EngineStatus, frozenset[EngineStatus]] = {
    S.OFFLINE: frozenset({S.BOOTING, S.ROLLING}),  # a trainer that was not started here may begin at once
    S.BOOTING: frozenset({S.ROLLING, S.OFFLINE}),
    S.ROLLING: frozenset({S.WEIGHT_SYNCING, S.WEIGHT_EXPORTING, S.OFFLINE}),
    S.WEIGHT_SYNCING: frozenset({S.ROLLING, S.WEIGHT_EXPORTING, S.OFFLINE}),
    S.WEIGHT_EXPORTING: frozenset({S.ROLLING, S.WEIGHT_SYNCING, S.OFFLINE}),
}


# What players and trainers outside send and get. Fields that AgentJet does not have are optional.


class WorkflowOutput(Struct, kw_only=True):
    """The result of an episode from a client. A pydantic model with the same fields works too."""

    reward: float | list[float] | None = None
    """A list has one reward for each step. None: 1 or 0, by `is_success`."""
    is_success: bool | None = None
    metadata: JsonObject = {}
    log_metrics: JsonObject = {}
    """Numbers, lists of numbers, or nested maps of them."""


class ClaimEpisode(Struct, frozen=True, kw_only=True):
    client_uuid: str
    episode_type: EpisodeKind
    allow_discard_timeout: float
    """Length of the lease in seconds; the server bounds it."""
    claim_id: str | None = None
    """Id of the claim; a repeated request gets the same lease. None: a new id each time."""
    wait_s: float | None = None
    """How long to wait for an episode. None: as long as AgentJet's client allows."""


class ClaimedEpisode(Struct, frozen=True, kw_only=True):
    success: bool
    client_uuid: str = ""
    episode_uuid: str = ""
    """Name of this attempt; the next attempt at the episode has another."""
    openai_base_url: str = ""
    openai_api_key: str = ""
    fail_cause: str = ""
    lease_id: str | None = None
    attempt: int | None = None
    task: JsonObject | None = None
    group_id: str | None = None
    index_in_group: int | None = None
    weight_version: int | None = None
    deadline: float | None = None
    model: str | None = None
    seed: int | None = None


class EndEpisode(Struct, frozen=True, kw_only=True):
    client_uuid: str
    episode_uuid: str
    workflow_output: WorkflowOutput
    lease_id: str | None = None
    idempotency_key: str | None = None
    """Accepted, but not needed: a repeated end is recognised by its attempt and result."""


class EpisodeEnded(Struct, frozen=True, kw_only=True):
    success: bool
    failure_reason: str = ""


class AbortEpisode(Struct, frozen=True, kw_only=True):
    """Gives an episode back; sent by later versions of AgentJet."""

    client_uuid: str
    episode_uuid: str
    lease_id: str | None = None
    reason: str = "aborted"


class ContinueEpisode(Struct, frozen=True, kw_only=True):
    client_uuid: str
    episode_uuid: str
    lease_id: str | None = None


class CanContinue(Struct, frozen=True, kw_only=True):
    can_continue: bool
    reason: str = ""


class RegisterEpisode(Struct, frozen=True, kw_only=True):
    episode_uuid: str
    openai_base_url: str = ""
    openai_api_key: str = ""
    zmq_listen_result_addr: str = ""
    """Address to send the result to. Empty: it is read from the run, as usual."""
    episode_type: EpisodeKind = EpisodeKind.TRAIN


class EpisodeRegistered(Struct, frozen=True, kw_only=True):
    success: bool
    failure_reason: str = ""
    note: str = ""


class EpisodeStatus(Struct, frozen=True, kw_only=True):
    episode_uuid: str
    episode_status: str = ""
    """registered or claimed."""
    episode_type: str = "train"
    openai_base_url: str = ""
    openai_api_key: str = ""
    """Masked."""
    client_uuid: str = ""
    zmq_listen_result_addr: str = ""
    latest_activity_timestamp: float = 0.0
    allow_discard_timeout: float = -1.0


class BufferQuery(Struct, frozen=True, kw_only=True):
    limit: int = 1000


class EpisodeBuffer(Struct, frozen=True, kw_only=True):
    buffer: list[EpisodeStatus]
    total: int = 0
    """Total number; `buffer` may have only the first."""


class Health(Struct, frozen=True):
    status: str


PLAYING_RECORDS = (
    *(ClaimEpisode, ClaimedEpisode, EndEpisode, EpisodeEnded, AbortEpisode, ContinueEpisode, CanContinue),
    *(RegisterEpisode, EpisodeRegistered, BufferQuery, EpisodeBuffer, Health),
)


# What clients and trainers send and get about the engine.


class EngineState(Struct, frozen=True, kw_only=True):
    engine_status: EngineStatus
    detail: str = ""
    """For people: which run, and where its log is; or why it is offline."""


class UpdateEngineStatus(Struct, frozen=True, kw_only=True):
    engine_status: str


class EngineStatusUpdated(Struct, frozen=True, kw_only=True):
    success: bool
    failure_reason: str = ""


class SyncTrainConfig(Struct, frozen=True, kw_only=True):
    yaml_as_string: str


class TrainConfigSynced(Struct, frozen=True, kw_only=True):
    success: bool
    error: str | UnsetType = UNSET
    mapped: JsonObject = {}
    """Settings of the training run, by its own keys."""
    unknown: list[str] = []
    """Keys that have no effect here."""
    notes: list[str] = []


class StartEngine(Struct, frozen=True):
    pass


class EngineStarted(Struct, frozen=True, kw_only=True):
    success: bool
    pid: int | UnsetType = UNSET
    error: str | UnsetType = UNSET


class StopEngine(Struct, frozen=True):
    pass


class EngineStopped(Struct, frozen=True, kw_only=True):
    success: bool
    killed_pids: list[int] = []
    episodes_removed: int = 0
    error: str | UnsetType = UNSET


make_ready(__name__)


ENGINE_BODIES = (UpdateEngineStatus, SyncTrainConfig, StartEngine, StopEngine)
ENGINE_ANSWERS = (EngineState, EngineStatusUpdated, TrainConfigSynced, EngineStarted, EngineStopped)
