"""Converts groups of rollouts to the rows of a training batch."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, field

from palestra.config.algorithm import AdvantageKind
from palestra.config.train import DistillConfig, GrpoConfig
from palestra.training.batches.advantages import total_length
from palestra.training.batches.compared_rewards import compare
from palestra.training.batches.corrections import CorrectionSummary, apply_corrections
from palestra.training.batches.distillation import add_teacher_advantages, add_teacher_tokens
from palestra.training.batches.entropy_bonus import add_entropy_bonus
from palestra.training.batches.kl_penalty import add_kl_penalty
from palestra.training.batches.observation_loss import add_observation_loss
from palestra.training.batches.span_credit import add_span_credit
from palestra.training.batches.tree_credit import TreeCredit
from palestra.training.batches.turn_credit import CreditSummary, TurnCredit, mixed, summarise
from palestra.types.pictures import whole_pictures
from palestra.types.rollouts import (
    NOT_SAMPLED,
    Branch,
    Group,
    Rollout,
    RolloutStop,
    SequenceSource,
    TrainSequence,
    is_usable,
)
from palestra.types.sampling import TopLogprobs


class DropReason(StrEnum):
    """Why a rollout is not in the batch. From `OVERLONG` on, its reward still counts in its group's baseline."""

    FAILED = "failed"
    UNGRADED = "ungraded"
    """It has no reward, or one that is not a finite number."""
    ZERO_VARIANCE = "zero_variance"
    """The rewards of its group are all equal."""
    OVERLONG = "overlong"
    """Its last turn was cut off."""
    MASKED = "masked"
    """The limit that ended it is masked (`rollout.endings`)."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """After the prompt, no sampled token fits into `max_sequence_length`."""
    EMPTY = "empty"
    """Nothing was sampled."""
    STALE = "stale"
    """All of its tokens are older than the run allows."""
    BROKEN = "broken"
    """It has no prompt, or its logprobs are missing or not finite."""


class TrainingBatch(Struct, kw_only=True):
    minibatches: list[list[TrainSequence]]
    """One list for each optimizer step; none is empty."""
    dropped: dict[DropReason, int] = field(default_factory=dict)
    """Number of rollouts by reason."""
    truncated: int = 0
    """Number of rows that were cut at `max_sequence_length`."""
    correction: CorrectionSummary | None = None
    """None if there are no off-policy corrections, or nothing to correct."""
    observation_logprob: float | None = None
    """Mean logprob of what the environment said; None if nothing is learned from that."""
    credit: CreditSummary | None = None
    """None if turns have no advantages of their own."""
    stale_tokens: int = 0
    """Number of sampled tokens that are not trained because they are older than the run allows."""

    @property
    def sequences(self) -> list[TrainSequence]:
        return [sequence for minibatch in self.minibatches for sequence in minibatch]


def build_batch(
    groups: Sequence[Group],
    config: GrpoConfig,
    base_logprobs: Mapping[str, Sequence[float]] | None = None,
    own_logprobs: Mapping[str, Sequence[float]] | None = None,
    teacher_logprobs: Mapping[str, Sequence[float]] | None = None,
    teacher_top: Mapping[str, Sequence[TopLogprobs | None]] | None = None,
    entropy_bonus: float = 0.0,
    oldest: int = 0,
) -> TrainingBatch:
    """Builds the batch. `base_logprobs` has, for each row that could be used, the logprobs of all its tokens under the
    base model (the first is 0). `own_logprobs` has the trainer's logprobs of the first `max_sequence_length` tokens;
    where present they are used instead of the sampler's, and corrections compare the two. `teacher_logprobs` are like
    `base_logprobs`, for distillation, and `teacher_top` is what teachers would most likely have said. `entropy_bonus`
    is the coefficient of this step. `oldest` is the oldest version whose tokens are trained."""
    correction = config.algorithm.correction
    if config.penalty.kl and base_logprobs is None:
        raise ValueError("penalty.kl is set, so build_batch needs the base model's logprobs")
    chosen = _choose(groups, config, oldest)
    limit = config.data.max_sequence_length
    sequences = [to_sequence(row, advantage, limit) for row, advantage in chosen.used]
    if weight := config.algorithm.span_weight:
        for sequence, (row, _) in zip(sequences, chosen.used, strict=True):
            add_span_credit(sequence, row, chosen.span_means[row.id], weight)
    stale = sum(mask_stale(sequence, oldest) for sequence in sequences)
    for sequence in sequences:
        found = (own_logprobs or {}).get(sequence.rollout)
        if found is None and correction.is_on:
            raise ValueError("algorithm.correction is set, so build_batch needs the trainer's own logprobs of all rows")
        if found is not None:
            if correction.is_on:
                sequence.sampler_logprobs = sequence.logprobs
            pairs = zip(found, sequence.mask, strict=True)
            sequence.logprobs = [own if sampled else 0.0 for own, sampled in pairs]
    if isinstance(config, DistillConfig):
        if config.distillation.is_sampled:
            add_teacher_advantages(sequences, teacher_logprobs or {}, config.distillation)
        else:
            add_teacher_tokens(sequences, teacher_top or {}, config.distillation)
    if config.penalty.kl and base_logprobs is not None:
        add_kl_penalty(sequences, base_logprobs, config.penalty)
    if entropy_bonus:
        add_entropy_bonus(sequences, entropy_bonus)
    # Corrections come last: what they mask is to stay at 0, and the sign of an advantage is known only now.
    summary = apply_corrections(sequences, correction) if correction.is_on else None
    observed = None
    if weight := config.algorithm.observation_loss:
        prompts = [len(row.prompt) for row, _ in chosen.used]
        observed = add_observation_loss(sequences, prompts, own_logprobs or {}, weight)
    minibatches = split(sequences, config.algorithm.minibatches, chosen.salt)
    normalize(minibatches, config, chosen.played)
    return TrainingBatch(
        minibatches=minibatches,
        dropped=dict(chosen.dropped),
        truncated=sum(total_length(row) > limit for row, _ in chosen.used),
        correction=summary,
        observation_logprob=observed,
        credit=summarise(chosen.credits),
        stale_tokens=stale,
    )


def trainable_rows(groups: Sequence[Group], config: GrpoConfig, oldest: int = 0) -> list[Branch]:
    """Returns the rows that `build_batch` will use, for which the base model's logprobs are worth computing."""
    return [row for row, _ in _choose(groups, config, oldest).used]


