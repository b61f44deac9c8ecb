"""Episodes as they cross the wire: what a trainer registers, a player claims and ends, a trainer reads back.

Plain records without HTTP: routes, client library and broker share them. Times are seconds since the epoch. None can
hold itself, so the garbage collector need not look at them (`gc=False`): up to a seventh of a batch call's time.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from palestra.types.pictures import PlacedImage
from palestra.types.readiness import make_ready
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonObject


class EpisodeKind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class EpisodeState(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    ENDED = "ended"
    """A result was accepted; it may be a failure."""
    PARKED = "parked"
    """Lost too often or too late; a person should look at it. It counts as lost in its group."""
    CANCELLED = "cancelled"


S = EpisodeState
MOVES: dict[EpisodeState, frozenset[EpisodeState]] = {
    S.QUEUED: frozenset({S.LEASED, S.PARKED, S.CANCELLED}),
    S.LEASED: frozenset({S.QUEUED, S.ENDED, S.PARKED, S.CANCELLED}),
    S.ENDED: frozenset({S.PARKED}),  # too stale when it was to be delivered
    S.PARKED: frozenset({S.QUEUED, S.CANCELLED}),
    S.CANCELLED: frozenset(),
}


class GroupState(StrEnum):
    OPEN = "open"
    READY = "ready"
    """Complete; waits to be read or committed."""
    DROPPED = "dropped"
    """Will never be complete. It is delivered too, so that its trainer knows."""


class OnLoss(StrEnum):
    """What a group does about a lost member."""

    REPLACE = "replace"
    """Make another episode of the same task, with another seed."""
    SHRINK = "shrink"
    """Continue with fewer members, down to `min_size`."""
    DROP = "drop"


class WeightPolicy(StrEnum):
    """What happens to a running episode when newer weights are published."""

    FINISH = "finish"
    """The episode continues; each call uses the newest weights."""
    LAG = "lag"
    """The episode continues while its oldest call is at most `max_lag` versions behind."""
    DROP = "drop"
    """The episode is lost at once if it has made a call, as with `max_lag: 0`."""


class OutOfBounds(StrEnum):
    """What happens to a model call with sampling parameters outside the run's bounds."""

    REFUSE = "refuse"
    """Refuse it with 400 and the bounds."""
    CLAMP = "clamp"
    """Sample with the nearest allowed value."""


class SamplingBounds(Struct, frozen=True, kw_only=True, gc=False):
    """Bounds on each model call in a run. A parameter that a call leaves out gets its default, or the nearest allowed
    value."""

    min_temperature: float = 0.0
    max_temperature: float | None = None
    min_top_p: float = 0.0
    can_filter: bool = True
    """Whether top_k, min_p, penalties and logit_bias are allowed: logprobs do not include their effect."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; a larger request is reduced to it."""
    max_n: int | None = None
    """Maximum answers to one call. More are always refused."""
    can_leave_out_tools: bool = True
    """Whether a call with tools that its vendor would run is answered without them; otherwise it is refused."""
    outside: OutOfBounds = OutOfBounds.REFUSE
    """What happens to a temperature, top_p or filter outside the bounds."""


class RunSettings(Struct, frozen=True, kw_only=True, gc=False):
    """Rules of a run: how its episodes are claimed, retried, bounded and delivered."""

    weight_policy: WeightPolicy = WeightPolicy.FINISH
    max_lag: int = 1
    share: float = 1.0
    """Weight of this run's claims beside other runs with queued episodes."""
    eval_first: bool = True
    lease_s: float = 60.0
    """Lease of a claim that names none. The server limits all leases."""
    max_attempts: int = 3
    """Attempts that may expire before the episode is parked."""
    backoff_s: float = 1.0
    """Pause after an attempt that expired or was given back; doubled with each further one that expired."""
    max_queued: int = 100_000
    max_ready: int = 100_000
    """Groups that may wait to be committed; with more, claims get nothing until the trainer has caught up."""
    max_calls: int | None = None
    """Maximum model calls of one attempt. None: any number."""
    max_sampled_tokens: int | None = None
    """Maximum sampled tokens of one attempt; a call that begins below it is finished."""
    sampling: SamplingBounds = SamplingBounds()
    client_share: float = 1.0
    """The largest share of the run's queued and leased episodes that one client may hold; it may always hold one."""
    environment_weights: dict[str, float] = {}
    """Weights of the claims, by the tasks' environments, where several of the same kind and priority wait. All that
    are not named count as one, of weight 1. Empty: in the order of registration."""
    push_to: str = ""
    """A ZeroMQ address where the trainer listens: groups are sent there too, and committed as it acknowledges them."""


