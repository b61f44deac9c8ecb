"""Linear layers with LoRA for batches that mix adapters.

A plan says which rows of a packed batch belong to which adapter and gathers runs of similar length into buckets;
each bucket is one batched product. Base-model rows belong to no bucket and cost nothing.
Owns: forward and backward of a LoRA linear. Never touches: where adapters come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from palestra.model.adapters import UNEMBED, Adapter, SiteName, Stack

PADDING_LIMIT = 1.5  # a bucket may compute at most this many rows per real row …
SMALL_RUN = 16  # … but below this many rows a product costs its launch, not its arithmetic


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent rows of one adapter."""

    adapter: Adapter
    start: int
    rows: int


@dataclass(slots=True)
class Bucket:
    """Runs of one stack computed as [n, rows, …], rows padded to the longest."""

    stack: Stack
    slots: tuple[int, ...]
    rows: int
    start: int
    """First row when the runs are adjacent and of equal length: then everything is a view."""
    index: Tensor | None = None
    """Otherwise: [n * rows] row numbers, padding pointing anywhere …"""
    real: Tensor | None = None
    """… which of those are real …"""
    padding: Tensor | None = None
    """… and which are not (None: all are)."""
    slot_index: Tensor | None = None
    """[n], when the slots are not consecutive."""

    @property
    def n(self) -> int:
        return len(self.slots)

    def take(self, x: Tensor, *, clear_padding: bool = False) -> Tensor:
        if self.index is None:
            return x[self.start : self.start + self.n * self.rows].view(self.n, self.rows, x.shape[-1])
        taken = x.index_select(0, self.index)
        if clear_padding and self.padding is not None:
            taken.index_fill_(0, self.padding, 0.0)
        return taken.view(self.n, self.rows, x.shape[-1])

    def add_product(self, y: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
        """y[rows of this bucket] += alpha * left @ right."""
        if self.index is None:
            rows = y[self.start : self.start + self.n * self.rows]
            if self.n == 1:
                rows.addmm_(left[0], right[0], alpha=alpha)
            elif y.is_contiguous():
                rows.unflatten(0, (self.n, self.rows)).baddbmm_(left, right, alpha=alpha)
            else:  # some columns only: torch would fall back to one product after another
                rows.unflatten(0, (self.n, self.rows)).add_(torch.bmm(left, right), alpha=alpha)
            return
        flat, index = torch.bmm(left, right).flatten(0, 1), self.index
        if self.real is not None:
            flat, index = flat.index_select(0, self.real), index.index_select(0, self.real)
        y.index_add_(0, index, flat, alpha=alpha)

    def a(self, name: SiteName) -> Tensor:
        return self._matrices(name, -1)

    def b(self, name: SiteName, part: int) -> Tensor:
        return self._matrices(name, part)

    def _matrices(self, name: SiteName, part: int) -> Tensor:
        if self.slot_index is not None:
            return self.stack.picked(name, part, self.slots, self.slot_index)
        whole = self.stack.a("compute", name) if part < 0 else self.stack.b("compute", name, part)
        return whole[self.slots[0] : self.slots[0] + self.n]

    def accumulate(self, grads: Tensor, update: Tensor, alpha: float) -> None:
        """grads[slots] += alpha * update, for a [capacity, n, m] view of gradient rows."""
        if self.slot_index is not None:
            grads.index_add_(0, self.slot_index, update.to(grads.dtype), alpha=alpha)
        else:
            grads[self.slots[0] : self.slots[0] + self.n].add_(update, alpha=alpha)


@dataclass(slots=True)
class LoraPlan:
    buckets: list[Bucket] = field(default_factory=list)
    anchor: Tensor | None = None
    """Requires grad, so that autograd records the first layer too; None when nothing below the head is trained."""

    @classmethod
    def of(
        cls, runs: Iterable[tuple[Adapter | None, int]], *, train: bool = False, device: torch.device | str = "cpu"
    ) -> LoraPlan:
        """`runs`: (adapter or None for the base model, rows) in row order."""
        by_stack: dict[int, list[Run]] = {}
        for run in _merge(runs):
            by_stack.setdefault(id(run.adapter.stack), []).append(run)
        buckets = [_bucket(group, device) for found in by_stack.values() for group in _group(found)]
        below_head = any(name != UNEMBED for b in buckets for name in b.stack.layout.sites)
        return cls(buckets, torch.zeros((), requires_grad=True) if train and below_head else None)


def _merge(runs: Iterable[tuple[Adapter | None, int]]) -> list[Run]:
    merged: list[Run] = []
    start = 0
    for adapter, rows in runs:
        if adapter is not None and rows:
            last = merged[-1] if merged else None
            if last and _same_weights(last.adapter, adapter) and last.start + last.rows == start:
                merged[-1] = Run(adapter, last.start, last.rows + rows)
            else:
                merged.append(Run(adapter, start, rows))
        start += rows
    return merged


def _same_weights(a: Adapter, b: Adapter) -> bool:
    return a.stack is b.stack and a.slot == b.slot  # a snapshot may read its original's slot


def _group(runs: list[Run]) -> list[list[Run]]:
    """Runs of similar length together; row order inside a group."""
    groups: list[list[Run]] = []
    total = 0
    for run in sorted(runs, key=lambda r: (r.rows, r.start)):
        padded = run.rows * (len(groups[-1]) + 1) if groups else 0
        if groups and (run.rows <= SMALL_RUN or padded <= PADDING_LIMIT * (total + run.rows)):
            groups[-1].append(run)
            total += run.rows
        else:
            groups.append([run])
            total = run.rows
    return [sorted(g, key=lambda r: r.start) for g in groups]


def _bucket(runs: list[Run], device: torch.device | str) -> Bucket:
    slots = tuple(r.adapter.slot for r in runs)
    rows = max(r.rows for r in runs)
    bucket = Bucket(runs[0].adapter.stack, slots, rows, runs[0].start)
    if slots != tuple(range(slots[0], slots[0] + len(slots))):
        bucket.slot_index = torch.tensor(slots, device=device)
    if any(r.rows != rows or r.start != runs[0].start + i * rows for i, r in enumerate(runs)):
        starts = torch.tensor([r.start for r in runs])[:, None]
        counts = torch.tensor([r.rows for r in runs])[:, None]
        column = torch.arange(rows)
        real = (column < counts).flatten()
        bucket.index = (starts + column.minimum(counts - 1)).flatten().to(device)
        if not real.all():
            bucket.real = real.nonzero().flatten().to(device)
            bucket.padding = (~real).nonzero().flatten().to(device)
    return bucket


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, name: SiteName, plan: LoraPlan) -> Tensor:
    """x W^T + b, plus each row's own adapter. Gradients of adapters go straight into their gradient rows."""
    if plan.anchor is not None and torch.is_grad_enabled():
        return _LoraLinear.apply(x, plan.anchor, weight, bias, name, plan)
    return lora_forward(x, weight, bias, name, plan)[0] if plan.buckets else linear(x, weight, bias)


