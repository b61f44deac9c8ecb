"""The loop of one rollout: the environment begins, then policy and environment take turns to the end."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct, field

from palestra.chat.errors import ChatError
from palestra.chat.picture_files import with_opened_files
from palestra.config.branching import BranchConfig
from palestra.config.train import RolloutConfig
from palestra.environments.errors import EnvironmentFailure
from palestra.environments.session import EnvSession, StepResult
from palestra.environments.snapshots import WorldSnapshot
from palestra.rollouts.sources import ERROR_LENGTH
from palestra.rollouts.stopwatch import RolloutOutOfTime, RolloutStopwatch
from palestra.types import StopReason
from palestra.types.rollouts import Message, RolloutStop, Task

T = TypeVar("T")

TOOL_CALLS, PARSE_FAILED = "tool_calls", "parse_failed"
"""Keys in the metadata of a step: how many tool calls the turn has made, and whether it could not be read."""
CHANGED_HISTORY = "modified_chat_history"
"""Key in the metadata of a step: the whole conversation as it is from now on."""
SPAN_REWARDS = "span_rewards"
"""Key in the metadata of a step: rewards for parts of what the policy has said, each with `start` and `end` in
characters, and `reward`."""


class RolloutSettings(Struct, frozen=True, kw_only=True):
    """Settings that differ between training and evaluation."""

    max_tokens: int
    max_context: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    timeout_s: float = 600.0
    max_tool_calls: int | None = None
    max_parse_failures: int | None = None
    """Turns in a row that could not be read."""
    grades_timeouts: bool = False
    """Whether a rollout whose time is over is graded as it stands; otherwise it has no reward."""
    concurrency: int | None = 512
    """None: it follows what the server can hold."""
    oversample: int = 0
    """Further rollouts of a group; when as many as it has have ended, the others are cancelled."""
    branch: BranchConfig = BranchConfig()
    """Forks are for training: they say what a turn is worth, and evaluations measure what the policy does."""

    @property
    def most_at_once(self) -> int:
        """The number of rollouts at a time where nothing is known about the server."""
        return 512 if self.concurrency is None else self.concurrency

    @classmethod
    def of(cls, config: RolloutConfig, temperature: float | None = None) -> RolloutSettings:
        """Returns the settings of training, or with a temperature those of evaluations."""
        return cls(
            max_tokens=config.max_tokens,
            max_context=config.max_context,
            temperature=config.temperature if temperature is None else temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            timeout_s=config.timeout_s,
            max_tool_calls=config.max_tool_calls,
            max_parse_failures=config.max_parse_failures,
            grades_timeouts=temperature is None and config.endings.timeout == "grade",
            concurrency=config.concurrency,
            oversample=config.oversample if temperature is None else 0,
            branch=config.branch if temperature is None else BranchConfig(),
        )


class Environments(Protocol):
    """The part of the run's environments that a player needs."""

    def open(self, task: Task) -> EnvSession: ...


class TurnTaking(Protocol):
    """Points at which a player may wait for other players: before it samples and before it steps."""

    async def wait(self) -> None: ...


class RolloutEnded(Exception):
    """The rollout cannot continue."""

    def __init__(self, stop: RolloutStop, error: object = None, *, is_ungraded: bool = False) -> None:
        self.stop = stop
        self.error = None if error is None else " ".join(str(error).split())[:ERROR_LENGTH]
        self.is_ungraded = is_ungraded
        """Whether the rollout says nothing about the policy, whatever its reward so far."""


class PolicyTurn(Struct, frozen=True):
    """One turn of the policy, as the environment receives it."""

    text: str
    stop: StopReason


