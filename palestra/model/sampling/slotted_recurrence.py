"""The recurrence of one step of the scheduler's plan, over the states in the slots of its sequences.

Prompts are computed in chunks, what was generated in steps, also when it is computed again after a preemption: which
form a position takes depends on that position alone. Owns: which rows take which form. Never touches: whose a slot is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from palestra.model import kernels
from palestra.model.mixers.delta_rule import ChunkLayout, ConvLayout, causal_conv, delta_rule, delta_step
from palestra.model.mixers.inputs import Recurrence
from palestra.model.sampling.recurrent_states import RecurrentStates
from palestra.model.sampling.sequences import StepPlan
from palestra.model.transfers import to_device


class SlottedRecurrence:
    """The recurrence for one step: rows are `decode` first, then `prefill`. Advances the states; see `Recurrence`."""

    def __init__(self, states: RecurrentStates, plan: StepPlan):
        self.states, self.delta_nets, device = states, states.spec.delta_nets, states.device
        lengths = [chunk.end - chunk.start for chunk in plan.rows]
        slots = np.array([chunk.seq.state_slot for chunk in plan.rows], np.int64)
        starts = np.cumsum([0, *lengths])
        self.slots = to_device(slots, device)
        kernels = {d.conv_kernel for d in self.delta_nets.values()}
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

    def __call__(self, layer: int, qkv: Tensor, beta: Tensor, decay: Tensor, conv: Tensor) -> Tensor:
        spec, states, inputs = self.delta_nets[layer], self.states.matrices[layer], self.states.inputs[layer]
        mixed, after = causal_conv(qkv, conv, self.convs[spec.conv_kernel], inputs.index_select(0, self.slots))
        inputs.index_copy_(0, self.slots, after)
        out = qkv.new_empty(len(qkv), spec.n_value_heads, spec.value_dim, dtype=torch.float32)
        rows = (mixed, beta, decay)
        if n := self.n_decode:
            slots = self.slots[:n]
            out[:n], state = delta_step(mixed[:n], beta[:n], decay[:n], states.index_select(0, slots), spec)
            states.index_copy_(0, slots, state)
        if self.chunks is not None:
            qkv_p, beta_p, decay_p = (x.index_select(0, self.prompt_rows) for x in rows)
            state = states.index_select(0, self.prompt_slots)
            found, state = delta_rule(qkv_p, beta_p, decay_p, self.chunks, spec, state)
            out.index_copy_(0, self.prompt_rows, found)
            states.index_copy_(0, self.prompt_slots, state)
        for part, slot in self.again:
            state = states[slot : slot + 1]
            for i in range(part.start, part.stop):
                out[i : i + 1], state = delta_step(mixed[i : i + 1], beta[i : i + 1], decay[i : i + 1], state, spec)
            states[slot : slot + 1] = state
        return out


def slotted_recurrence(states: RecurrentStates, plan: StepPlan) -> Recurrence:
    """By kernels on a GPU in half precision, by torch elsewhere."""
    if kernels.can_run(states.device, states.dtype):
        from palestra.model.sampling.kernel_recurrence import SlottedKernelRecurrence

        return SlottedKernelRecurrence.of(states, plan)
    return SlottedRecurrence(states, plan)
