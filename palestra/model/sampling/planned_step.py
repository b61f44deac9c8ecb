"""The step plan that tensor-parallel followers execute: which positions of which pages a step computes.

Rank 0 schedules sequences, sends each step as a `PlannedStep` and draws the tokens; followers compute their shard of
the layers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from msgspec import Struct
from torch import Tensor

from palestra.model.attention.backends import paged_attention
from palestra.model.attention.kv_cache import KVCache, row_positions
from palestra.model.decoder import Decoder
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.linear import LoraPlan
from palestra.model.sampling.sequences import Sequence, SequenceChunk, StepPlan
from palestra.model.transfers import to_device


class PlannedChunk(Struct, frozen=True, array_like=True, gc=False):
    """Positions `start` to `end` (exclusive) of a sequence that has these pages."""

    pages: list[int]
    start: int
    end: int


class PlannedStep(Struct, frozen=True, array_like=True):
    """What a pass through the layers needs of a `StepPlan`."""

    chunks: list[PlannedChunk]
    decoding: int
    """How many of them, the first ones, decode."""
    copies: list[tuple[int, int]]

    @classmethod
    def of(cls, plan: StepPlan) -> PlannedStep:
        chunks = [PlannedChunk(chunk.seq.pages, chunk.start, chunk.end) for chunk in plan.rows]
        return cls(chunks, len(plan.decode), plan.copies)

    @property
    def n_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def plan(self) -> StepPlan:
        rows = [SequenceChunk(_sequence(chunk), chunk.start, chunk.end) for chunk in self.chunks]
        decode = [row.seq for row in rows[: self.decoding]]
        return StepPlan(decode=decode, prefill=rows[self.decoding :], copies=self.copies, rows=rows)


class StepFollower:
    """A tensor-parallel follower: its shard of the KV cache, and the steps that rank 0 plans."""

    def __init__(self, decoder: Decoder, n_pages: int, page_size: int):
        self.decoder = decoder
        self.cache = KVCache(decoder.spec, n_pages, page_size, dtype=decoder.dtype, device=decoder.device)

    @torch.inference_mode()
    def run(self, step: PlannedStep, tokens: Tensor, adapters: Seq[tuple[Adapter | None, int]]) -> None:
        plan, device = step.plan(), self.decoder.device
        self.cache.copy(plan.copies)
        self.decoder(
            tokens,
            to_device(row_positions(plan), device),
            paged_attention(self.cache, plan),
            LoraPlan.of(adapters, device=device),
        )


def _sequence(chunk: PlannedChunk) -> Sequence:
    return Sequence(0, None, [], 0, 0, pages=chunk.pages, computed=chunk.start)
