"""Episodes as they cross the wire: what a trainer registers, a player claims and ends, a trainer reads back.

Plain records without HTTP: routes, client library and broker share them. Times are seconds since the epoch. None can
hold itself, so the garbage collector need not look at them (`gc=False`): up to a seventh of a batch call's time.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

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
    """A result was accepted, a failure included."""
    PARKED = "parked"
    """Lost too often, or too late: somebody should look. Counts as lost in its group."""
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
    """Whole; waits to be read, or to be committed."""
    DROPPED = "dropped"
    """Will never be whole. It is delivered too, so that whoever waits knows."""


class OnLoss(StrEnum):
    """What a group does about a member that is lost."""

    REPLACE = "replace"
    """Another episode of the same task, with another seed."""
    SHRINK = "shrink"
    """Goes on with fewer, down to `min_size`."""
    DROP = "drop"


class WeightPolicy(StrEnum):
    """What becomes of an episode when newer weights are published while it is played."""

    FINISH = "finish"
    """It is finished, on the newest weights for each call."""
    LAG = "lag"
    """As long as its oldest call is at most `max_lag` versions behind."""
    DROP = "drop"
    """It is lost at once if it has made a call: the same as `max_lag: 0`."""


class OutOfBounds(StrEnum):
    """What becomes of a model call that asks for sampling outside its run's bounds."""

    REFUSE = "refuse"
    """400, with the bounds."""
    CLAMP = "clamp"
    """It is sampled with the nearest value that is allowed."""


class SamplingBounds(Struct, frozen=True, kw_only=True, gc=False):
    """Bounds on each model call in a run. What a call leaves out is as by default, or the nearest that is allowed."""

    min_temperature: float = 0.0
    max_temperature: float | None = None
    min_top_p: float = 0.0
    can_filter: bool = True
    """By top_k, min_p, penalties and logit_bias: what is drawn by them is not what logprobs are of."""
    max_tokens: int | None = None
    """More are cut to it: the answer then ends by length."""
    max_n: int | None = None
    """Answers to one call. More are refused in any case."""
    outside: OutOfBounds = OutOfBounds.REFUSE
    """What happens to temperature, top_p and filters that are out of bounds."""


class RunSettings(Struct, frozen=True, kw_only=True, gc=False):
    """Rules of a run: how its episodes are claimed, retried, bounded and delivered."""

    weight_policy: WeightPolicy = WeightPolicy.FINISH
    max_lag: int = 1
    share: float = 1.0
    """Share of the claims, beside other runs that have something queued."""
    eval_first: bool = True
    lease_s: float = 60.0
    """Lease of a claim that names none. The server bounds all of them."""
    max_attempts: int = 3
    """Attempts that may expire before the episode is parked."""
    backoff_s: float = 1.0
    """After an attempt that expired or was given back; doubled for each further one that expired."""
    max_queued: int = 100_000
    max_ready: int = 100_000
    """Groups that may wait to be committed; with more, nothing is claimed until the trainer has caught up."""
    max_calls: int | None = None
    """Calls of the model in one attempt. None: any number."""
    max_sampled_tokens: int | None = None
    """In one attempt; a call that begins below it is finished."""
    sampling: SamplingBounds = SamplingBounds()
    client_share: float = 1.0
    """The largest share of the run's queued and leased episodes that one client may hold; it may always hold one."""
    environment_weights: dict[str, float] = {}
    """Weights of the claims, by the tasks' environments, where several of the same kind and priority wait. All that
    are not named count as one, of weight 1. Empty: in the order of registration."""
    push_to: str = ""
    """A ZeroMQ address where the trainer listens: groups are sent there too, and committed as it acknowledges them."""


class ClaimBlocker(StrEnum):
    """Why nothing is claimed, though something waits."""

    PAUSED = "paused"
    TRAINER_BEHIND = "trainer_behind"
    """`max_ready` groups are not committed."""
    ENGINE_FULL = "engine_full"
    """Too many model calls wait to be sampled."""
    CLIENT_SHARE = "client_share"
    """This client holds all that it may: others are served."""


class RunInfo(Struct, frozen=True, kw_only=True, gc=False):
    run: str
    settings: RunSettings
    model: str | None
    """What model calls under an episode's key are answered by: an alias, a sampling session, a path, a base model."""
    version: int
    is_paused: bool
    committed: int
    """The trainer's cursor: what is up to it is forgotten."""
    delivered: int
    """The number of the newest group that is ready or dropped."""
    queued: int = 0
    leased: int = 0
    ended: int = 0
    parked: int = 0
    calls_running: int = 0
    """Calls of the model under way. After a pause, none are left when it is 0."""
    held: str = ""
    """Why nothing is claimed of it just now: paused, trainer_behind, engine_full; and in words."""


