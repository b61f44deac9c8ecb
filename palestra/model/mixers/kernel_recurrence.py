"""The recurrence by kernels: for half precision on a GPU, in training and in sampling.

Owns: the tables that the kernels read. Never touches: the kernels themselves, whose a state is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.kernels.causal_conv import causal_conv, keep_inputs
from palestra.model.kernels.delta_rule import Spans, delta_chunks, delta_rule, delta_steps
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers.delta_rule import CHUNK
from palestra.model.sampling.recurrent_states import RecurrentStates
from palestra.model.sampling.sequences import StepPlan
from palestra.model.transfers import to_device


@dataclass(frozen=True, slots=True)
class SpanArrays:
    """Packed spans of sequences on the host, int32: see `causal_conv` for `rows`, and `Spans` for the others."""

    rows: NDArray[np.int32]
    steps: NDArray[np.int32]
    chunked: NDArray[np.int32]
    chunks: NDArray[np.int32]

    @classmethod
    def of(cls, lengths: Sequence[int], slots: Sequence[int], are_chunked: Sequence[bool]) -> SpanArrays:
        """Spans that stand end to end; each is computed in chunks or in steps."""
        counts, places, in_chunks = np.array(lengths, np.int32), np.array(slots, np.int32), np.array(are_chunked, bool)
        starts = np.cumsum(counts, dtype=np.int32) - counts
        offsets = np.arange(counts.sum(), dtype=np.int32) - np.repeat(starts, counts)
        rows = np.stack([offsets, np.repeat(counts - 1, counts) - offsets, np.repeat(places, counts)], 1)
        n_chunks = np.where(in_chunks, -(-counts // CHUNK), 0)
        spans = np.stack([starts, counts, np.cumsum(n_chunks) - n_chunks, places], 1).astype(np.int32)
        chunked = spans[in_chunks]
        chunks = [
            (first + start, min(CHUNK, count - start))
            for first, count, _, _ in chunked.tolist()
            for start in range(0, count, CHUNK)
        ]
        return cls(rows, spans[~in_chunks], chunked, np.array(chunks, np.int32).reshape(-1, 2))

    @classmethod
    def of_plan(cls, plan: StepPlan) -> SpanArrays:
        """Prompts are computed in chunks; what was generated, also before a preemption, in steps."""
        slots = [-1 if chunk.seq.state_slot is None else chunk.seq.state_slot for chunk in plan.rows]
        are_prompts = [chunk.start < chunk.seq.prompt_len for chunk in plan.rows]
        return cls.of([chunk.end - chunk.start for chunk in plan.rows], slots, are_prompts)


class PackedKernelRecurrence:
    """Sequences that all begin here, with gradients; see `Recurrence`."""

    def __init__(self, lengths: Sequence[int], delta_nets: Mapping[int, DeltaNetSpec], device: torch.device | str):
        self.delta_nets, n = delta_nets, len(lengths)
        arrays = SpanArrays.of(lengths, [0] * n, [True] * n)
        self.rows, table, chunks = (to_device(a, device) for a in (arrays.rows, arrays.chunked, arrays.chunks))
        self.spans = Spans(table, chunks)

    def __call__(self, layer: int, qkv: Tensor, beta: Tensor, decay: Tensor, conv: Tensor) -> Tensor:
        mixed = causal_conv(qkv, conv, self.rows)
        return delta_rule(mixed, beta, decay, self.spans, self.delta_nets[layer])


@dataclass(frozen=True, slots=True)
class SlottedKernelRecurrence:
    """Sequences that go on from the states in their slots, and advance them; see `Recurrence`."""

    states: RecurrentStates
    rows: Tensor
    """See `causal_conv`."""
    steps: Spans
    chunked: Spans | None
    """None where each span is one row, computed in a step."""

    @classmethod
    def of(cls, states: RecurrentStates, plan: StepPlan) -> SlottedKernelRecurrence:
        arrays = SpanArrays.of_plan(plan)
        rows, steps, chunked, chunks = (
            to_device(a, states.device) for a in (arrays.rows, arrays.steps, arrays.chunked, arrays.chunks)
        )
        return cls(states, rows, Spans(steps), Spans(chunked, chunks) if plan.prefill else None)

    def __call__(self, layer: int, qkv: Tensor, beta: Tensor, decay: Tensor, conv: Tensor) -> Tensor:
        spec = self.states.spec.delta_nets[layer]
        states, inputs = self.states.matrices[layer], self.states.inputs[layer]
        mixed = causal_conv(qkv, conv, self.rows, inputs, are_alone=self.chunked is None)
        out = qkv.new_empty(len(qkv), spec.n_value_heads, spec.value_dim, dtype=torch.float32)
        delta_steps(mixed, beta, decay, self.steps, spec, states, out)
        if self.chunked is not None:
            delta_chunks(mixed, beta, decay, self.chunked, spec, states, out)
            for spans in (self.steps, self.chunked):
                keep_inputs(qkv, spans.table, inputs)
        return out