def scorable_rows(groups: Sequence[Group], config: GrpoConfig) -> list[Branch]:
    """Returns all rows with sampled tokens whose logprobs are known, those that teach nothing too."""
    trees = [one for rollout in _by_id(groups) for one in rollout.tree]
    rows = [row for rollout in trees if not rollout.has_failed for row in rollout.rows]
    return [row for row in rows if _why_no_row(row, config) in (None, DropReason.OVERLONG)]


def to_sequence(row: Branch, advantage: float | Sequence[float], limit: int) -> TrainSequence:
    """Returns the first `limit` tokens of prompt and turns, up to a picture that would be cut. Mask, logprob and
    advantage are 0 for tokens that the policy did not sample. `advantage` is one for all turns, or one for each."""
    by_turn = [advantage] * len(row.turns) if isinstance(advantage, int | float) else advantage
    tokens, mask = list(row.prompt), [False] * len(row.prompt)
    logprobs, of_tokens = [0.0] * len(row.prompt), [0.0] * len(row.prompt)
    versions = [NOT_SAMPLED] * len(row.prompt)
    sources: list[SequenceSource] = []
    for turn, own in zip(row.turns, by_turn, strict=True):
        tokens += turn.observation + turn.tokens
        sources.append(SequenceSource(turn.sequence_id, len(tokens) - len(turn.tokens), len(tokens)))
        mask += [False] * len(turn.observation) + [True] * len(turn.tokens)
        logprobs += [0.0] * len(turn.observation) + turn.logprobs
        of_tokens += [0.0] * len(turn.observation) + [own] * len(turn.tokens)
        versions += [NOT_SAMPLED] * len(turn.observation) + turn.versions
    limit, pictures = whole_pictures(row.pictures, limit)
    return TrainSequence(
        tokens=tokens[:limit],
        pictures=pictures,
        mask=mask[:limit],
        logprobs=logprobs[:limit],
        advantages=of_tokens[:limit],
        versions=versions[:limit],
        rollout=row.id,
        sources=sources if all(source.sequence_id for source in sources) else [],
    )


