"""Computes log-probabilities from hidden states, and gradients back, without ever holding [tokens x vocabulary].

Logits of a chunk of rows are made, reduced and dropped. When a position's gradient needs only its own
log-probability (every loss but the sequence-level ones), the chunk's backward is done while its logits are there;
otherwise they are made a second time. Rows that cannot have a gradient skip the backward altogether.
Positions of several data may read one row (`Readers`): its log-probability is made once, and what their losses send
back is summed in the order of the positions.

Where several processes have parts of the rows (`context_group`), each computes the logits of its own, and all of them
the losses of all positions, which are a few numbers each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.decoder import Decoder
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.layout import UNEMBED
from palestra.model.lora.linear import LoraPlan, lora_backward, lora_forward, lora_inner, lora_linear
from palestra.model.shared_rows import Readers
from palestra.model.training.log_softmax import TargetRows, cap_logits, target_rows
from palestra.model.training.losses import Loss
from palestra.model.transfers import to_device

if TYPE_CHECKING:
    from palestra.model.context_group import ContextRows

Runs = Sequence[tuple[Adapter | None, int]]
CHUNK_CELLS = {"cpu": 1 << 21, "cuda": 1 << 27}  # logits held at once: 8 MB stays in a CPU's cache
MIN_CHUNK_ROWS = 64  # below this the product is bound by reading the weights


@dataclass(slots=True)
class LossRun:
    """Adjacent positions under one loss."""

    start: int
    rows: list[int]
    """Positions of each datum."""
    loss: Loss
    config: dict[str, float]
    inputs: dict[str, Tensor]
    active: NDArray[np.bool_]

    @property
    def stop(self) -> int:
        return self.start + len(self.active)


@dataclass(slots=True)
class HeadPass:
    logprobs: Tensor
    """[positions, K]."""
    losses: Tensor
    """[positions, K]."""
    hidden_grad: Tensor | None
    """[rows, hidden]."""
    entropies: Tensor | None = None
    """[positions], of those that have a gradient, NaN elsewhere; only with a loss of sampled tokens."""


def chunk_rows(decoder: Decoder) -> int:
    return max(MIN_CHUNK_ROWS, CHUNK_CELLS.get(decoder.device.type, 1 << 24) // decoder.spec.vocab_size)


def logits_of(decoder: Decoder, hidden: Tensor, plan: LoraPlan) -> Tensor:
    """Logits of a few rows, in the model's type."""
    logits = lora_linear(hidden, decoder.weights.unembedding, None, UNEMBED, plan)
    return cap_logits(logits, decoder.spec.multipliers.logit_cap)


