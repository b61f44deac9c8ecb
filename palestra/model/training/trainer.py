"""Forward and backward over packed micro-batches of many adapters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

from palestra.model.decoder import Decoder
from palestra.model.errors import AdapterError
from palestra.model.loading.context_parallel import require_divisible_heads
from palestra.model.lora.adapters import Adapter, AdapterPool, Stack
from palestra.model.mlp.routing import Routing
from palestra.model.shared_rows import Readers, sum_runs
from palestra.model.training.activation_offload import ActivationOffload
from palestra.model.training.batch_inputs import BatchInputs, tree_runs
from palestra.model.training.head import HeadPass, LossRun, run_head
from palestra.model.training.losses import datum_metrics
from palestra.model.training.optimizer import StepResult, optim_step
from palestra.model.training.prefix_trees import PlannedBatch, PrefixTrees, grow_trees, plan_micro_batches
from palestra.model.training.prepared import Prepared, TrainItem, prepare
from palestra.model.transfers import to_device
from palestra.types import AdamParams, Checkpointing

if TYPE_CHECKING:
    from palestra.model.context_group import ContextGroup, ContextRows


@dataclass(frozen=True, slots=True)
class DatumResult:
    """Result of one datum's forward pass."""

    loss: float
    """The sum over the datum's positions."""
    logprobs: NDArray[np.float32]
    """Log-probabilities of the targets, in their shape, unweighted."""
    metrics: dict[str, float]
    """`name:reduction`, with `loss:sum` among them."""
    visits: NDArray[np.int64] | None = None
    """How often its tokens visited each expert, [layers with experts, experts]; None for models without experts."""
    entropies: NDArray[np.float32] | None = None
    """Entropy of the distribution at each position, in nats, NaN where there was no gradient; None unless it was
    trained with a loss of sampled tokens."""


@dataclass(slots=True)
class ForwardPass:
    """A micro-batch after its forward pass; `Trainer.backward` ends it."""

    results: list[DatumResult]
    epochs: dict[Adapter, int]
    """The adapters trained, and how often each had its gradient discarded before."""
    pinned: list[tuple[Stack, int]]
    hidden: Tensor | None
    hidden_grad: Tensor | None
    offload: ActivationOffload | None = None