class NewGroup(Struct, frozen=True, kw_only=True, gc=False):
    """`count` episodes of one task. Registering the same `group_id` again changes nothing; a different one under that
    id is refused."""

    group_id: str
    task: Task
    size: int
    """Results that make it whole."""
    count: int | None = None
    """More than `size`: when it is whole, the rest is cancelled. None: just as many."""
    min_size: int | None = None
    """For `shrink`. None: 2, or 1 for a group of one."""
    on_loss: OnLoss = OnLoss.REPLACE
    kind: EpisodeKind = EpisodeKind.TRAIN
    seeds: tuple[int, ...] = ()
    """One for each episode; missing ones are made from the group's id."""
    priority: int = 0
    """Higher is claimed first, within its run and kind."""
    deadline_s: float | None = None
    """From registration to the end of the last attempt."""
    max_attempts: int | None = None
    tags: dict[str, str] = {}


class Registered(Struct, frozen=True, kw_only=True, gc=False):
    group_id: str
    episode_ids: list[str]
    """All its members, those included that replaced lost ones. Empty where it is committed."""
    is_new: bool
    is_committed: bool = False
    """It was registered, delivered and committed before: it will not come again."""


class ClaimRequest(Struct, frozen=True, kw_only=True, gc=False):
    client_id: str
    claim_id: str
    """Made by the client for each claim: sent again, it gets the same leases."""
    run: str | None = None
    """None: any that this key may play for."""
    kind: EpisodeKind | None = None
    max_n: int = 1
    wait_s: float = 0.0
    """How long to wait for the first one."""
    lease_s: float | None = None


class Lease(Struct, frozen=True, kw_only=True, gc=False):
    """A claimed episode. (`episode_id`, `attempt`) is what every later call shows."""

    episode_id: str
    attempt: int
    run: str
    group_id: str
    index: int
    """In its group."""
    kind: EpisodeKind
    task: Task
    seed: int
    tags: dict[str, str]
    version: int
    """Version of the weights when it was claimed."""
    expires_at: float
    lease_s: float
    """A beat at least this often keeps it."""
    deadline: float | None
    base_url: str
    """For an OpenAI client, with `api_key`: calls under it are this attempt's, and are answered by the run's policy."""
    api_key: str
    model: str
    traceparent: str = ""
    """W3C's, of this attempt: spans of the player's own join its trace under it."""


class LeaseRef(Struct, frozen=True, kw_only=True, gc=False):
    episode_id: str
    attempt: int


class HeartbeatAnswer(Struct, frozen=True, kw_only=True, gc=False):
    """The answer to a heartbeat."""

    episode_id: str
    attempt: int
    can_continue: bool
    reason: str = ""
    """Why not: lease_lost, cancelled, stale_weights, deadline, unknown; and in words."""
    expires_at: float = 0.0


class EpisodeError(Struct, frozen=True, kw_only=True, gc=False):
    """A failure as data: an episode may end with one."""

    type: str
    message: str


class EpisodeResult(Struct, frozen=True, kw_only=True, gc=False):
    """What an episode was worth: a reward, or an error."""

    reward: float | None = None
    """Finite. None only with an error, or where `step_rewards` or `agent_rewards` say it."""
    step_rewards: list[float] = []
    agent_rewards: dict[str, float] = {}
    is_success: bool | None = None
    metrics: dict[str, float] = {}
    metadata: JsonObject = {}
    error: EpisodeError | None = None

    @property
    def total(self) -> float | None:
        """The reward in one number; of agents that are graded for themselves, their mean."""
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
    """The same result of the same attempt is here already."""
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
    """Why an attempt came to nothing."""

    attempt: int
    at: float
    reason: str
    """expired, released, stale_weights, deadline, cancelled, and in words."""
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
    """None where no lease ages: also while one of its model calls runs, or its run is paused."""
    lease_s: float = 0.0
    """Length of its last lease."""
    ended_at: float | None = None
    deadline: float | None = None
    version: int = 0
    """At claim."""
    oldest_version: int | None = None
    """Oldest version of the weights among its model calls."""
    calls: int = 0
    sampled_tokens: int = 0
    """By its model calls, in this attempt."""
    losses: list[AttemptLoss] = []
    result: EpisodeResult | None = None
    tags: dict[str, str] = {}


class EpisodeTrajectory(Struct, frozen=True, kw_only=True, gc=False):
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    temperatures: list[float]
    """Temperature of the call that each sampled token is from; 0 where read."""
    versions: list[int]
    trace_id: str
    agent: str = ""
    is_cut: bool = False
    """Its last answer was cut at its token limit."""


class PlayedEpisode(Struct, frozen=True, kw_only=True, gc=False):
    """An ended episode for its trainer: reward and tokens of one and the same attempt."""

    info: EpisodeInfo
    trajectories: list[EpisodeTrajectory]


class PlayedGroup(Struct, frozen=True, kw_only=True, gc=False):
    number: int
    """In the order of delivery: the trainer's cursor."""
    group_id: str
    task: Task
    kind: EpisodeKind
    state: GroupState
    reason: str
    """Why a dropped group was dropped."""
    episodes: list[PlayedEpisode]
    tags: dict[str, str] = {}


class PushedGroup(Struct, frozen=True, kw_only=True, gc=False):
    """What a trainer that listens is sent. It answers `ack` and the group's number, once it is safe there."""

    run: str
    group: PlayedGroup


make_ready(__name__)
