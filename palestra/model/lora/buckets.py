"""LoRA products as batched products over buckets: runs of similar length computed as [n, rows, …].

A run is adjacent rows of x [all rows, in] with one adapter. A bucket has n runs, whose adapters have one layout, padded
to the longest: by at most half of the real rows, but for runs that are short anyway. Of a site with p parts,

    t = x A^T                [n, rows, in] by [n, in, p * rank]; kept for the gradient
    y += scale * t B         of each part: [n, rows, rank] by [n, rank, out], added to the part's columns of y
    dB += scale * t^T dy     dt = dy B^T     dA += scale * dt^T x     dx += scale * dt A

Where the runs are adjacent and of one length, rows are views; where their slots are consecutive, matrices are.
Elsewhere they are picked by index. The plain code: for CPUs, and for float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.model.lora.adapters import Adapter, Stack
from palestra.model.lora.layout import SiteName

PADDING_LIMIT = 1.5  # a bucket may compute at most this many rows per real row …
SMALL_RUN = 16  # … but below this many rows a product costs its launch, not its arithmetic


@dataclass(slots=True)
class RowRun:
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


class BucketedLora:
    """What the adapters of a batch add to its linear layers; see `LoraProducts`."""

    def __init__(self, runs: Sequence[RowRun], device: torch.device | str):
        by_stack: dict[int, list[RowRun]] = {}
        for run in runs:
            by_stack.setdefault(id(run.adapter.stack), []).append(run)
        self.buckets = [_bucket(group, device) for found in by_stack.values() for group in _group(found)]

    def inner(self, x: Tensor, name: SiteName) -> list[Tensor]:
        """x A^T of each bucket, [n, rows, parts * rank]."""
        return [torch.bmm(b.take(x), b.a(name).mT) for b in self._at(name)]

    def add(self, y: Tensor, inner: Sequence[Tensor], name: SiteName) -> None:
        for bucket, t in zip(self._at(name), inner, strict=True):
            r, scale = bucket.stack.own_layout.rank, bucket.stack.own_layout.scale
            for i, p in enumerate(bucket.stack.own_layout.sites[name].parts):
                out, t_p = y[:, p.out_start : p.out_start + p.out_size], t[..., i * r : (i + 1) * r]
                bucket.add_product(out, t_p, bucket.b(name, i), scale)

    def apply(self, y: Tensor, x: Tensor, name: SiteName) -> None:
        self.add(y, self.inner(x, name), name)

    def at_experts(self, layer: int) -> None:
        return None

    def backward(self, dy: Tensor, x: Tensor, inner: Sequence[Tensor], dx: Tensor | None, name: SiteName) -> None:
        for bucket, t in zip(self._at(name), inner, strict=True):
            layout = bucket.stack.own_layout
            site, r, scale = layout.sites[name], layout.rank, layout.scale
            dy_b, x_b = bucket.take(dy, clear_padding=True), bucket.take(x)
            dt = torch.empty_like(t)
            for i, p in enumerate(site.parts):
                dy_p, columns = dy_b[..., p.out_start : p.out_start + p.out_size], slice(i * r, (i + 1) * r)
                dt[..., columns] = torch.bmm(dy_p, bucket.b(name, i).mT)
                _add_product(bucket, bucket.stack.b("partial", name, i), t[..., columns], dy_p, scale)
            _add_product(bucket, bucket.stack.a("partial", name), dt, x_b, scale)
            if dx is not None:
                bucket.add_product(dx, dt, bucket.a(name), scale)

    def _at(self, name: SiteName) -> list[Bucket]:
        return [b for b in self.buckets if name in b.stack.own_layout.sites]


def _add_product(bucket: Bucket, grads: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """grads[slots] += scale * left^T right."""
    if bucket.n == 1 and grads.dtype == left.dtype:
        grads[bucket.slots[0]].addmm_(left[0].T, right[0], alpha=scale)
    else:
        bucket.accumulate(grads, torch.bmm(left.mT, right), scale)


def _group(runs: list[RowRun]) -> list[list[RowRun]]:
    """Runs of similar length together; row order inside a group."""
    groups: list[list[RowRun]] = []
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


def _bucket(runs: list[RowRun], device: torch.device | str) -> Bucket:
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