class Trainer:
    """Trains adapters of one decoder: forward and backward passes over data of many adapters, and optimizer steps.

    `forward_backward` adds to the gradients that each adapter of the pool holds, `optim_step` applies and clears them.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        *,
        token_budget: int | None = None,
        checkpointing: Checkpointing = False,
        share_prefixes: bool = True,
        context: ContextGroup | None = None,
    ):
        """`checkpointing`: layers keep their input alone, on the device or in the host's memory (`offload`), and are
        computed again in the backward pass. `share_prefixes`: tokens that several data of an adapter begin with are
        computed once. `context`: processes that compute each micro-batch together."""
        if context is not None:
            require_divisible_heads(decoder.spec, context.ranks)
        self.decoder, self.pool, self.checkpointing = decoder, pool, checkpointing
        self.share_prefixes, self.context = share_prefixes, context
        self.token_budget = token_budget or (1024 if decoder.device.type == "cpu" else 8192)

    def prepare(self, items: Sequence[TrainItem], *, train: bool) -> list[Prepared]:
        """Checks everything before anything runs: a bad datum fails alone and early."""
        for item in items:
            if item.adapter is not None:
                self.pool.require(item.adapter)
            if train and (item.adapter is None or item.adapter.frozen):
                what = "the base model" if item.adapter is None else "a snapshot"
                raise AdapterError(f"{what} cannot be trained; create an adapter")
        return [prepare(item, self.decoder.spec) for item in items]

    def plan(self, data: Sequence[Prepared]) -> list[PlannedBatch]:
        return plan_micro_batches(data, self.token_budget, share=self.share_prefixes)

    def forward(self, items: Sequence[TrainItem]) -> list[DatumResult]:
        return self._run(items, train=False)

    def forward_backward(self, items: Sequence[TrainItem]) -> list[DatumResult]:
        """Gradients add to what each adapter holds, until its optimizer step."""
        return self._run(items, train=True)

    def optim_step(self, steps: dict[Adapter, AdamParams]) -> dict[Adapter, StepResult]:
        return optim_step(self.pool, steps)

    def _run(self, items: Sequence[TrainItem], *, train: bool) -> list[DatumResult]:
        data = self.prepare(items, train=train)
        results: dict[int, DatumResult] = {}
        for batch in self.plan(data):
            done = self.forward_micro([data[i] for i in batch.numbers], train=train)
            self.backward(done)
            results.update(zip(batch.numbers, done.results, strict=True))
        return [results[i] for i in range(len(items))]

    def forward_micro(self, batch: Sequence[Prepared], *, train: bool, alone: bool = False) -> ForwardPass:
        """One micro-batch forward. With `train` the unembedding's gradient is already added on the way, because
        its logits exist only here; `backward` must follow. Of a micro-batch that is too small for all processes of a
        context group the first has the results, and the others compute nothing. `alone`: this process is asked by
        itself."""
        trees = grow_trees(batch, share=self.share_prefixes)
        done, divided = ForwardPass([], {}, [], None, None), None
        if self.context is not None and not alone:
            divided = self.context.divide(trees.rows)
            if divided is None and self.context.rank > 0:
                return done
        inputs = BatchInputs.of(self.decoder, batch, trees, train=train, divided=divided)
        head_rows = _head_rows(trees, np.concatenate([d.targets for d in batch]), tree_runs(batch, trees))
        losses = _loss_runs(batch, self.decoder.device)
        if train:
            self._begin(done, [a for a in dict.fromkeys(d.adapter for d in batch) if a is not None])
        try:
            with torch.set_grad_enabled(train), ExitStack() as stack:
                if train and self.checkpointing == "offload":
                    done.offload = ActivationOffload(self.decoder.device)
                    stack.enter_context(done.offload.keeping())
                hidden = self.decoder(
                    *(inputs.tokens, inputs.positions, inputs.attend, inputs.plan, inputs.recur),
                    checkpointing=bool(self.checkpointing),
                    routing=inputs.routing,
                    pictures=inputs.pictures,
                )
            head = head_rows.run(self.decoder, hidden.detach(), losses, train=train, divided=divided)
        except BaseException:
            self._unpin(done)  # what it added stays marked as unfinished
            raise
        done.results = _results(batch, head, self._visits(inputs.routing, trees, divided))
        if train:
            done.hidden, done.hidden_grad = hidden, head.hidden_grad
        return done

    def _visits(
        self, routing: Routing | None, trees: PrefixTrees, divided: ContextRows | None
    ) -> list[NDArray[np.int64] | None]:
        if routing is None:
            return [None] * len(trees.paths)
        n_experts = next(iter(self.decoder.spec.experts.values())).n_experts
        return list(routing.visits(trees.paths, n_experts, divided).cpu().numpy())

    def backward(self, done: ForwardPass) -> None:
        """Ends a pass. An adapter whose gradient was discarded since its forward keeps what it has gathered after."""
        if done.hidden is None:
            return
        outdated = [a for a, epoch in done.epochs.items() if a.epoch != epoch and not a.freed]
        kept = [a.row("partial").clone() for a in outdated]
        try:
            if done.hidden.requires_grad:  # not so when only the unembedding is trained
                _WithGradient.apply(done.hidden, done.hidden_grad).backward()
        finally:
            for adapter, row in zip(outdated, kept, strict=True):
                adapter.row("partial").copy_(row)
            self._unpin(done)
        for adapter, epoch in done.epochs.items():
            if adapter.epoch == epoch:
                adapter.unfinished -= 1
                adapter.has_gradient = True

    def _begin(self, done: ForwardPass, adapters: list[Adapter]) -> None:
        for adapter in adapters:
            adapter.unfinished += 1
            done.epochs[adapter] = adapter.epoch
            done.pinned.append(self.pool.pin(adapter))

    def _unpin(self, done: ForwardPass) -> None:
        for stack, slot in done.pinned:
            self.pool.unpin(stack, slot)
        if done.offload is not None:
            done.offload.close()
            done.offload = None
        done.pinned, done.hidden, done.hidden_grad = [], None, None


class _WithGradient(Function):
    """A scalar that has a given gradient. `hidden.backward(gradient)` is the same, but imports torch's symbolic shapes
    and sympy, which takes a worker seconds when it first trains."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


