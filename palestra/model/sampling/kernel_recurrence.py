"""The recurrence of one step of the scheduler's plan by kernels: for half precision on a GPU.

Owns: which spans of a plan are computed in which form. Never touches: the kernels themselves, whose a state is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.model.kernels.causal_conv import causal_conv, keep_inputs
from palestra.model.kernels.chunk_products import Spans
from palestra.model.kernels.delta_rule import delta_chunks, delta_steps
from palestra.model.kernels.state_space import state_space_chunks, state_space_steps
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers.kernel_recurrence import SpanArrays
from palestra.model.sampling.recurrent_states import RecurrentStates
from palestra.model.sampling.sequences import StepPlan
from palestra.model.transfers import to_device


def plan_spans(plan: StepPlan) -> SpanArrays:
    """Prompts are computed in chunks; what was generated, also before a preemption, in steps."""
    slots = [-1 if chunk.seq.state_slot is None else chunk.seq.state_slot for chunk in plan.rows]
    are_prompts = [chunk.start < chunk.seq.prompt_len for chunk in plan.rows]
    return SpanArrays.of([chunk.end - chunk.start for chunk in plan.rows], slots, are_prompts)


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
        arrays = plan_spans(plan)
        rows, steps, chunked, chunks = (
            to_device(a, states.device) for a in (arrays.rows, arrays.steps, arrays.chunked, arrays.chunks)
        )
        return cls(states, rows, Spans(steps), Spans(chunked, chunks) if plan.prefill else None)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        inputs = self.states.inputs[layer]
        mixed = causal_conv(x, weight, self.rows, inputs, bias, are_alone=self.chunked is None)
        if self.chunked is not None:
            for spans in (self.steps, self.chunked):
                keep_inputs(x, spans.table, inputs)
        return mixed

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        spec, states = self.states.spec.recurrences[layer], self.states.matrices[layer]
        out = x.new_empty(len(x), *spec.output_shape, dtype=torch.float32)
        if isinstance(spec, DeltaNetSpec):
            delta_steps(x, beta, decay, self.steps, spec, states, out)
            if self.chunked is not None:
                delta_chunks(x, beta, decay, self.chunked, spec, states, out)
        else:
            state_space_steps(x, beta, decay, self.steps, spec, states, out)
            if self.chunked is not None:
                state_space_chunks(x, beta, decay, self.chunked, spec, states, out)
        return out
