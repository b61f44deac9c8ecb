"""Samples that go on with other weights: which tokens which weights drew.

Kept in memory, for the newest samples whose weights were changed. Owns: these records. Never touches: how weights are
changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from palestra.server.core.futures import SampleMessage, SampleMessages
from palestra.types import SampleResult
from palestra.types.engine import KeptSampler, Sample, Sampled, decode_to_worker
from palestra.types.sampling import WeightsChange

MOST_SEQUENCES = 1 << 16  # some ten megabytes; a client asks as soon as it has the sample


class WeightsChanges:
    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[WeightsChange]] = {}
        """By owner and name of the sequence, oldest first."""

    def keep(self, owner: str, sequence_ids: Sequence[str], changes: Sequence[list[WeightsChange]]) -> None:
        for sequence_id, own in zip(sequence_ids, changes, strict=False):
            if own:
                self._found[owner, sequence_id] = own
        while len(self._found) > MOST_SEQUENCES:
            del self._found[next(iter(self._found))]

    def find(self, owner: str, sequence_id: str) -> list[WeightsChange]:
        """Returns where the weights of a sequence changed, from those that its request named on."""
        return self._found.get((owner, sequence_id), [])


def changes_of(message: Sampled, asked: str) -> list[list[WeightsChange]]:
    """Returns where the weights of each sequence changed, beginning with the sampler `asked` that its request named:
    a sample that had to begin again, or had not begun, is of other weights from the first token on."""
    if not isinstance(message.outcome, SampleResult):
        return []
    first = [WeightsChange(0, message.weights)] if message.weights not in ("", asked) else []
    return [
        (first if not one.changes or one.changes[0].start else []) + one.changes for one in message.outcome.sequences
    ]


def with_weights(message: SampleMessage, weights: KeptSampler, messages: SampleMessages) -> SampleMessage:
    """Returns the message of a sample that is to be sampled from other weights; one that has its weights, if those
    cannot be exchanged."""
    sample = decode_to_worker(message.encode())
    assert isinstance(sample, Sample)
    if not isinstance(sample.weights, KeptSampler) or asks_about_prompt(sample):
        return message
    return messages.make(msgspec.structs.replace(sample, weights=weights))


def asks_about_prompt(sample: Sample) -> bool:
    """Whether it asks what its weights say of the prompt: then it is a question about these weights."""
    request = sample.request
    return bool(
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.target_prompt_logprobs is not None
        or request.prompt_alt_tokens_k
    )