def run_head(
    decoder: Decoder,
    hidden: Tensor,
    targets: Tensor,
    adapters: Runs,
    losses: list[LossRun],
    *,
    train: bool,
    readers: Readers | None = None,
    divided: ContextRows | None = None,
) -> HeadPass:
    """`hidden` and `targets` are of the head's rows. `readers`: positions of the data by rows; None: each its own.
    `divided`: `hidden`, `targets` and `adapters` are of this process's rows alone, and so is the gradient."""
    head = _Head(decoder, hidden, targets, adapters, readers, divided)
    active = np.concatenate([run.active for run in losses])
    if train and any(run.loss.is_of_samples for run in losses):
        head.entropies = torch.full((len(hidden),), torch.nan, dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        if not train:
            head.forward(head.everything)
            values, _ = _evaluate(losses, head.read(head.logprobs), grad=False)
            return HeadPass(head.read(head.logprobs), values, None)
        if any(run.loss.whole_sequence for run in losses):
            head.forward(head.everything)
            values, grads = _evaluate(losses, head.read(head.logprobs), grad=True)
            head.backward(active, grads)
        else:
            head.forward_backward(active, losses)
            values, _ = _evaluate(losses, head.read(head.logprobs), grad=False)
        entropies = None if head.entropies is None else head.read(head.entropies)
        if entropies is not None and readers is not None:  # a position is not active because another reader is
            entropies = entropies.masked_fill(to_device(~active, hidden.device), torch.nan)
        return HeadPass(head.read(head.logprobs), values, head.hidden_grad, entropies)


class _Head:
    def __init__(
        self,
        decoder: Decoder,
        hidden: Tensor,
        targets: Tensor,
        adapters: Runs,
        readers: Readers | None,
        divided: ContextRows | None,
    ):
        self.decoder, self.hidden, self.targets, self.readers = decoder, hidden, targets, readers
        self.divided, self.first = divided, 0 if divided is None else divided.own.start
        self.everything = np.arange(len(hidden))
        self.logprobs = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        self.hidden_grad = torch.zeros_like(hidden)
        self.entropies: Tensor | None = None
        self._adapters = [a for a, _ in adapters]
        self._owner = np.repeat(np.arange(len(adapters)), [n for _, n in adapters])

    def forward(self, rows: NDArray) -> None:
        for index, plan in self._chunks(rows):
            self.logprobs[index] = self._rows(index, plan)[0].logprobs(self.targets[index])

    def read(self, values: Tensor) -> Tensor:
        """Returns what stands at the rows, for each position."""
        values = values if self.divided is None else self.divided.gather(values)
        return values if self.readers is None else self.readers.spread(values)

    def forward_backward(self, active: NDArray[np.bool_], losses: list[LossRun]) -> None:
        """Chunks as in `forward`, so that log-probabilities are the same to the bit whatever is active. `active` is of
        the positions."""
        for (index, plan), part in zip(self._chunks(self.everything), self._split(self.everything), strict=True):
            chunk, inner = self._rows(index, plan)
            self.logprobs[index] = chunk.logprobs(self.targets[index])
            positions = self._positions(int(part[0]), int(part[-1]))
            positions = positions[active[positions]]
            if len(positions) == 0:
                continue
            rows = self._rows_of(positions)
            if len(rows) < len(part):
                chunk = chunk.pick(to_device(rows - part[0], self.hidden.device))
                ((index, plan),) = self._chunks(rows)
                inner = lora_inner(self.hidden[index], UNEMBED, plan)
            if self.readers is None:
                grads = _chunk_gradients(losses, positions, self.logprobs[index])
            else:
                read = self.readers.spread(self.logprobs, positions, self.first)
                grads = self.readers.summed(_chunk_gradients(losses, positions, read), positions)
            self._backward_chunk(index, plan, chunk, inner, grads)

    def backward(self, active: NDArray[np.bool_], grads: Tensor) -> None:
        """`active` and `grads` are of the positions."""
        positions = self._positions(0, len(self.hidden) - 1)
        positions = positions[active[positions]]
        rows = self._rows_of(positions)
        if self.readers is None:
            grads = grads[self.first : self.first + len(self.hidden)]
        elif len(positions):
            picked = grads.index_select(0, to_device(positions, grads.device))
            grads = torch.zeros_like(self.logprobs).index_copy_(
                0, to_device(rows, grads.device), self.readers.summed(picked, positions)
            )
        for index, plan in self._chunks(rows):
            self._backward_chunk(index, plan, *self._rows(index, plan), grads[index])

    def _positions(self, first: int, last: int) -> NDArray[np.int64]:
        """The positions that read the rows from `first` to `last`, in order."""
        first, last = first + self.first, last + self.first
        return np.arange(first, last + 1) if self.readers is None else self.readers.of_rows(first, last)

    def _rows_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows that these positions read, each once."""
        rows = positions if self.readers is None else np.unique(self.readers.rows[positions])
        return rows - self.first

    def _rows(self, index: Tensor | slice, plan: LoraPlan) -> tuple[TargetRows, list[Tensor]]:
        logits, inner = lora_forward(self.hidden[index], self.decoder.weights.unembedding, None, UNEMBED, plan)
        return target_rows(logits, self.targets.shape[1], self.decoder.spec.multipliers.logit_cap), inner

    def _backward_chunk(
        self, index: Tensor | slice, plan: LoraPlan, chunk: TargetRows, inner: list[Tensor], grads: Tensor
    ) -> None:
        if self.entropies is not None:
            self.entropies[index] = chunk.entropies()
        d_logits = chunk.logits_gradient(self.targets[index], grads)
        weight, hidden = self.decoder.weights.unembedding, self.hidden[index]
        d_hidden = lora_backward(d_logits, hidden, inner, weight, UNEMBED, plan, need_dx=True)
        assert d_hidden is not None
        self.hidden_grad[index] = d_hidden

    def _split(self, rows: NDArray) -> list[NDArray]:
        size = chunk_rows(self.decoder)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def _chunks(self, rows: NDArray) -> list[tuple[Tensor | slice, LoraPlan]]:
        """Each chunk: how to pick its rows, and which adapters they use."""
        chunks = []
        for part in self._split(rows):
            first, last = int(part[0]), int(part[-1])
            whole = last - first + 1 == len(part)
            index = slice(first, last + 1) if whole else to_device(part, self.hidden.device)
            owners, counts = np.unique(self._owner[part], return_counts=True)
            runs = [(self._adapters[o], int(n)) for o, n in zip(owners, counts, strict=True)]
            chunks.append((index, LoraPlan.of(runs, device=self.hidden.device)))
        return chunks


def _evaluate(losses: list[LossRun], logprobs: Tensor, *, grad: bool) -> tuple[Tensor, Tensor]:
    """Loss of every position, and its derivative by the log-probability."""
    values, grads = [], []
    for run in losses:
        value, d = _loss(run, logprobs[run.start : run.stop], run.inputs, run.rows, grad=grad)
        values.append(value)
        grads.append(d)
    return torch.cat(values), torch.cat(grads) if grad else logprobs


def _chunk_gradients(losses: list[LossRun], rows: NDArray, logprobs: Tensor) -> Tensor:
    """Derivatives for some sorted positions of position-wise losses."""
    grads = []
    for run in losses:
        low, high = np.searchsorted(rows, [run.start, run.stop])
        if low == high:
            continue
        local = rows[low:high] - run.start
        whole = len(local) == len(run.active)
        index = None if whole else to_device(local, logprobs.device)
        inputs = run.inputs if index is None else {k: v.index_select(0, index) for k, v in run.inputs.items()}
        grads.append(_loss(run, logprobs[low:high], inputs, [len(local)], grad=True)[1])
    return torch.cat(grads)


def _loss(
    run: LossRun, logprobs: Tensor, inputs: dict[str, Tensor], rows: list[int], *, grad: bool
) -> tuple[Tensor, Tensor]:
    if not grad:
        return run.loss.value(logprobs, inputs, run.config, rows), logprobs
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        value = run.loss.value(leaf, inputs, run.config, rows)
        (derivative,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), derivative
