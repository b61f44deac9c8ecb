"""Tasks, turns, rollouts and groups, as plain records."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from palestra.types.pictures import PictureFile, PromptPicture
from palestra.types.sampling import StopReason, TopLogprobs, VersionSegment
from palestra.util.json_types import JsonObject

Message = JsonObject
"""`role` and `content`, as chat templates take them."""

VERIFIERS = "verifiers:"
"""How names of environments begin that verifiers plays."""
CODING = "coding"
"""The environment of coding tasks, which agents play in sandboxes."""
PROMPT_TOKENS, SAMPLED_TOKENS = "prompt_tokens", "sampled_tokens"
"""Metrics of a rollout whose tokens are not known: their number, as the endpoint counted them."""


class RolloutStop(StrEnum):
    """Why a rollout ended."""

    DONE = "done"
    """The environment ended the rollout."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    """The last turn was cut at its token limit."""
    CONTEXT = "context"
    """The context has no room for another turn."""
    TOOL_CALLS = "tool_calls"
    """The limit on tool calls was reached."""
    PARSE_FAILURES = "parse_failures"
    """Too many turns in a row could not be read."""
    TIMEOUT = "timeout"
    ENV_INIT_FAILED = "env_init_failed"
    ENV_FAILED = "env_failed"
    """The environment raised, hung, or returned a reward that is not a number."""
    SAMPLING_FAILED = "sampling_failed"
    STALE = "stale"
    """Dropped: its weights are older than the run allows."""
    LOST = "lost"
    """Not played to its end, because its group was dropped."""
    MASKED = "masked"
    """Excluded from training: its tokens do not continue each other, or its environment asks for it."""

    @property
    def is_failure(self) -> bool:
        """Whether a rollout that ended so says nothing about the policy, unless a run gives timeouts a reward."""
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
    """Id of the task, unique in its environment; part of every seed."""
    environment: str
    prompt: list[Message]
    extras: JsonObject = {}
    """Further data for the environment: the answer, a key, a difficulty."""
    place: str = ""
    """The file and line that it was read from, for messages; empty where an environment has made it."""

    @property
    def name(self) -> str:
        """How messages name the task."""
        return self.place or f"task {self.id}"

    @property
    def level(self) -> str | None:
        """The level or difficulty that the task names, as text; None if it names none."""
        found = (self.extras.get(name) for name in ("level", "difficulty"))
        return next((str(value) for value in found if isinstance(value, str | int | float) and value != ""), None)


class SpanReward(Struct, frozen=True):
    """A reward for a part of a turn: its tokens from `start` to `end` (exclusive)."""

    start: int
    end: int
    reward: float


class Turn(Struct, kw_only=True):
    observation: list[int]
    """Tokens the environment added before this turn, the turn's header included. Empty in the first."""
    tokens: list[int]
    """Tokens as sampled, including the end-of-turn token if it was drawn."""
    logprobs: list[float]
    """Log-probabilities of `tokens`, under the policy that drew them."""
    stop: StopReason
    version: int
    """Version of the weights that drew them; of the first of them, if there are `segments`."""
    segments: list[VersionSegment] = []
    """Which versions drew which tokens, if the weights changed during the turn; otherwise empty."""
    reward: float = 0.0
    spans: list[SpanReward] = []
    """Rewards for parts of it, if something grades them (`algorithm.span_weight`)."""
    text: str = ""
    """`tokens` without special ones: what the environment got."""
    sample_s: float = 0.0
    env_s: float = 0.0
    sequence_id: str = ""
    """Name of the sampled sequence at the server, where the experts that it visited are recorded under it."""

    @property
    def versions(self) -> list[int]:
        """The version that drew each token."""
        versions = [self.version] * len(self.tokens)
        for segment in self.segments:
            versions[segment.start :] = [segment.version] * (len(self.tokens) - segment.start)
        return versions

    @property
    def newest_version(self) -> int:
        return self.segments[-1].version if self.segments else self.version

    @property
    def inexact_tokens(self) -> int:
        """Number of tokens that saw keys and values of older weights than their own."""
        ends = [*(segment.start for segment in self.segments[1:]), len(self.tokens)]
        pairs = zip(self.segments, ends, strict=True) if self.segments else ()
        return sum(end - segment.start for segment, end in pairs if not segment.is_exact)