class TurnSampler(Protocol):
    """Samples the turns of the policy: by tokens in this process, or by chat calls at a server. Each method may raise
    RolloutEnded."""

    async def begin(self, messages: Sequence[Message]) -> None:
        """Takes the conversation that the environment begins with. Waiting for others costs the rollout no time."""
        ...

    async def sample_turn(self, turn: int, watch: RolloutStopwatch) -> PolicyTurn: ...

    def observe(self, messages: Sequence[Message]) -> None:
        """Takes the last messages of the environment; no turn follows."""
        ...

    def grade_spans(self, spans: object) -> None:
        """Takes the environment's rewards for parts of the last turn, as it wrote them."""
        ...

    def go_on(self, observations: Sequence[Message], history: list[Message] | None) -> None:
        """Takes the observations that the next turn answers; or `history`, if the environment has changed the
        conversation."""
        ...


class Watcher(Protocol):
    """Sees the environment before each turn, when nothing happens in it."""

    async def before_turn(self, used: LimitsUsed, session: EnvSession) -> None: ...


class LimitsUsed(Struct, frozen=True):
    """The part of its limits that a rollout has used."""

    turns: int = 0
    tool_calls: int = 0
    parse_failures: int = 0
    """Turns in a row, up to the last one, that could not be read."""

    def after(self, result: StepResult) -> LimitsUsed:
        calls = result.metadata.get(TOOL_CALLS)
        return LimitsUsed(
            turns=self.turns + 1,
            tool_calls=self.tool_calls + (calls if isinstance(calls, int) else 0),
            parse_failures=self.parse_failures + 1 if result.metadata.get(PARSE_FAILED) else 0,
        )


class ForkStart(Struct, frozen=True):
    """The start of a fork: the state of the environment before a turn, and what came before."""

    world: WorldSnapshot
    messages: list[Message]
    used: LimitsUsed
    reward: float
    """Sum of the rewards of the turns before it."""


class PlayedRollout(Struct):
    stop: RolloutStop = RolloutStop.DONE
    error: str | None = None
    rewards: list[float] = field(default_factory=list)
    """One reward for each turn that the environment answered."""
    env_s: list[float] = field(default_factory=list)
    is_ungraded: bool = False
    has_failed: bool = False
    """Whether it says nothing about the policy."""
    used: LimitsUsed = LimitsUsed()
    """A fork's begins with that of the rollout that it went on from."""
    seconds: float = 0.0
    reward_before: float = 0.0
    """What the rollout had that a fork went on from."""

    @property
    def reward(self) -> float | None:
        if self.has_failed or self.is_ungraded or not self.rewards:
            return None
        return self.reward_before + sum(self.rewards)


async def play(
    session: EnvSession,
    task: Task,
    turn_sampler: TurnSampler,
    settings: RolloutSettings,
    turns: TurnTaking | None = None,
    *,
    watcher: Watcher | None = None,
    start: ForkStart | None = None,
) -> PlayedRollout:
    """Plays the rollout, or with `start` a fork. It does not raise because of the environment, nor if a sample fails.
    Everything runs in the caller's task, because an environment may have to be closed in the task that opened it."""
    played, watch = PlayedRollout(), RolloutStopwatch(settings.timeout_s)
    try:
        if start is None:
            await _begin(session, task, turn_sampler, watch)
        else:
            played.used, played.reward_before = start.used, start.reward
            await _resume(session, start, turn_sampler, watch)
        while True:
            if turns:
                await turns.wait()
            if watcher:
                await timed(watch, watcher.before_turn(played.used, session))
            policy_turn = await turn_sampler.sample_turn(len(played.rewards), watch)
            if turns:
                await turns.wait()
            await _step(session, policy_turn, turn_sampler, watch, played, settings)
    except RolloutEnded as end:
        await _settle(session, end, watch, played, grades_timeouts=settings.grades_timeouts)
    played.seconds = watch.spent_s
    return played


