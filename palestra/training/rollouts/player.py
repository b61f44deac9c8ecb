"""One rollout, from the environment's first message to its record: token in, token out.

Owns: the turns of one rollout, its room and time, what each failure is called. Never touches: other rollouts, who
trains on it. A history is never encoded again: each prompt is the last one, the turn as sampled, the observation.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from msgspec import Struct

from palestra.chat import ChatError, ChatTokenizer
from palestra.config.train import RolloutConfig
from palestra.environments.errors import EnvironmentFailure
from palestra.environments.session import EnvSession, StepResult
from palestra.training.policy import Sampler, SamplingError
from palestra.training.rollouts.sources import ERROR_LENGTH, blank_rollout
from palestra.training.rollouts.stopwatch import OutOfTime, Stopwatch
from palestra.training.seeds import derive_seed
from palestra.types import SampledSequence, SamplingParams, StopReason
from palestra.types.rollouts import Branch, GroupRequest, Message, Rollout, RolloutStop, Task, Turn

T = TypeVar("T")

CHANGED_HISTORY = "modified_chat_history"
"""In the metadata of a step: the whole conversation as it is from now on."""


class RolloutSettings(Struct, frozen=True, kw_only=True):
    """What differs between training and evaluation."""

    max_tokens: int
    max_context: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    timeout_s: float = 600.0
    concurrency: int = 256

    @classmethod
    def of(cls, config: RolloutConfig, temperature: float | None = None) -> RolloutSettings:
        return cls(
            max_tokens=config.max_tokens,
            max_context=config.max_context,
            temperature=config.temperature if temperature is None else temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            timeout_s=config.timeout_s,
            concurrency=config.concurrency,
        )


class Environments(Protocol):
    """The one thing a player asks of the run's environments."""

    def open(self, task: Task) -> EnvSession: ...


class TurnTaking(Protocol):
    """Where a player may have to wait for others, before it samples and before it steps."""

    async def wait(self) -> None: ...


class Table(Struct, frozen=True):
    """What all players of a run share."""

    tokenizer: ChatTokenizer
    environments: Environments
    settings: RolloutSettings


async def play_rollout(
    table: Table, request: GroupRequest, index: int, sampler: Sampler, turns: TurnTaking | None = None
) -> Rollout:
    """Always a record, whatever happens to the environment or a sample. All in the caller's task: an environment may
    have to be closed in the task that opened it."""
    player = Player(table, request, index)
    try:
        await player.begin()
        while not player.is_over:
            if turns:
                await turns.wait()
            await player.draw(sampler)
            if turns and not player.is_over:
                await turns.wait()
            await player.step()
        return await player.record()
    finally:
        await player.close()


class _Ended(Exception):
    """The rollout cannot go on."""

    def __init__(self, stop: RolloutStop, error: object = None) -> None:
        self.stop = stop
        self.error = None if error is None else " ".join(str(error).split())[:ERROR_LENGTH]