def mask_stale(sequence: TrainSequence, oldest: int) -> int:
    """Takes tokens of versions before `oldest` out of the loss, and returns how many there were: to the rest of the
    row they are context."""
    stale = [
        place
        for place, (sampled, version) in enumerate(zip(sequence.mask, sequence.versions, strict=True))
        if sampled and version < oldest
    ]
    for place in stale:
        sequence.mask[place], sequence.advantages[place] = False, 0.0
    return len(stale)


def split(sequences: Sequence[TrainSequence], parts: int, salt: str) -> list[list[TrainSequence]]:
    """Splits whole sequences at random into parts, so that groups mix; the sizes differ by one at most."""
    order = list(sequences)
    if parts > 1:
        random.Random(f"minibatches/{salt}").shuffle(order)
    dealt = [order[first::parts] for first in range(parts)]
    return [minibatch for minibatch in dealt if minibatch]


def normalize(minibatches: Sequence[Sequence[TrainSequence]], config: GrpoConfig, played: Played) -> None:
    """Scales the advantages: the engine sums the loss over tokens, and the scale turns this sum into a mean over what
    was played. So one informative group of twelve gives a twelfth of the gradient. Of what was played, a minibatch has
    the share that it has of what is trained."""
    if config.algorithm.normalize == "none":
        return
    sequences = sum(map(len, minibatches))
    tokens = sum(sum(sequence.mask) for minibatch in minibatches for sequence in minibatch)
    for minibatch in minibatches:
        of_sequences = played.sequences * len(minibatch) / sequences
        of_tokens = played.tokens * sum(sum(sequence.mask) for sequence in minibatch) / tokens
        for sequence in minibatch:
            if config.algorithm.normalize == "sequences":
                divisor = sum(sequence.mask) * of_sequences
            elif config.algorithm.advantage is AdvantageKind.DR_GRPO:
                divisor = config.rollout.max_tokens * of_sequences
            else:
                divisor = of_tokens
            sequence.advantages = [advantage / divisor for advantage in sequence.advantages]
            sequence.divisor = divisor


class Played(Struct):
    """The size of what was played and graded for a step, whether or not it is trained on."""

    sequences: int = 0
    tokens: int = 0
    """Number of sampled tokens."""


class _Choice(Struct):
    salt: str
    """Seeds what is random about this batch."""
    oldest: int
    """The oldest version of the weights whose tokens are trained."""
    used: list[tuple[Branch, float | list[float]]] = []
    """Rows with an advantage for all turns, or for each."""
    span_means: dict[str, float] = {}
    """The mean reward of graded parts of turns in a row's group, by the row's id."""
    credits: list[TurnCredit] = []
    dropped: Counter[DropReason] = field(default_factory=Counter)
    played: Played = field(default_factory=Played)


def _in_order(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: (group.step, group.id))


def _by_id(groups: Sequence[Group]) -> list[Rollout]:
    return [
        rollout for group in _in_order(groups) for rollout in sorted(group.rollouts, key=lambda rollout: rollout.index)
    ]


def _choose(groups: Sequence[Group], config: GrpoConfig, oldest: int) -> _Choice:
    ordered = _in_order(groups)
    chosen = _Choice(f"{config.seed}/{'/'.join(group.id for group in ordered)}", oldest)
    for group, rewards, advantages, turns, tree, spans in compare(ordered, config, chosen.salt):
        if turns is not None:
            chosen.credits.append(turns)
        counted = rewards.keys() | (tree.forks if tree is not None else set())
        for row in (row for rollout in group.all_rollouts if rollout.id in counted for row in rollout.rows):
            chosen.played.sequences += 1
            chosen.played.tokens += row.response_length
        for rollout in sorted(group.rollouts, key=lambda rollout: rollout.index):
            _add(chosen, rollout, advantages, turns or tree, config)
            for fork in rollout.forks:
                _add_fork(chosen, fork, tree, config, teaches=bool(advantages))
        chosen.span_means.update((row.id, spans) for rollout in group.all_rollouts for row in rollout.rows)
    return chosen


