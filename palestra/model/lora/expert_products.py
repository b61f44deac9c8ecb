"""LoRA products of experts, for batches that mix adapters.

A row that visits k experts makes k pairs, and pairs are sorted by expert e (`Dispatch`). With p = 1 or 2 parts:

    gate, up    pair += scale * (x A_e^T) B_e        A [experts or 1, p * rank, in], B [experts, rank, out] of each part
    down        pair += scale * (h A_e^T) B_e        A [experts, rank, in], B [experts or 1, rank, out]

In Tinker's layout gate and up have one A for all experts: x A^T is then computed of rows, before they are dispatched.
And down has one B: it multiplies the weighted sum of a row's h A_e^T, once. In PEFT's layout every expert has its own A
and B, and both are computed of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from palestra.model.lora.adapters import Stack
from palestra.model.lora.buckets import RowRun
from palestra.model.lora.layout import SiteName
from palestra.model.mlp.routing import Dispatch

SUM_ROWS = 512


@dataclass(slots=True)
class _ExpertRun:
    """Adjacent rows of one adapter, and the pairs they make with experts."""

    stack: Stack
    slot: int
    rows: slice
    dispatch: Dispatch
    """The run's own pairs, sorted by expert."""
    places: Tensor | None
    """Where these stand among all pairs; None: they are all pairs."""

    @classmethod
    def of(cls, run: RowRun, dispatch: Dispatch) -> _ExpertRun:
        stack, slot, rows = run.adapter.stack, run.adapter.slot, slice(run.start, run.start + run.rows)
        if run.rows == len(dispatch.numbers):
            return cls(stack, slot, rows, dispatch, None)
        own = Dispatch.of(dispatch.numbers[rows], len(dispatch.ends))
        return cls(stack, slot, rows, own, dispatch.places[rows].flatten()[own.order])

    def take(self, pairs: Tensor) -> Tensor:
        return pairs if self.places is None else pairs.index_select(0, self.places)

    def add(self, pairs: Tensor, update: Tensor, scale: float) -> None:
        if self.places is None:
            pairs.add_(update, alpha=scale)
        else:  # each place once: there is no order in which they could differ
            pairs.index_add_(0, self.places, update, alpha=scale)

    def a(self, name: SiteName) -> Tensor:
        return self.stack.a("compute", name)[self.slot]

    def b(self, name: SiteName, part: int = 0) -> Tensor:
        return self.stack.b("compute", name, part)[self.slot]

    def gradient(self, name: SiteName, part: int = -1) -> Tensor:
        """The gradient of A, or of a part's B."""
        whole = self.stack.a("partial", name) if part < 0 else self.stack.b("partial", name, part)
        return whole[self.slot]