class Branch(Struct, kw_only=True):
    """Another conversation of a rollout: a sub-agent's, or one that went on differently from the same beginning."""

    id: str
    """Id of the rollout, and a number."""
    prompt: list[int]
    turns: list[Turn]
    temperature: float = 1.0
    agent: str = ""
    pictures: list[PromptPicture] = []
    """Pictures of the prompt and observations, at their places in the whole row."""

    @property
    def is_cut(self) -> bool:
        """Whether the last turn has no end."""
        return bool(self.turns) and self.turns[-1].stop is not StopReason.STOP

    @property
    def response_length(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


class Rollout(Struct, kw_only=True):
    """One play of a task: the turns that the policy sampled, and what came of them."""

    id: str
    group: str
    index: int
    """Index of the rollout in its group."""
    task: str
    environment: str
    seed: int
    stop: RolloutStop
    temperature: float = 1.0
    prompt: list[int] = []
    turns: list[Turn] = []
    pictures: list[PromptPicture] = []
    """Pictures of the prompt and observations, at their places among all tokens."""
    picture_files: dict[str, PictureFile] = {}
    """Files of the pictures that its messages name, by their digests."""
    agent: str = ""
    """The agent of this conversation, if a rollout has several."""
    branches: list[Branch] = []
    """Further conversations that were sampled. They are trained too; the rollout still counts once."""
    agent_rewards: dict[str, float] = {}
    """Rewards by agent, if agents are graded separately."""
    messages: list[Message] = []
    """The conversation as the environment saw it, for people to read."""
    reward: float | None = None
    """None if the rollout failed or could not be graded."""
    metrics: dict[str, float] = {}
    """Metrics of the environment."""
    verdict: JsonObject = {}
    """What the environment's verifier saw and said, for people to read."""
    judgement: JsonObject = {}
    """What a judge said about it, if one graded it."""
    error: str | None = None
    failure: str = ""
    """Class of the failure, if a gym's servers report one: see `types.gym_failures`."""
    seconds: float = 0.0
    forks: list[Rollout] = []
    """Rollouts that went on from one of its turns in another way, on a copy of the world (`rollout.branch`). Their
    prompt is everything before that turn, their reward that of the whole episode. `Group.all_rollouts` has them, for
    whatever counts every sampled token; `Group.rollouts` has not, for whatever measures the policy or a task."""
    fork_turn: int = 0
    """Number of turns before its first one, if it is a fork itself; otherwise 0."""
    not_forked: str = ""
    """Why it has no forks although the run plays some."""

    @property
    def tree(self) -> list[Rollout]:
        """Itself and its forks."""
        return [self, *self.forks]

    @property
    def ending(self) -> RolloutStop:
        """The reason why it ended; a cut last turn counts as LENGTH although its environment was done with it."""
        return RolloutStop.LENGTH if self.is_cut and not self.stop.is_failure else self.stop

    @property
    def has_failed(self) -> bool:
        """Whether it says nothing about the policy: it has no reward and is in no baseline."""
        return self.stop.is_failure and not (self.stop is RolloutStop.TIMEOUT and self.reward is not None)

    @property
    def is_graded(self) -> bool:
        return self.reward is not None and not self.has_failed

    @property
    def rows(self) -> list[Branch]:
        """All conversations to train on, its own first."""
        own = Branch(
            id=self.id,
            prompt=self.prompt,
            turns=self.turns,
            temperature=self.temperature,
            agent=self.agent,
            pictures=self.pictures,
        )
        return [own, *self.branches]

    @property
    def all_turns(self) -> list[Turn]:
        return [*self.turns, *(turn for branch in self.branches for turn in branch.turns)]

    @property
    def turns_in_order(self) -> list[Turn]:
        """All turns as they were played: a rollout that goes on from a changed conversation has the earlier ones in
        branches."""
        return [*(turn for branch in self.branches for turn in branch.turns), *self.turns]

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.tokens) for turn in self.all_turns)

    @property
    def context_length(self) -> int:
        """Number of tokens of its own conversation, with prompt and observations."""
        return len(self.prompt) + sum(len(turn.observation) + len(turn.tokens) for turn in self.turns)

    @property
    def is_cut(self) -> bool:
        """Whether the last generated turn has no end, so that its quality is unknown (DAPO's overlong)."""
        return bool(self.turns) and self.turns[-1].stop is not StopReason.STOP

    @property
    def oldest_version(self) -> int:
        return min((turn.version for turn in self.all_turns), default=0)

    @property
    def newest_version(self) -> int:
        return max((turn.newest_version for turn in self.all_turns), default=0)