class ClaimBlocker(StrEnum):
    """Why a claim gets nothing although episodes wait."""

    PAUSED = "paused"
    TRAINER_BEHIND = "trainer_behind"
    """`max_ready` groups are not committed."""
    ENGINE_FULL = "engine_full"
    """Too many model calls wait to be sampled."""
    CLIENT_SHARE = "client_share"
    """This client holds its maximum share."""


class RunInfo(Struct, frozen=True, kw_only=True, gc=False):
    run: str
    settings: RunSettings
    model: str | None
    """The model that answers calls with an episode key: an alias, a sampling session, a path or a base model."""
    version: int
    is_paused: bool
    committed: int
    """The trainer's cursor: groups up to it are deleted."""
    delivered: int
    """The number of the newest group that is ready or dropped."""
    queued: int = 0
    leased: int = 0
    ended: int = 0
    parked: int = 0
    calls_running: int = 0
    """Running model calls. After a pause, wait until it is 0."""
    held: str = ""
    """Why claims get nothing of this run now: paused, trainer_behind or engine_full, with an explanation."""


class NewGroup(Struct, frozen=True, kw_only=True, gc=False):
    """A group of `count` episodes of one task. Registering the same `group_id` again changes nothing; another group
    with that id is refused."""

    group_id: str
    task: Task
    size: int
    """Number of results that make the group complete."""
    count: int | None = None
    """Number of episodes. With more than `size`, the rest is cancelled when the group is complete. None: `size`."""
    min_size: int | None = None
    """Smallest size, for `shrink`. None: 2, or 1 for a group of one."""
    on_loss: OnLoss = OnLoss.REPLACE
    kind: EpisodeKind = EpisodeKind.TRAIN
    seeds: tuple[int, ...] = ()
    """A seed for each episode; missing ones are derived from the group's id."""
    priority: int = 0
    """Groups of higher priority are claimed first, within their run and kind."""
    deadline_s: float | None = None
    """Time limit from registration to the end of the last attempt."""
    max_attempts: int | None = None
    tags: dict[str, str] = {}


class Registered(Struct, frozen=True, kw_only=True, gc=False):
    group_id: str
    episode_ids: list[str]
    """All members, including replacements of lost ones. Empty if the group is committed."""
    is_new: bool
    is_committed: bool = False
    """Whether the group was already registered, delivered and committed, so that it will not come again."""


class ClaimRequest(Struct, frozen=True, kw_only=True, gc=False):
    client_id: str
    claim_id: str
    """Id that the client makes for each claim; a repeated request gets the same leases."""
    run: str | None = None
    """Run to play for. None: any run of this key."""
    kind: EpisodeKind | None = None
    max_n: int = 1
    wait_s: float = 0.0
    """How long to wait for the first episode."""
    lease_s: float | None = None


class Lease(Struct, frozen=True, kw_only=True, gc=False):
    """A claimed episode. (`episode_id`, `attempt`) is what every later call shows."""

    episode_id: str
    attempt: int
    run: str
    group_id: str
    index: int
    """Index of the episode in its group."""
    kind: EpisodeKind
    task: Task
    seed: int
    tags: dict[str, str]
    version: int
    """Version of the weights when it was claimed."""
    expires_at: float
    lease_s: float
    """Length of the lease; a heartbeat within this time renews it."""
    deadline: float | None
    base_url: str
    """Address for an OpenAI client, with `api_key`: such calls belong to this attempt and are answered by the run's
    policy."""
    api_key: str
    model: str
    traceparent: str = ""
    """W3C trace context of this attempt; the player's own spans can join its trace."""


class LeaseRef(Struct, frozen=True, kw_only=True, gc=False):
    episode_id: str
    attempt: int


class HeartbeatAnswer(Struct, frozen=True, kw_only=True, gc=False):
    """The answer to a heartbeat."""

    episode_id: str
    attempt: int
    can_continue: bool
    reason: str = ""
    """Why the episode cannot continue: lease_lost, cancelled, stale_weights, deadline or unknown, with an
    explanation."""
    expires_at: float = 0.0


class EpisodeError(Struct, frozen=True, kw_only=True, gc=False):
    """An error with which an episode may end."""

    type: str
    message: str


GROUP_SIZE = "group_size"
"""A tag of an episode that a trainer registers: how many episodes its group has."""


