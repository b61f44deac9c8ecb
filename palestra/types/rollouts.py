"""What is played and what comes back: tasks, turns, rollouts, groups. Plain records."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from palestra.types.sampling import StopReason
from palestra.util.json_types import JsonObject

Message = JsonObject
"""`role` and `content`, as chat templates take them."""


class RolloutStop(StrEnum):
    """Why a rollout ended."""

    DONE = "done"
    """The environment said so."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    """The last turn was cut at its token limit."""
    CONTEXT = "context"
    """No room for another turn."""
    TIMEOUT = "timeout"
    ENV_INIT_FAILED = "env_init_failed"
    ENV_FAILED = "env_failed"
    """The environment raised, hung, or gave a reward that is no number."""
    SAMPLING_FAILED = "sampling_failed"
    STALE = "stale"
    """Dropped: its weights are older than the run allows."""
    LOST = "lost"
    """Nobody played it to its end: its group was dropped."""
    MASKED = "masked"
    """Not to be learned from: its tokens do not hang together, or its environment says so."""

    @property
    def is_failure(self) -> bool:
        """Nothing can be said about the policy: such a rollout has no reward and is in no baseline."""
        return self in FAILURES


FAILURES = {
    RolloutStop.TIMEOUT,
    RolloutStop.ENV_INIT_FAILED,
    RolloutStop.ENV_FAILED,
    RolloutStop.SAMPLING_FAILED,
    RolloutStop.STALE,
    RolloutStop.LOST,
    RolloutStop.MASKED,
}


class Task(Struct, frozen=True, kw_only=True):
    """A task of an environment: its prompt, and what the environment needs to play it."""

    id: str
    """Unique in its environment; part of every seed."""
    environment: str
    prompt: list[Message]
    extras: JsonObject = {}
    """What the environment needs besides: the answer, a key, a difficulty."""


class Turn(Struct, kw_only=True):
    observation: list[int]
    """Tokens the environment added before this turn, the turn's header included. Empty in the first."""
    tokens: list[int]
    """As sampled, the end-of-turn token included where it was drawn."""
    logprobs: list[float]
    """Log-probabilities of `tokens`, under the policy that drew them."""
    stop: StopReason
    version: int
    """Version of the weights that drew them."""
    reward: float = 0.0
    text: str = ""
    """`tokens` without special ones: what the environment got."""
    sample_s: float = 0.0
    env_s: float = 0.0


class Branch(Struct, kw_only=True):
    """Another conversation of a rollout: a sub-agent's, or one that went on differently from the same beginning."""

    id: str
    """The rollout's, and a number."""
    prompt: list[int]
    turns: list[Turn]
    temperature: float = 1.0
    agent: str = ""

    @property
    def is_cut(self) -> bool:
        """Its last turn has no end."""
        return bool(self.turns) and self.turns[-1].stop is not StopReason.STOP

    @property
    def response_length(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


class Rollout(Struct, kw_only=True):
    id: str
    group: str
    index: int
    """In its group."""
    task: str
    environment: str
    seed: int
    stop: RolloutStop
    temperature: float = 1.0
    prompt: list[int] = []
    turns: list[Turn] = []
    agent: str = ""
    """Who speaks in it, where a rollout has several agents."""
    branches: list[Branch] = []
    """What was sampled besides. It is trained too, and the rollout still counts once."""
    agent_rewards: dict[str, float] = {}
    """Where agents are graded for themselves."""
    messages: list[Message] = []
    """The conversation as the environment saw it, for people to read."""
    reward: float | None = None
    """None where the stop is a failure, or nobody could grade it."""
    metrics: dict[str, float] = {}
    """The environment's own."""
    error: str | None = None
    failure: str = ""
    """What kind of failure it was, where a gym's servers say so: a word of `types.gym_failures`, or an agent's own."""
    seconds: float = 0.0

    @property
    def is_graded(self) -> bool:
        return self.reward is not None and not self.stop.is_failure

    @property
    def rows(self) -> list[Branch]:
        """All its conversations, its own first: what is trained."""
        own = Branch(id=self.id, prompt=self.prompt, turns=self.turns, temperature=self.temperature, agent=self.agent)
        return [own, *self.branches]

    @property
    def all_turns(self) -> list[Turn]:
        return [*self.turns, *(turn for branch in self.branches for turn in branch.turns)]

    @property
    def response_length(self) -> int:
        """In sampled tokens."""
        return sum(len(turn.tokens) for turn in self.all_turns)

    @property
    def is_cut(self) -> bool:
        """The last generated turn has no end: its quality is unknown (DAPO's overlong)."""
        return bool(self.turns) and self.turns[-1].stop is not StopReason.STOP

    @property
    def oldest_version(self) -> int:
        return min((turn.version for turn in self.all_turns), default=0)


class Group(Struct, kw_only=True):
    """Rollouts of one task, compared with each other."""

    id: str
    task: Task
    step: int
    rollouts: list[Rollout] = field(default_factory=list)


class GroupRequest(Struct, frozen=True, kw_only=True):
    """A group to be played."""

    id: str
    task: Task
    step: int
    seeds: tuple[int, ...]
    """One for each rollout wanted."""
    position: int = 0
    """In the run's order of tasks."""


class TrainSequence(Struct, kw_only=True):
    """One row of a training batch: position i of the lists speaks about `tokens[i]`."""

    tokens: list[int]
    mask: list[bool]
    """True where the loss may look: sampled by the policy."""
    logprobs: list[float]
    """0 where not sampled."""
    advantages: list[float]
    """0 where masked."""
    rollout: str = ""
    """Its id, or a branch's."""