class Group(Struct, kw_only=True):
    """Rollouts of one task, compared with each other."""

    id: str
    task: Task
    step: int
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def all_rollouts(self) -> list[Rollout]:
        """The group's rollouts, each followed by its forks."""
        return [one for rollout in self.rollouts for one in rollout.tree]


class GroupRequest(Struct, frozen=True, kw_only=True):
    """A group to be played."""

    id: str
    task: Task
    step: int
    seeds: tuple[int, ...]
    """A seed for each rollout."""
    position: int = 0
    """Position in the run's order of tasks."""


class SequenceSource(Struct, frozen=True):
    """A turn in a row of tokens. All before it was the prompt from which it was sampled."""

    sequence_id: str
    start: int
    end: int


NOT_SAMPLED = -1
"""Stands in place of a version for tokens that the policy did not sample."""


class TrainSequence(Struct, kw_only=True):
    """One row of a training batch: position i of the lists speaks about `tokens[i]`."""

    tokens: list[int]
    mask: list[bool]
    """True for tokens sampled by the policy, which the loss uses. Those that are too old are not among them."""
    logprobs: list[float]
    """What the loss compares with: the sampler's, or the trainer's own. 0 for tokens that were not sampled."""
    advantages: list[float]
    """0 for masked tokens."""
    divisor: float = 1.0
    """What the advantages were divided by, so that the loss, a sum, is a mean (`algorithm.normalize`)."""
    versions: list[int] = []
    """The version of the weights that drew each token; NOT_SAMPLED for tokens that were not. Empty where the run
    does not need versions."""
    sampler_logprobs: list[float] = []
    """The sampler's, if `logprobs` are the trainer's own and off-policy corrections compare the two; otherwise
    empty."""
    rollout: str = ""
    """Id of the rollout, or of its branch."""
    sources: list[SequenceSource] = []
    """The turns in it, in order, if the server knows them all."""
    pictures: list[PromptPicture] = []
    """Pictures at their places among the tokens, which are the family's image tokens there."""
    teacher_top: list[TopLogprobs] = []
    """For each sampled token, what a teacher would most likely have said in its place, if whole distributions are
    distilled."""

    @property
    def sampled(self) -> list[bool]:
        """True for all tokens sampled by the policy, those that are too old to be trained too."""
        return [version != NOT_SAMPLED for version in self.versions] or self.mask


LARGEST_REWARD = 1e30  # squares and sums of such numbers stay finite, and so do the engine's float32 products


def is_usable(reward: float | None) -> bool:
    """Whether it is a finite number; None, NaN and infinities are not usable."""
    return reward is not None and abs(reward) <= LARGEST_REWARD


def is_verifiers(environment: str) -> bool:
    return environment.startswith(VERIFIERS)