@dataclass(frozen=True, slots=True)
class _HeadRows:
    """Rows of the head: a hidden state with its targets. Positions that have both in common read the same one."""

    hidden: NDArray[np.int64] | None
    """The row of the decoder that each has, in order; None: as they are."""
    counts: NDArray[np.int64] | None
    """How many there are of each row of the decoder."""
    targets: NDArray[np.int64]
    runs: list[tuple[Adapter | None, int]]
    readers: Readers | None

    def run(
        self, decoder: Decoder, hidden: Tensor, losses: list[LossRun], *, train: bool, divided: ContextRows | None
    ) -> HeadPass:
        """`divided`: `hidden` is of this process's rows of the decoder."""
        device, first, counts, of_head, own = hidden.device, 0, self.counts, divided, slice(0, len(self.targets))
        if divided is not None:
            of_head = divided if self.hidden is None else divided.moved(np.searchsorted(self.hidden, divided.bounds))
            first, counts, own = divided.own.start, None if counts is None else counts[divided.own], of_head.own
        if self.hidden is not None:
            hidden = hidden.index_select(0, to_device(self.hidden[own] - first, device))
        targets, runs = to_device(self.targets[own], device), _cut_runs(self.runs, own)
        done = run_head(decoder, hidden, targets, runs, losses, train=train, readers=self.readers, divided=of_head)
        if done.hidden_grad is not None and counts is not None:
            done.hidden_grad = sum_runs(done.hidden_grad, counts)
        return done


def _cut_runs(runs: list[tuple[Adapter | None, int]], own: slice) -> list[tuple[Adapter | None, int]]:
    found, start = [], 0
    for adapter, rows in runs:
        if (kept := min(start + rows, own.stop) - max(start, own.start)) > 0:
            found.append((adapter, kept))
        start += rows
    return found


def _head_rows(trees: PrefixTrees, targets: NDArray[np.int64], runs: list[tuple[Adapter | None, int]]) -> _HeadRows:
    """`targets`: of all positions, [positions, K]. `runs`: adapters of the trees."""
    if trees.is_plain:
        return _HeadRows(None, None, targets, runs, None)
    pairs = np.column_stack([trees.readers, targets])
    distinct, readers = np.unique(pairs, axis=0, return_inverse=True)
    hidden = distinct[:, 0]
    counts = np.bincount(hidden, minlength=trees.rows)
    ends = np.cumsum([n for _, n in runs])
    of_trees = np.diff(np.concatenate([[0], np.cumsum(counts)[ends - 1]]))
    head_runs = [(adapter, int(n)) for (adapter, _), n in zip(runs, of_trees, strict=True)]
    return _HeadRows(hidden, counts, distinct[:, 1:], head_runs, Readers(readers.reshape(-1)))


def _loss_runs(batch: Sequence[Prepared], device: torch.device) -> list[LossRun]:
    """Neighbours under the same loss and settings are computed as one."""
    groups: list[list[Prepared]] = []
    for d in batch:
        if groups and _alike(groups[-1][-1], d):
            groups[-1].append(d)
        else:
            groups.append([d])
    runs, start = [], 0
    for group in groups:
        rows = [len(d.tokens) for d in group]
        inputs = {name: to_device(np.concatenate([d.inputs[name] for d in group]), device) for name in group[0].inputs}
        active = np.concatenate([d.active for d in group])
        runs.append(LossRun(start, rows, group[0].loss, group[0].config, inputs, active))
        start += sum(rows)
    return runs


def _alike(a: Prepared, b: Prepared) -> bool:
    return a.loss is b.loss and a.config == b.config and a.inputs.keys() == b.inputs.keys()


def _results(batch: Sequence[Prepared], head: HeadPass, visits: list[NDArray[np.int64] | None]) -> list[DatumResult]:
    lp, loss = head.logprobs.cpu().numpy(), head.losses.double().cpu().numpy()
    entropies = None if head.entropies is None else head.entropies.cpu().numpy()
    results, start = [], 0
    for d, visited in zip(batch, visits, strict=True):
        rows = slice(start, start + len(d.tokens))
        start = rows.stop
        value = float(loss[rows].sum())
        metrics = {"loss:sum": value, **datum_metrics(d.loss, lp[rows], d.inputs, d.config)}
        if d.routing is not None:
            metrics["routing_replayed:sum"] = float((d.routing[:, 0, 0] >= 0).sum())
        own = entropies[rows].copy() if entropies is not None and d.loss.is_of_samples else None
        results.append(DatumResult(value, lp[rows].copy() if d.wide else lp[rows, 0].copy(), metrics, visited, own))
    return results
