"""The recurrence of one step of the scheduler's plan, over the states in the slots of its sequences.

Prompts are computed in chunks, what was generated in steps, also when it is computed again after a preemption: which
form a position takes depends on that position alone. Owns: which rows take which form. Never touches: whose a slot is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from palestra.model import kernels
from palestra.model.loading.layer_spec import DeltaNetSpec, RecurrenceSpec
from palestra.model.mixers.causal_conv import ConvLayout, causal_conv
from palestra.model.mixers.chunked_scan import ChunkLayout
from palestra.model.mixers.delta_rule import delta_step
from palestra.model.mixers.inputs import Recurrence
from palestra.model.mixers.packed_recurrence import scan_chunks
from palestra.model.mixers.state_space import state_space_step
from palestra.model.sampling.recurrent_states import RecurrentStates
from palestra.model.sampling.sequences import StepPlan
from palestra.model.transfers import to_device


class SlottedRecurrence:
    """The recurrence for one step: rows are `decode` first, then `prefill`. Advances the states; see `Recurrence`."""

    def __init__(self, states: RecurrentStates, plan: StepPlan):
        self.states, self.layers, device = states, states.spec.recurrences, states.device
        lengths = [chunk.end - chunk.start for chunk in plan.rows]
        slots = np.array([chunk.seq.state_slot for chunk in plan.rows], np.int64)
        starts = np.cumsum([0, *lengths])
        self.slots = to_device(slots, device)
        kernels = {layer.conv_kernel for layer in self.layers.values()}
        self.convs = {kernel: ConvLayout(lengths, kernel - 1, device) for kernel in kernels}
        n = self.n_decode = len(plan.decode)
        is_prompt = [chunk.start < chunk.seq.prompt_len for chunk in plan.rows]
        self.again = [
            (slice(int(starts[i]), int(starts[i + 1])), int(slots[i]))
            for i in range(n, len(lengths))
            if not is_prompt[i]
        ]
        """Rows and slot of what was generated before a preemption."""
        prompts = [i for i in range(n, len(lengths)) if is_prompt[i]]
        self.chunks: ChunkLayout | None = None
        if prompts:
            self.chunks = ChunkLayout([lengths[i] for i in prompts], device)
            rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in prompts])
            self.prompt_rows = to_device(rows, device)
            self.prompt_slots = to_device(slots[prompts], device)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        layout, inputs = self.convs[self.layers[layer].conv_kernel], self.states.inputs[layer]
        mixed, after = causal_conv(x, weight, layout, inputs.index_select(0, self.slots), bias)
        inputs.index_copy_(0, self.slots, after)
        return mixed

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        spec, states = self.layers[layer], self.states.matrices[layer]
        out = x.new_empty(len(x), *spec.output_shape, dtype=torch.float32)
        rows = (x, beta, decay)
        if n := self.n_decode:
            slots = self.slots[:n]
            out[:n], state = scan_step(x[:n], beta[:n], decay[:n], states.index_select(0, slots), spec)
            states.index_copy_(0, slots, state)
        if self.chunks is not None:
            x_p, beta_p, decay_p = (r.index_select(0, self.prompt_rows) for r in rows)
            state = states.index_select(0, self.prompt_slots)
            found, state = scan_chunks(x_p, beta_p, decay_p, self.chunks, spec, state)
            out.index_copy_(0, self.prompt_rows, found)
            states.index_copy_(0, self.prompt_slots, state)
        for part, slot in self.again:
            state = states[slot : slot + 1]
            for i in range(part.start, part.stop):
                out[i : i + 1], state = scan_step(x[i : i + 1], beta[i : i + 1], decay[i : i + 1], state, spec)
            states[slot : slot + 1] = state
        return out


def scan_step(x: Tensor, beta: Tensor, decay: Tensor, state: Tensor, spec: RecurrenceSpec) -> tuple[Tensor, Tensor]:
    """A layer's recurrence by one position of each of n sequences: what it returns, and the states after it."""
    if isinstance(spec, DeltaNetSpec):
        return delta_step(x, beta, decay, state, spec)
    return state_space_step(x, beta, decay, state, spec)


def slotted_recurrence(states: RecurrentStates, plan: StepPlan) -> Recurrence:
    """Returns the recurrence by kernels on a GPU in half precision, by torch elsewhere."""
    if kernels.can_run(states.device, states.dtype):
        from palestra.model.sampling.kernel_recurrence import SlottedKernelRecurrence

        return SlottedKernelRecurrence.of(states, plan)
    return SlottedRecurrence(states, plan)