def lora_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: SiteName, plan: LoraPlan
) -> tuple[Tensor, list[Tensor]]:
    """The output, and x A^T of each bucket (the backward pass needs it)."""
    y, inner = linear(x, weight, bias), lora_inner(x, name, plan)
    for bucket, t in zip(_at(plan, name), inner, strict=True):
        r, scale = bucket.stack.layout.rank, bucket.stack.layout.scale
        for i, p in enumerate(bucket.stack.layout.sites[name].parts):
            out, t_p, b = y[:, p.out_start : p.out_start + p.out_size], t[..., i * r : (i + 1) * r], bucket.b(name, i)
            bucket.add_product(out, t_p, b, scale)
    return y, inner


def lora_inner(x: Tensor, name: SiteName, plan: LoraPlan) -> list[Tensor]:
    """x A^T of each bucket, [n, rows, parts * rank]."""
    return [torch.bmm(b.take(x), b.a(name).mT) for b in _at(plan, name)]


def lora_backward(
    dy: Tensor, x: Tensor, inner: Sequence[Tensor], weight: Tensor, name: SiteName, plan: LoraPlan, *, need_dx: bool
) -> Tensor | None:
    """Adds to the gradient rows of every adapter in the plan; returns dx if asked."""
    dx = dy @ weight if need_dx else None
    for bucket, t in zip(_at(plan, name), inner, strict=True):
        layout = bucket.stack.layout
        site, r, scale = layout.sites[name], layout.rank, layout.scale
        dy_b, x_b = bucket.take(dy, clear_padding=True), bucket.take(x)
        dt = torch.empty_like(t)
        for i, p in enumerate(site.parts):
            dy_p, columns = dy_b[..., p.out_start : p.out_start + p.out_size], slice(i * r, (i + 1) * r)
            dt[..., columns] = torch.bmm(dy_p, bucket.b(name, i).mT)
            _add_product(bucket, bucket.stack.b("grads", name, i), t[..., columns], dy_p, scale)
        _add_product(bucket, bucket.stack.a("grads", name), dt, x_b, scale)
        if dx is not None:
            bucket.add_product(dx, dt, bucket.a(name), scale)
    return dx


def _add_product(bucket: Bucket, grads: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """grads[slots] += scale * left^T right."""
    if bucket.n == 1 and grads.dtype == left.dtype:
        grads[bucket.slots[0]].addmm_(left[0].T, right[0], alpha=scale)
    else:
        bucket.accumulate(grads, torch.bmm(left.mT, right), scale)


def _at(plan: LoraPlan, name: SiteName) -> list[Bucket]:
    return [b for b in plan.buckets if name in b.stack.layout.sites]


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, name: SiteName, plan: LoraPlan
    ) -> Tensor:
        y, inner = lora_forward(x, weight, bias, name, plan)
        ctx.save_for_backward(x, weight, *inner)
        ctx.name, ctx.plan = name, plan
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, *inner = ctx.saved_tensors
        dx = lora_backward(grads[0].contiguous(), x, inner, weight, ctx.name, ctx.plan, need_dx=ctx.needs_input_grad[0])
        return dx, None, None, None, None, None
