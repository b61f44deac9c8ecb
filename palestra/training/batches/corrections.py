"""Off-policy corrections: weights for tokens to which sampler and trainer give different probabilities.

For each sampled token r = p_trainer / p_sampler, both before the update. Its advantage A becomes w * A:

    w = min(r, truncate)     truncated importance sampling (TIS); r itself if nothing is truncated
    w = 0                    r outside `token_mask` (IcePop)
                             the geometric mean of r outside `sequence_mask`: over the sequence, or over its tokens
                             of one version of the weights if several have sampled it
                             |p_trainer - p_sampler| > `divergence`, and A moves p_trainer further away: A > 0 and
                             r > 1, or A < 0 and r < 1 (DPPO with the binary total variation)

The loss then compares with the trainer's own log-probabilities, so that its ratio begins at 1 and clipping bounds the
update alone. A weight is a factor of the advantage, so any Tinker server does the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from msgspec import Struct

from palestra.config.correction import CorrectionConfig
from palestra.types.rollouts import TrainSequence

LARGEST_LOG_RATIO = 50.0  # a larger one would only say "far apart", and its exp may overflow


class CorrectionSummary(Struct, frozen=True):
    """What the corrections of a batch did to its sampled tokens."""

    masked_share: float
    masked_sequences_share: float
    """Share of sequences, or of their segments of one version, that were masked as a whole."""
    truncated_share: float
    effective_sample_size: float
    """Effective sample size of the n token weights w, as a share of n: (sum w)^2 / (n sum w^2)."""
    ratio_mean: float
    """Mean ratio, before it was truncated or masked."""


class _TokenWeights(Struct):
    """The sampled tokens of one sequence."""

    ratios: list[float]
    weights: list[float]
    masked_segments: list[bool]
    """Whether the sequence is masked as a whole; or one for each version of the weights that sampled it."""


def apply_corrections(sequences: Sequence[TrainSequence], config: CorrectionConfig) -> CorrectionSummary | None:
    """Multiplies the advantages by the weights of their tokens. Returns None if no token was sampled."""
    found = [_correct(sequence, config) for sequence in sequences]
    ratios = [ratio for one in found for ratio in one.ratios]
    weights = [weight for one in found for weight in one.weights]
    segments = [is_masked for one in found for is_masked in one.masked_segments]
    if not weights:
        return None
    count, squares = len(weights), math.fsum(weight * weight for weight in weights)
    limit = math.inf if config.truncate is None else config.truncate
    return CorrectionSummary(
        masked_share=weights.count(0.0) / count,
        masked_sequences_share=segments.count(True) / len(segments),
        truncated_share=sum(ratio > limit for ratio in ratios) / count,
        effective_sample_size=math.fsum(weights) ** 2 / (count * squares) if squares else 0.0,
        ratio_mean=math.fsum(ratios) / count,
    )


def importance_ratio(log_ratio: float) -> float:
    return math.exp(max(-LARGEST_LOG_RATIO, min(LARGEST_LOG_RATIO, log_ratio)))


def _correct(sequence: TrainSequence, config: CorrectionConfig) -> _TokenWeights:
    found = _TokenWeights([], [], [])
    for places in _segments(sequence):
        _correct_segment(sequence, places, config, found)
    return found


def _segments(sequence: TrainSequence) -> list[list[int]]:
    """The places of sampled tokens, by the version of the weights that drew them."""
    sampled = [place for place, is_sampled in enumerate(sequence.mask) if is_sampled]
    if not sequence.versions:
        return [sampled]
    return [list(places) for _, places in groupby(sampled, key=lambda place: sequence.versions[place])] or [[]]


def _correct_segment(
    sequence: TrainSequence, places: Sequence[int], config: CorrectionConfig, found: _TokenWeights
) -> None:
    gaps = [sequence.logprobs[place] - sequence.sampler_logprobs[place] for place in places]
    # A broken model may give no number: such a token is masked, and counts as one that the trainer would never draw.
    ratios = [importance_ratio(gap) if math.isfinite(gap) else 0.0 for gap in gaps]
    is_segment_masked = _is_segment_masked([gap for gap in gaps if math.isfinite(gap)], config)
    found.ratios += ratios
    found.masked_segments.append(is_segment_masked)
    for place, gap, ratio in zip(places, gaps, ratios, strict=True):
        is_masked = (
            is_segment_masked
            or not math.isfinite(gap)
            or (config.token_mask is not None and not config.token_mask[0] <= ratio <= config.token_mask[1])
            or (config.divergence is not None and _diverges(sequence, place, config.divergence))
        )
        weight = 0.0 if is_masked else ratio if config.truncate is None else min(ratio, config.truncate)
        sequence.advantages[place] = sequence.advantages[place] * weight if weight else 0.0
        found.weights.append(weight)


def _is_segment_masked(gaps: Sequence[float], config: CorrectionConfig) -> bool:
    if config.sequence_mask is None or not gaps:
        return False
    low, high = config.sequence_mask
    return not low <= importance_ratio(math.fsum(gaps) / len(gaps)) <= high


def _diverges(sequence: TrainSequence, place: int, bound: float) -> bool:
    trainer, sampler = sequence.logprobs[place], sequence.sampler_logprobs[place]
    moves_away = sequence.advantages[place] * (trainer - sampler) > 0
    return moves_away and abs(math.exp(trainer) - math.exp(sampler)) > bound
