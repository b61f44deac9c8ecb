"""The turns of one rollout, sampled from tokens: the prompt, what was sampled, observations, and the pictures among
them.

The history is never encoded again: each prompt is the previous one, the turn as sampled, and the observation.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.picture_files import SeenMessages, TextOnlyModel, read_pictures
from palestra.environments.snapshots import WorldSnapshot
from palestra.rollouts.local.first_turns import FirstTurns
from palestra.rollouts.local.forks import ForkState
from palestra.rollouts.local.span_rewards import CharSpan, token_spans
from palestra.rollouts.policy_sampler import PolicySampler, SamplingError
from palestra.rollouts.rollout_loop import (
    SPAN_REWARDS,
    Environments,
    LimitsUsed,
    PolicyTurn,
    RolloutEnded,
    RolloutSettings,
    timed,
)
from palestra.rollouts.seeds import turn_seed
from palestra.rollouts.sources import RolloutSourceError
from palestra.rollouts.stopwatch import RolloutStopwatch
from palestra.types import SampledSequence, SamplingParams, StopReason
from palestra.types.pictures import PromptPicture
from palestra.types.rollouts import Branch, Message, Rollout, RolloutStop, Turn
from palestra.types.sampling import VersionSegment


class PlayerContext(Struct, frozen=True):
    """What all players of a run share."""

    tokenizer: ChatTokenizer
    environments: Environments
    settings: RolloutSettings


class TokenTurnSampler:
    """Samples turns from tokens, and stores them in the rollout's record."""

    def __init__(
        self,
        context: PlayerContext,
        task: str,
        rollout: Rollout,
        sampler: PolicySampler,
        first_turns: FirstTurns,
        place: int,
        prefix: ForkState | None = None,
    ) -> None:
        """`task`: its name, for messages. `place`: its place among those who share `first_turns`. `prefix`: for a fork,
        what was before it."""
        self._tokenizer, self._settings = context.tokenizer, context.settings
        self._rollout, self._sampler, self._first_turns = rollout, sampler, first_turns
        self._task, self._place, self._prefix = task, place, prefix
        self._context: list[int] = []
        """All tokens so far, which are the next prompt."""
        self._observation: list[int] = []
        """The end of the context, which the next turn answers."""
        self._pictures: list[PromptPicture] = []
        """Those of the context."""
        self._observed = SeenMessages([])
        """The environment's last messages."""
        self._new_prompt: list[int] | None = None
        """The prompt of the next turn, if the environment has changed the conversation."""

    @property
    def rollout(self) -> Rollout:
        return self._rollout

    def state(self, used: LimitsUsed, world: WorldSnapshot) -> ForkState:
        """A copy of the conversation so far, from which forks may go on."""
        rollout = self._rollout
        return ForkState(
            used=used,
            world=world,
            tokens=list(self._context),
            messages=list(rollout.messages),
            pictures=list(self._pictures),
            picture_files=dict(rollout.picture_files),
        )

    def leave(self) -> None:
        """Lets those go on who wait to share a request with it."""
        self._first_turns.leave(self._place)

    async def begin(self, messages: Sequence[Message]) -> None:
        rollout, prefix = self._rollout, self._prefix
        if prefix is not None:
            rollout.messages, rollout.picture_files = list(messages), dict(prefix.picture_files)
            rollout.prompt, self._pictures = list(prefix.tokens), list(prefix.pictures)
        else:
            seen = self._see(messages, RolloutStop.ENV_INIT_FAILED)
            rollout.messages = seen.shown
            rollout.prompt = self._encoded(seen, RolloutStop.ENV_INIT_FAILED)
        rollout.pictures = list(self._pictures)
        self._context = list(rollout.prompt)
        self._check_room("prompt", self._context)
        await self._first_turns.join(self._place, self._context, self._params(0), self._pictures)

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
        self._observed = self._see(messages, RolloutStop.ENV_FAILED)
        self._rollout.messages += self._observed.shown

    def grade_spans(self, spans: object) -> None:
        try:
            found = msgspec.convert(spans, list[CharSpan])
        except msgspec.ValidationError as error:
            wrong = f"{SPAN_REWARDS} should be a list of start, end and reward: {error}"
            raise RolloutEnded(RolloutStop.ENV_FAILED, wrong) from None
        turn = self._rollout.turns[-1]
        turn.spans = token_spans(found, turn.tokens, self._tokenizer)

    def go_on(self, observations: Sequence[Message], history: list[Message] | None) -> None:
        if history is not None:
            self._begin_anew(self._encoded(self._see(history, RolloutStop.ENV_FAILED), RolloutStop.ENV_FAILED))
            return
        try:
            self._read(self._tokenizer.observation(self._observed.messages))
        except ChatError as error:
            raise RolloutEnded(RolloutStop.ENV_FAILED, error) from None

    def _see(self, messages: Sequence[Message], failure: RolloutStop) -> SeenMessages:
        """Reads the pictures of messages, and keeps their files for the record."""
        files = self._rollout.picture_files
        try:
            seen = read_pictures(messages, self._tokenizer.card, files, source=self._task)
        except TextOnlyModel as error:
            if failure is RolloutStop.ENV_FAILED:  # what a tool returns once need not end the run
                raise RolloutEnded(failure, error) from None
            raise RolloutSourceError(f"environment {self._rollout.environment}: {error}") from None
        except ChatError as error:
            raise RolloutEnded(failure, f"{self._task}: {error}") from None
        files.update((file.digest, file) for file in seen.files)
        return seen

    def _encoded(self, seen: SeenMessages, failure: RolloutStop) -> list[int]:
        """The tokens of a whole conversation; its pictures are those of the context from now on."""
        try:
            tokens = self._tokenizer.encode_chat(seen.messages)
            self._pictures = seen.placed(self._tokenizer.pictures, tokens)
        except ChatError as error:
            raise RolloutEnded(failure, error) from None
        return tokens

    async def _sample(self, turn: int) -> list[SampledSequence]:
        if turn == 0:
            return await self._first_turns.sample(self._place)
        return await self._sampler.sample(self._context, self._params(turn), pictures=self._pictures)

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
        segments = sequence.segments or [VersionSegment(0, version)]
        turn = Turn(
            observation=self._observation,
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
            stop=sequence.stop_reason,
            version=segments[0].version,
            segments=segments if len(segments) > 1 else [],
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
        found = self._observed.placed(self._tokenizer.pictures, observation, len(self._context))
        self._pictures += found
        self._rollout.pictures += found
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
            Branch(
                id=name,
                prompt=rollout.prompt,
                turns=rollout.turns,
                temperature=rollout.temperature,
                pictures=rollout.pictures,
            )
        )
        rollout.prompt, rollout.turns, self._new_prompt = prompt, [], None
        rollout.pictures = list(self._pictures)

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