class Player:
    """`begin`, then `draw` and `step` in turns until it is over. None of them raises because of what it plays with."""

    def __init__(self, table: Table, request: GroupRequest, index: int) -> None:
        self._tokenizer = table.tokenizer
        self._settings = table.settings
        self._task = request.task
        self._session = table.environments.open(request.task)
        self._context: list[int] = []
        """Everything so far: the next prompt."""
        self._observation: list[int] = []
        """The end of the context that the next turn answers to."""
        self._new_prompt: list[int] | None = None
        """Where the environment has changed the conversation: what the next turn begins with."""
        self._is_ungraded = False
        self._watch = Stopwatch(table.settings.timeout_s)
        self._end: _Ended | None = None
        self._rollout = blank_rollout(request, index, request.seeds[index])
        self._rollout.temperature = table.settings.temperature

    @property
    def is_over(self) -> bool:
        return self._end is not None

    async def begin(self) -> None:
        try:
            messages = await self._timed(self._session.init(self._task.prompt))
            self._rollout.messages = list(messages)
            self._rollout.prompt = self._tokenizer.encode_chat(messages)
            self._context = list(self._rollout.prompt)
            if not self._has_room(self._context):
                raise _Ended(RolloutStop.CONTEXT, self._no_room("prompt", self._context))
        except (EnvironmentFailure, ChatError) as error:
            self._end = _Ended(RolloutStop.ENV_INIT_FAILED, error)
        except _Ended as end:
            self._end = end

    async def draw(self, sampler: Sampler) -> None:
        """One turn of the policy."""
        if self.is_over:
            return
        version, before_s = sampler.version, self._watch.spent_s
        try:
            sequences = await self._timed(sampler.sample(self._context, self._params()))
            sequence = _checked(sequences)
        except SamplingError as error:
            self._end = _Ended(RolloutStop.SAMPLING_FAILED, error)
        except _Ended as end:
            self._end = end
        else:
            self._add_turn(sequence, version, self._watch.spent_s - before_s)

    async def step(self) -> None:
        """The environment's answer to the last turn."""
        if self.is_over:
            return
        turn, before_s = self._rollout.turns[-1], self._watch.spent_s
        try:
            result = await self._timed(self._session.step(turn.text))
            turn.env_s = self._watch.spent_s - before_s
            self._take(result, turn)
        except (EnvironmentFailure, ChatError) as error:
            self._end = _Ended(RolloutStop.ENV_FAILED, error)
        except _Ended as end:
            self._end = end
            await self._settle(turn)

    async def record(self) -> Rollout:
        """Once it is over, and before it is closed."""
        assert self._end is not None
        rollout = self._rollout
        rollout.stop, rollout.error = self._end.stop, self._end.error
        rollout.metrics = await self._session.metrics()
        rollout.seconds = self._watch.spent_s
        if rollout.turns and not rollout.stop.is_failure and not self._is_ungraded:
            rollout.reward = sum(turn.reward for turn in rollout.all_turns)
        return rollout

    async def close(self) -> None:
        await self._session.close()

    def _params(self) -> SamplingParams:
        settings = self._settings
        return SamplingParams(
            max_tokens=min(settings.max_tokens, settings.max_context - len(self._context)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=derive_seed(self._rollout.seed, len(self._rollout.all_turns)),
            stop_token_ids=self._tokenizer.stop_ids,
        )

    def _add_turn(self, sequence: SampledSequence, version: int, sample_s: float) -> None:
        text = self._tokenizer.decode(sequence.tokens)
        turn = Turn(
            observation=self._observation,
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
            stop=sequence.stop_reason,
            version=version,
            text=text,
            sample_s=sample_s,
        )
        if self._new_prompt is not None:
            self._branch_off(self._new_prompt)
        self._rollout.turns.append(turn)
        self._rollout.messages.append({"role": "assistant", "content": text})
        self._context += sequence.tokens
        if turn.stop is StopReason.ABORT:
            self._end = _Ended(RolloutStop.SAMPLING_FAILED, "the engine gave up the sample before it ended")

    def _take(self, result: StepResult, turn: Turn) -> None:
        """What the environment said, and with it the next prompt; raises _Ended where there is none."""
        self._rollout.messages += result.observations
        turn.reward = result.reward or 0.0
        self._is_ungraded |= result.reward is None
        if stop := stop_after(result, turn.stop, len(self._rollout.all_turns), self._session.max_turns):
            raise _Ended(stop)
        if (history := result.metadata.get(CHANGED_HISTORY)) is not None:
            self._go_on_from(history)
            return
        observation = self._tokenizer.observation(result.observations)
        if not turn.tokens or turn.tokens[-1] not in self._tokenizer.stop_ids:
            observation = [self._tokenizer.turn_end, *observation]  # a stop string ended the turn: nobody drew its end
        self._observation = observation
        self._context += observation
        if not self._has_room(self._context):
            # Without room even right after the prompt, it says nothing about the policy: no 0 for the baseline.
            self._is_ungraded |= not self._has_room(self._rollout.prompt + observation)
            raise _Ended(RolloutStop.CONTEXT, self._no_room("observation", observation))

    def _go_on_from(self, history: list[Message]) -> None:
        """The environment dropped a part of the conversation: the next turn answers to the rest."""
        self._new_prompt = self._tokenizer.encode_chat(history)
        self._context, self._observation = list(self._new_prompt), []
        if not self._has_room(self._context):
            raise _Ended(RolloutStop.CONTEXT, self._no_room("prompt", self._context))

    def _branch_off(self, prompt: list[int]) -> None:
        """What was sampled before belongs to another prompt, and is a row of its own."""
        rollout = self._rollout
        name = f"{rollout.id}.{len(rollout.branches) + 1}"
        rollout.branches.append(
            Branch(id=name, prompt=rollout.prompt, turns=rollout.turns, temperature=rollout.temperature)
        )
        rollout.prompt, rollout.turns, self._new_prompt = prompt, [], None

    async def _settle(self, turn: Turn) -> None:
        """Where we end the episode and not the environment: what it is worth as it stands."""
        assert self._end is not None
        if self._end.stop.is_failure:
            return
        try:
            reward = await self._timed(self._session.grade())
        except EnvironmentFailure as error:
            self._end = _Ended(RolloutStop.ENV_FAILED, error)
        except _Ended as end:
            self._end = end
        else:
            turn.reward += reward or 0.0
            self._is_ungraded |= reward is None

    def _has_room(self, context: list[int]) -> bool:
        """For one more token at least."""
        return len(context) < self._settings.max_context

    def _no_room(self, name: str, tokens: list[int]) -> str:
        total = "" if len(tokens) == len(self._context) else f", {len(self._context)} with all before it"
        limit = self._settings.max_context
        return f"the {name} has {len(tokens)} tokens{total}: no room for a turn in {limit} (rollout.max_context)"

    async def _timed(self, work: Awaitable[T]) -> T:
        try:
            return await self._watch.run(work)
        except OutOfTime as late:
            raise _Ended(RolloutStop.TIMEOUT, late) from None


def stop_after(result: StepResult, stop: StopReason, turns: int, max_turns: int) -> RolloutStop | None:
    """A cut turn is graded for what it has, but there is nothing to go on from. Turn.stop tells that it was cut, where
    the environment was done with it anyway."""
    if result.done:
        ran_out = result.metadata.get("done_reason") == RolloutStop.MAX_TURNS
        return RolloutStop.MAX_TURNS if ran_out else RolloutStop.DONE
    if stop is StopReason.LENGTH:
        return RolloutStop.LENGTH
    return RolloutStop.MAX_TURNS if turns >= max_turns else None


def _checked(sequences: list[SampledSequence]) -> SampledSequence:
    if len(sequences) != 1:
        raise SamplingError(f"asked for 1 sequence, got {len(sequences)}")
    (sequence,) = sequences
    if len(sequence.tokens) != len(sequence.logprobs):
        raise SamplingError(f"got {len(sequence.tokens)} tokens with {len(sequence.logprobs)} logprobs")
    return sequence