async def _begin(session: EnvSession, task: Task, turn_sampler: TurnSampler, watch: RolloutStopwatch) -> None:
    try:
        messages = await timed(watch, session.init(with_opened_files(task.prompt)))
    except EnvironmentFailure as error:
        raise RolloutEnded(RolloutStop.ENV_INIT_FAILED, error) from None
    except ChatError as error:
        raise RolloutEnded(RolloutStop.ENV_INIT_FAILED, f"{task.name}: {error}") from None
    await turn_sampler.begin(messages)


async def _resume(session: EnvSession, start: ForkStart, turn_sampler: TurnSampler, watch: RolloutStopwatch) -> None:
    try:
        await timed(watch, session.restore(start.world))
    except EnvironmentFailure as error:
        raise RolloutEnded(RolloutStop.ENV_INIT_FAILED, error) from None
    await turn_sampler.begin(start.messages)


async def _step(
    session: EnvSession,
    policy_turn: PolicyTurn,
    turn_sampler: TurnSampler,
    watch: RolloutStopwatch,
    played: PlayedRollout,
    settings: RolloutSettings,
) -> None:
    before_s = watch.spent_s
    try:
        result = await timed(watch, session.step(policy_turn.text))
    except EnvironmentFailure as error:
        raise RolloutEnded(RolloutStop.ENV_FAILED, error) from None
    played.env_s.append(watch.spent_s - before_s)
    played.rewards.append(result.reward or 0.0)
    played.is_ungraded |= result.reward is None
    played.used = played.used.after(result)
    if SPAN_REWARDS in result.metadata:
        turn_sampler.grade_spans(result.metadata[SPAN_REWARDS])
    turn_sampler.observe(result.observations)
    if stop := stop_after(result, policy_turn.stop, played.used, session.max_turns, settings):
        raise RolloutEnded(stop)
    turn_sampler.go_on(result.observations, result.metadata.get(CHANGED_HISTORY))


async def _settle(
    session: EnvSession, end: RolloutEnded, watch: RolloutStopwatch, played: PlayedRollout, *, grades_timeouts: bool
) -> None:
    """Grades an episode that was ended by us and not by the environment, by its state so far."""
    played.is_ungraded |= end.is_ungraded
    is_late = end.stop is RolloutStop.TIMEOUT and grades_timeouts and bool(played.rewards)
    played.has_failed = end.stop.is_failure and not is_late
    if not played.has_failed and played.rewards:
        try:
            reward = await (session.grade() if is_late else timed(watch, session.grade()))
            played.rewards[-1] += reward or 0.0
            played.is_ungraded |= reward is None
        except EnvironmentFailure as error:
            end, played.has_failed = RolloutEnded(RolloutStop.ENV_FAILED, error), True
        except RolloutEnded as late:
            end, played.has_failed = late, True
    played.stop, played.error = end.stop, end.error


async def timed(watch: RolloutStopwatch, work: Awaitable[T]) -> T:
    try:
        return await watch.run(work)
    except RolloutOutOfTime as late:
        raise RolloutEnded(RolloutStop.TIMEOUT, late) from None


def stop_after(
    result: StepResult, stop: StopReason, used: LimitsUsed, max_turns: int, settings: RolloutSettings
) -> RolloutStop | None:
    """Returns why the rollout stops after this turn, if it does. A turn that was cut is graded, but the rollout cannot
    continue from it. If the environment was done anyway, only Turn.stop says that it was cut."""
    if result.done:
        ran_out = result.metadata.get("done_reason") == RolloutStop.MAX_TURNS
        return RolloutStop.MAX_TURNS if ran_out else RolloutStop.DONE
    if stop is StopReason.LENGTH:
        return RolloutStop.LENGTH
    limits = (
        (RolloutStop.MAX_TURNS, used.turns, max_turns),
        (RolloutStop.TOOL_CALLS, used.tool_calls, settings.max_tool_calls),
        (RolloutStop.PARSE_FAILURES, used.parse_failures, settings.max_parse_failures),
    )
    return next((ending for ending, count, limit in limits if limit is not None and count >= limit), None)