class ResultKey(StrEnum):
    """Keys in a result's metadata that some players set, and trainers read."""

    STOP = "stop"
    """A RolloutStop."""
    MESSAGES = "messages"
    """The conversation as the environment saw it."""
    VERDICT = "verdict"
    """What the verifier saw and said."""
    TURN_TIMES = "turn_times"
    """A pair for each turn: seconds of sampling, seconds until the next model call."""
    TRAINED_AGENTS = "trained_agents"
    """Names of the agents whose calls are trained; without it, all are. A user that a model plays is not."""


class EpisodeResult(Struct, frozen=True, kw_only=True, gc=False):
    """The result of an episode: a reward, or an error."""

    reward: float | None = None
    """A finite number. None only with an error, `step_rewards` or `agent_rewards`."""
    step_rewards: list[float] = []
    agent_rewards: dict[str, float] = {}
    is_success: bool | None = None
    metrics: dict[str, float] = {}
    metadata: JsonObject = {}
    error: EpisodeError | None = None

    @property
    def total(self) -> float | None:
        """The reward as one number; with `agent_rewards`, their mean."""
        if self.reward is not None:
            return self.reward
        if self.step_rewards:
            return sum(self.step_rewards)
        return sum(self.agent_rewards.values()) / len(self.agent_rewards) if self.agent_rewards else None


class EndRequest(Struct, frozen=True, kw_only=True, gc=False):
    episode_id: str
    attempt: int
    result: EpisodeResult


class EndStatus(StrEnum):
    ACCEPTED = "accepted"
    REPEATED = "repeated"
    """The same result of the same attempt was received before."""
    LEASE_LOST = "lease_lost"
    CONFLICT = "conflict"
    """This attempt has ended with another result."""
    STALE = "stale"
    """Its weights are older than the run allows."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    INVALID = "invalid"


class EndAnswer(Struct, frozen=True, kw_only=True, gc=False):
    episode_id: str
    attempt: int
    status: EndStatus
    detail: str = ""

    @property
    def is_kept(self) -> bool:
        return self.status in (EndStatus.ACCEPTED, EndStatus.REPEATED)


class AttemptLoss(Struct, frozen=True, kw_only=True, gc=False):
    """Why an attempt was lost."""

    attempt: int
    at: float
    reason: str
    """expired, released, stale_weights, deadline or cancelled, with an explanation."""
    client_id: str = ""


class EpisodeInfo(Struct, frozen=True, kw_only=True, gc=False):
    episode_id: str
    run: str
    group_id: str
    index: int
    kind: EpisodeKind
    state: EpisodeState
    attempt: int
    seed: int
    priority: int
    created_at: float
    not_before: float = 0.0
    client_id: str = ""
    claimed_at: float | None = None
    expires_at: float | None = None
    """When the lease expires. None without a lease, during a model call, and while the run is paused."""
    lease_s: float = 0.0
    """Length of its last lease."""
    ended_at: float | None = None
    deadline: float | None = None
    version: int = 0
    """Version of the weights at the claim."""
    oldest_version: int | None = None
    """Oldest version of the weights among its model calls."""
    calls: int = 0
    sampled_tokens: int = 0
    """Tokens sampled by its model calls in this attempt."""
    losses: list[AttemptLoss] = []
    result: EpisodeResult | None = None
    tags: dict[str, str] = {}


class EpisodeTrajectory(Struct, frozen=True, kw_only=True, gc=False):
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    temperatures: list[float]
    """Temperature of the call that sampled each token; 0 for tokens that were read."""
    versions: list[int]
    """Version of the weights that sampled each token; 0 for tokens that were read."""
    inexact_mask: list[int] = []
    """1 for tokens that saw keys and values of older weights than their own; empty: there are none."""
    trace_id: str
    agent: str = ""
    is_cut: bool = False
    """Whether the last answer was cut at its token limit."""
    images: list[PlacedImage] = []
    """Where pictures stand among the tokens. `GET /pictures/{digest}` has their files."""


class PlayedEpisode(Struct, frozen=True, kw_only=True, gc=False):
    """An ended episode for its trainer: reward and tokens of one and the same attempt."""

    info: EpisodeInfo
    trajectories: list[EpisodeTrajectory]


class PlayedGroup(Struct, frozen=True, kw_only=True, gc=False):
    number: int
    """Number in the order of delivery, which is the trainer's cursor."""
    group_id: str
    task: Task
    kind: EpisodeKind
    state: GroupState
    reason: str
    """Why a dropped group was dropped."""
    episodes: list[PlayedEpisode]
    tags: dict[str, str] = {}


class PushedGroup(Struct, frozen=True, kw_only=True, gc=False):
    """Message to a listening trainer. The trainer answers `ack` and the group's number once the group is stored."""

    run: str
    group: PlayedGroup


make_ready(__name__)
