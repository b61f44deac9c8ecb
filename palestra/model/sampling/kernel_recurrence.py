"""The recurrence of one step of the scheduler's plan by kernels: for half precision on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.model.kernels.causal_conv import causal_conv, keep_inputs
from palestra.model.kernels.chunk_products import Spans
from palestra.model.kernels.delta_rule import delta_steps
from palestra.model.kernels.state_space import state_space_steps
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers.kernel_recurrence import SpanArrays
from palestra.model.sampling.recurrent_states import RecurrentStates
from palestra.model.sampling.sequences import StepPlan
from palestra.model.transfers import to_device


def plan_spans(plan: StepPlan) -> SpanArrays:
    slots = [-1 if chunk.seq.state_slot is None else chunk.seq.state_slot for chunk in plan.rows]
    return SpanArrays.of([chunk.end - chunk.start for chunk in plan.rows], slots)


@dataclass(frozen=True, slots=True)
class SlottedKernelRecurrence:
    """Sequences that go on from the states in their slots, and advance them; see `Recurrence`."""

    states: RecurrentStates
    rows: Tensor
    """See `causal_conv`."""
    spans: Spans
    are_alone: bool
    """Whether each span is one row."""

    @classmethod
    def of(cls, states: RecurrentStates, plan: StepPlan) -> SlottedKernelRecurrence:
        arrays = plan_spans(plan)
        rows, table = (to_device(a, states.device) for a in (arrays.rows, arrays.table))
        return cls(states, rows, Spans(table), not plan.prefill)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        inputs = self.states.inputs[layer]
        mixed = causal_conv(x, weight, self.rows, inputs, bias, are_alone=self.are_alone)
        if not self.are_alone:
            keep_inputs(x, self.spans.table, inputs)
        return mixed

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        spec, states = self.states.spec.recurrences[layer], self.states.matrices[layer]
        out = x.new_empty(len(x), *spec.output_shape, dtype=torch.float32)
        if isinstance(spec, DeltaNetSpec):
            delta_steps(x, beta, decay, self.spans, spec, states, out)
        else:
            state_space_steps(x, beta, decay, self.spans, spec, states, out)
        return out
