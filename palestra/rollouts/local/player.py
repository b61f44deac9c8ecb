"""Plays one rollout in this process, from the environment's first message to its record, in tokens.

The history is never encoded again: each prompt is the previous one, the turn as sampled, and the observation.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from palestra.chat import ChatError, ChatTokenizer
from palestra.environments.session import EnvSession
from palestra.environments.snapshots import NotCopyable
from palestra.rollouts.concurrent import cleaning_up
from palestra.rollouts.local.first_turns import FirstTurns
from palestra.rollouts.local.forks import ForkState, ForkStates
from palestra.rollouts.local.span_rewards import CharSpan, token_spans
from palestra.rollouts.policy_sampler import PolicySampler, SamplingError
from palestra.rollouts.rollout_loop import (
    SPAN_REWARDS,
    Environments,
    ForkStart,
    LimitsUsed,
    PlayedRollout,
    PolicyTurn,
    RolloutEnded,
    RolloutSettings,
    TurnTaking,
    Watcher,
    play,
    timed,
)
from palestra.rollouts.seeds import turn_seed
from palestra.rollouts.sources import blank_rollout
from palestra.rollouts.stopwatch import RolloutStopwatch
from palestra.types import SampledSequence, SamplingParams, StopReason
from palestra.types.rollouts import Branch, GroupRequest, Message, Rollout, RolloutStop, Task, Turn


class PlayerContext(Struct, frozen=True):
    """What all players of a run share."""

    tokenizer: ChatTokenizer
    environments: Environments
    settings: RolloutSettings


async def play_rollout(
    context: PlayerContext,
    request: GroupRequest,
    index: int,
    sampler: PolicySampler,
    first_turns: FirstTurns | None = None,
    turns: TurnTaking | None = None,
    forking: ForkStates | None = None,
) -> Rollout:
    """Plays a rollout. Always returns a record, whatever happens to the environment or a sample. Without `first_turns`
    it shares its first request with nobody. `forking` keeps the states from which forks may begin."""
    first_turns = first_turns or FirstTurns(sampler, [index])
    rollout = blank_rollout(request, index, request.seeds[index])
    rollout.temperature = context.settings.temperature
    turn_sampler = TokenTurnSampler(context, rollout, sampler, first_turns, index)
    watcher = None if forking is None else ForkWatcher(forking, turn_sampler)
    return await _played(context, request.task, turn_sampler, turns=turns, watcher=watcher)


async def play_fork(
    context: PlayerContext, task: Task, fork: Rollout, state: ForkState, place: int, first_turns: FirstTurns
) -> Rollout:
    """Plays a fork, of which `fork` is the record so far: the rollout goes on from a state in another way. `place` is
    that among the forks from this state, which share their first request."""
    turn_sampler = TokenTurnSampler(context, fork, first_turns.sampler, first_turns, place, state.tokens)
    start = ForkStart(state.world, state.messages, state.used, state.reward)
    return await _played(context, task, turn_sampler, start=start)


async def _played(
    context: PlayerContext,
    task: Task,
    turn_sampler: TokenTurnSampler,
    *,
    turns: TurnTaking | None = None,
    watcher: Watcher | None = None,
    start: ForkStart | None = None,
) -> Rollout:
    session, rollout = context.environments.open(task), turn_sampler.rollout
    try:
        played = await play(session, task, turn_sampler, context.settings, turns, watcher=watcher, start=start)
        rollout.metrics, rollout.verdict = await session.metrics(), await session.verdict()
        return _recorded(rollout, played)
    finally:
        turn_sampler.leave()
        with cleaning_up():
            await session.close()


class ForkWatcher:
    """Keeps the state before each turn, as far as its world can be copied."""

    def __init__(self, states: ForkStates, turn_sampler: TokenTurnSampler) -> None:
        self._states, self._sampler = states, turn_sampler

    async def before_turn(self, used: LimitsUsed, session: EnvSession) -> None:
        if self._states.wants(used.turns):
            try:
                world = await session.snapshot()
            except NotCopyable as error:
                self._states.refusal = str(error)
                return
            self._states.keep(used, world, self._sampler.tokens, self._sampler.rollout.messages)


def _recorded(rollout: Rollout, played: PlayedRollout) -> Rollout:
    for turn, reward, env_s in zip(rollout.turns_in_order, played.rewards, played.env_s, strict=False):
        turn.reward, turn.env_s = reward, env_s
    rollout.stop, rollout.error = played.stop, played.error
    rollout.seconds, rollout.reward = played.seconds, played.reward
    return rollout


class TokenTurnSampler:
    """Samples turns from tokens, and stores them in the rollout's record."""

    def __init__(
        self,
        context: PlayerContext,
        rollout: Rollout,
        sampler: PolicySampler,
        first_turns: FirstTurns,
        place: int,
        prefix: Sequence[int] | None = None,
    ) -> None:
        """`place`: its place among those who share `first_turns`. `prefix`: for a fork, all tokens before it."""
        self._tokenizer, self._settings = context.tokenizer, context.settings
        self._rollout, self._sampler, self._first_turns = rollout, sampler, first_turns
        self._place, self._prefix = place, prefix
        self._context: list[int] = []
        """All tokens so far, which are the next prompt."""
        self._observation: list[int] = []
        """The end of the context, which the next turn answers."""
        self._new_prompt: list[int] | None = None
        """The prompt of the next turn, if the environment has changed the conversation."""

    @property
    def rollout(self) -> Rollout:
        return self._rollout

    @property
    def tokens(self) -> list[int]:
        """A copy of all tokens so far."""
        return list(self._context)

    def leave(self) -> None:
        """Lets those go on who wait to share a request with it."""
        self._first_turns.leave(self._place)

    async def begin(self, messages: Sequence[Message]) -> None:
        self._rollout.messages = list(messages)
        try:
            prefix = self._prefix
            self._rollout.prompt = self._tokenizer.encode_chat(messages) if prefix is None else list(prefix)
        except ChatError as error:
            raise RolloutEnded(RolloutStop.ENV_INIT_FAILED, error) from None
        self._context = list(self._rollout.prompt)
        self._check_room("prompt", self._context)
        await self._first_turns.join(self._place, self._context, self._params(0))

    async def sample_turn(self, turn: int, watch: RolloutStopwatch) -> PolicyTurn:
        version, before_s = self._sampler.version, watch.spent_s
        try:
            sequence = _checked(await timed(watch, self._sample(turn)))
        except SamplingError as error:
            raise RolloutEnded(RolloutStop.SAMPLING_FAILED, error) from None
        self._note(sequence, version, watch.spent_s - before_s)
        if sequence.stop_reason is StopReason.ABORT:
            raise RolloutEnded(RolloutStop.SAMPLING_FAILED, "the engine cancelled the sample before its end")
        return PolicyTurn(self._rollout.turns[-1].text, sequence.stop_reason)

    def observe(self, messages: Sequence[Message]) -> None:
        self._rollout.messages += messages

    def grade_spans(self, spans: object) -> None:
        try:
            found = msgspec.convert(spans, list[CharSpan])
        except msgspec.ValidationError as error:
            wrong = f"{SPAN_REWARDS} should be a list of start, end and reward: {error}"
            raise RolloutEnded(RolloutStop.ENV_FAILED, wrong) from None
        turn = self._rollout.turns[-1]
        turn.spans = token_spans(found, turn.tokens, self._tokenizer)

    def go_on(self, observations: Sequence[Message], history: list[Message] | None) -> None:
        try:
            if history is not None:
                self._begin_anew(self._tokenizer.encode_chat(history))
            else:
                self._read(self._tokenizer.observation(observations))
        except ChatError as error:
            raise RolloutEnded(RolloutStop.ENV_FAILED, error) from None

    async def _sample(self, turn: int) -> list[SampledSequence]:
        if turn == 0:
            return await self._first_turns.sample(self._place)
        return await self._sampler.sample(self._context, self._params(turn))

    def _params(self, turn: int) -> SamplingParams:
        settings = self._settings
        return SamplingParams(
            max_tokens=min(settings.max_tokens, settings.max_context - len(self._context)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=turn_seed(self._rollout.seed, turn),
            stop_token_ids=self._tokenizer.stop_ids,
        )

    def _note(self, sequence: SampledSequence, version: int, sample_s: float) -> None:
        text = self._tokenizer.decode(sequence.tokens)
        turn = Turn(
            observation=self._observation,
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
            stop=sequence.stop_reason,
            version=version,
            text=text,
            sample_s=sample_s,
            sequence_id=sequence.sequence_id,
        )
        if self._new_prompt is not None:
            self._branch_off(self._new_prompt)
        self._rollout.turns.append(turn)
        self._rollout.messages.append({"role": "assistant", "content": text})
        self._context += sequence.tokens

    def _read(self, observation: list[int]) -> None:
        tokens = self._rollout.turns[-1].tokens
        if not tokens or tokens[-1] not in self._tokenizer.stop_ids:
            # a stop string ended the turn, so its end token was not sampled
            observation = [self._tokenizer.turn_end, *observation]
        self._observation = observation
        self._context += observation
        # If there is no room even right after the prompt, this says nothing about the policy: it gets no reward of 0,
        # which would shift the baseline.
        is_fault_of_task = self._prefix is None and not self._has_room(self._rollout.prompt + observation)
        self._check_room("observation", observation, is_ungraded=is_fault_of_task)

    def _begin_anew(self, prompt: list[int]) -> None:
        """Continues after the environment has dropped a part of the conversation: the next turn answers the rest."""
        self._new_prompt, self._context, self._observation = prompt, list(prompt), []
        self._check_room("prompt", self._context)

    def _branch_off(self, prompt: list[int]) -> None:
        """Starts a new row: what was sampled before belongs to another prompt and becomes a row of its own."""
        rollout = self._rollout
        name = f"{rollout.id}.{len(rollout.branches) + 1}"
        rollout.branches.append(
            Branch(id=name, prompt=rollout.prompt, turns=rollout.turns, temperature=rollout.temperature)
        )
        rollout.prompt, rollout.turns, self._new_prompt = prompt, [], None

    def _has_room(self, context: list[int]) -> bool:
        """Whether at least one more token fits."""
        return len(context) < self._settings.max_context

    def _check_room(self, name: str, tokens: list[int], *, is_ungraded: bool = False) -> None:
        if self._has_room(self._context):
            return
        total = "" if len(tokens) == len(self._context) else f", {len(self._context)} with all before it"
        room = f"no room for a turn in {self._settings.max_context} (rollout.max_context)"
        error = f"the {name} has {len(tokens)} tokens{total}: {room}"
        raise RolloutEnded(RolloutStop.CONTEXT, error, is_ungraded=is_ungraded)


def _checked(sequences: list[SampledSequence]) -> SampledSequence:
    if len(sequences) != 1:
        raise SamplingError(f"1 sequence was requested, but {len(sequences)} came")
    (sequence,) = sequences
    if len(sequence.tokens) != len(sequence.logprobs):
        raise SamplingError(
            f"the sampler returned {len(sequence.tokens)} tokens with {len(sequence.logprobs)} logprobs"
        )
    return sequence