class ExpertLora:
    """What the adapters of a batch add in one layer with experts."""

    def __init__(self, runs: Sequence[RowRun], layer: int, dispatch: Dispatch):
        self.gate_up_site, self.down_site = (layer, "gate_up"), (layer, "down")
        trained = [run for run in runs if self.down_site in run.adapter.stack.own_layout.sites]
        self.runs = [_ExpertRun.of(run, dispatch) for run in trained]

    def add_gate_up(self, gate_up: Tensor, x: Tensor) -> list[Tensor]:
        """Adds to the pairs; returns x A^T of each run, of its rows where A is shared, else of its pairs."""
        return [self._add_gate_up(run, gate_up, x[run.rows]) for run in self.runs]

    def _add_gate_up(self, run: _ExpertRun, gate_up: Tensor, x: Tensor) -> Tensor:
        name, layout, rows = self.gate_up_site, run.stack.own_layout, run.dispatch.rows
        a = run.a(name)
        inner = linear(x, a[0]) if len(a) == 1 else run.dispatch.product(x.index_select(0, rows), a.mT)
        of_pairs = inner.index_select(0, rows) if len(a) == 1 else inner
        for i, (part, t) in enumerate(zip(layout.sites[name].parts, of_pairs.split(layout.rank, 1), strict=True)):
            columns = gate_up[:, part.out_start : part.out_start + part.out_size]
            run.add(columns, run.dispatch.product(t, run.b(name, i)), layout.scale)
        return inner

    def gate_up_backward(
        self, grad: Tensor, x: Tensor, inner: Sequence[Tensor], dx: Tensor | None, dx_pairs: Tensor | None
    ) -> None:
        """Adds to gradient rows, and to the gradient of x: of rows where A is shared, else of pairs."""
        for run, t in zip(self.runs, inner, strict=True):
            self._gate_up_backward(run, run.take(grad), x[run.rows], t, dx, dx_pairs)

    def _gate_up_backward(
        self, run: _ExpertRun, grad: Tensor, x: Tensor, inner: Tensor, dx: Tensor | None, dx_pairs: Tensor | None
    ) -> None:
        name, layout, dispatch = self.gate_up_site, run.stack.own_layout, run.dispatch
        a, r, parts = run.a(name), layout.rank, layout.sites[name].parts
        is_shared = len(a) == 1
        of_pairs = inner.index_select(0, dispatch.rows) if is_shared else inner
        d_pairs = torch.empty_like(of_pairs)
        for i, part in enumerate(parts):
            columns = slice(i * r, (i + 1) * r)
            own = grad[:, part.out_start : part.out_start + part.out_size]
            dispatch.add_gradient(run.gradient(name, i), of_pairs[:, columns] * layout.scale, own)
            torch.mul(dispatch.product(own, run.b(name, i).mT), layout.scale, out=d_pairs[:, columns])
        if not is_shared:
            dispatch.add_gradient(run.gradient(name), d_pairs, x.index_select(0, dispatch.rows))
            if dx_pairs is not None:
                run.add(dx_pairs, dispatch.product(d_pairs, a), 1.0)
            return
        d_rows = dispatch.sum_pairs(d_pairs)
        run.gradient(name)[0].add_(_over_rows(d_rows, x))
        if dx is not None:
            dx[run.rows].addmm_(d_rows, a[0])

    def down_inner(self, activated: Tensor) -> list[Tensor]:
        """A times what is activated, for each run's pairs."""
        return [run.dispatch.product(run.take(activated), run.a(self.down_site).mT) for run in self.runs]

    def add_down(self, out: Tensor, inner: Sequence[Tensor]) -> None:
        """Adds to the pairs where each expert has its own B."""
        for run, t in zip(self.runs, inner, strict=True):
            b = run.b(self.down_site)
            if len(b) > 1:
                run.add(out, run.dispatch.product(t, b), run.stack.own_layout.scale)

    def add_rows(self, y: Tensor, weights: Tensor, inner: Sequence[Tensor]) -> None:
        """Adds to the rows where B is shared, once their experts are summed."""
        for run, t in zip(self.runs, inner, strict=True):
            b = run.b(self.down_site)
            if len(b) == 1:
                summed = run.dispatch.sum_pairs(t, weights[run.rows])
                y[run.rows].addmm_(summed, b[0], alpha=run.stack.own_layout.scale)

    def down_backward(
        self, dy: Tensor, activated: Tensor, weights: Tensor, inner: Sequence[Tensor], d_activated: Tensor
    ) -> None:
        """Adds to gradient rows, and to `d_activated`, which is not weighted yet."""
        for run, t in zip(self.runs, inner, strict=True):
            self._down_backward(run, dy[run.rows], run.take(activated), weights[run.rows], t, d_activated)

    def _down_backward(
        self, run: _ExpertRun, dy: Tensor, activated: Tensor, weights: Tensor, inner: Tensor, d_activated: Tensor
    ) -> None:
        name, dispatch, scale = self.down_site, run.dispatch, run.stack.own_layout.scale
        b, of_pair = run.b(name), weights.flatten()[dispatch.order, None].to(inner.dtype)
        if len(b) == 1:
            d_pairs = (dy @ b[0].T).mul_(scale).index_select(0, dispatch.rows)
            run.gradient(name, 0)[0].add_(_over_rows(dispatch.sum_pairs(inner, weights), dy), alpha=scale)
        else:
            dy_pairs = dy.index_select(0, dispatch.rows)
            d_pairs = dispatch.product(dy_pairs, b.mT).mul_(scale)
            dispatch.add_gradient(run.gradient(name, 0), inner * (of_pair * scale), dy_pairs)
        run.add(d_activated, dispatch.product(d_pairs, run.a(name)), 1.0)
        dispatch.add_gradient(run.gradient(name), d_pairs * of_pair, activated)


def _over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left^T right. With exact numerics a GPU gives a sum to one program however long it is: it gets shorter ones."""
    whole = len(left) // SUM_ROWS * SUM_ROWS
    if left.dtype == torch.float32 or not left.is_cuda or whole <= SUM_ROWS:
        return left.T @ right
    parts, others = (x[:whole].unflatten(0, (-1, SUM_ROWS)) for x in (left, right))
    total = torch.bmm(parts.mT, others, out_dtype=torch.float32).sum(0)
    return total if whole == len(left) else total + left[whole:].T @ right[whole:]