def _add(
    chosen: _Choice,
    rollout: Rollout,
    advantages: Mapping[str, Mapping[str, float]],
    by_turn: TurnCredit | TreeCredit | None,
    config: GrpoConfig,
) -> None:
    """Adds all rows of a rollout that can be trained on; if there is none, notes the reason."""
    whole = advantages.get("", {})
    if (reason := _why_not(rollout, whole, config)) is not None:
        chosen.dropped[reason] += 1
        return

    def advantage_of(row: Branch) -> float | list[float]:
        advantage = advantages.get(row.agent, whole).get(rollout.id, whole[rollout.id])
        match by_turn:
            case TurnCredit():
                return mixed(advantage, by_turn.by_row[row.id], config.algorithm.turns.weight)
            case TreeCredit():
                return [advantage if one is None else one for one in by_turn.by_row[row.id]]
            case None:
                return advantage

    _add_rows(chosen, rollout, advantage_of, config)


def _add_fork(chosen: _Choice, fork: Rollout, tree: TreeCredit | None, config: GrpoConfig, *, teaches: bool) -> None:
    """Adds a fork, unless all ways to go on from its state were worth the same."""
    of_turns = [one or 0.0 for row in fork.rows for one in (tree.by_row.get(row.id, []) if tree is not None else [])]
    if fork.has_failed:
        chosen.dropped[DropReason.FAILED] += 1
    elif _is_masked(fork, config):
        chosen.dropped[DropReason.MASKED] += 1
    elif tree is None or fork.id not in tree.forks:
        chosen.dropped[DropReason.UNGRADED] += 1
    elif not teaches or not (any(of_turns) or config.data.zero_variance == "keep"):
        chosen.dropped[DropReason.ZERO_VARIANCE] += 1
    else:
        _add_rows(chosen, fork, lambda row: [one or 0.0 for one in tree.by_row[row.id]], config)


def _add_rows(
    chosen: _Choice, rollout: Rollout, advantage_of: Callable[[Branch], float | list[float]], config: GrpoConfig
) -> None:
    reasons = [(row, _why_no_row(row, config, chosen.oldest)) for row in rollout.rows]
    chosen.used += [(row, advantage_of(row)) for row, reason in reasons if reason is None]
    if all(reason is not None for _, reason in reasons):
        chosen.dropped[reasons[0][1] or DropReason.EMPTY] += 1


def _why_not(rollout: Rollout, advantages: Mapping[str, float], config: GrpoConfig) -> DropReason | None:
    if rollout.has_failed:
        return DropReason.FAILED
    if _is_masked(rollout, config):
        return DropReason.MASKED
    if rollout.id in advantages:
        return None
    return DropReason.ZERO_VARIANCE if is_usable(rollout.reward) else DropReason.UNGRADED


def _is_masked(rollout: Rollout, config: GrpoConfig) -> bool:
    """Whether all of its rows are; those whose last turn was cut are masked one by one."""
    ending = rollout.ending
    return ending is not RolloutStop.LENGTH and config.rollout.endings.worth(ending) == "mask"


def _why_no_row(row: Branch, config: GrpoConfig, oldest: int = 0) -> DropReason | None:
    if row.is_cut and config.rollout.endings.length == "mask":
        return DropReason.OVERLONG
    if not row.response_length:
        return DropReason.EMPTY
    if not row.prompt or not all(_has_logprobs(turn.tokens, turn.logprobs) for turn in row.turns):
        return DropReason.BROKEN
    if all(turn.newest_version < oldest for turn in row.turns if turn.tokens):
        return DropReason.STALE
    before = len(row.prompt)
    for turn in row.turns:
        before += len(turn.observation)
        if turn.tokens:
            break
    return DropReason.PROMPT_TOO_LONG if before >= config.data.max_sequence_length else None


def _has_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
    return len(tokens) == len(logprobs) and all(map(math.isfinite, logprobs))
