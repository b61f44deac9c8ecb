"""Linear layers with LoRA for batches that mix adapters.

Of packed rows x [rows, in], y = x W^T + b + scale * (x A^T) B^T, with A and B of each row's own adapter; a plan says
which one that is. What adapters add is computed in buckets of similar runs (`buckets`), or by kernels over tiles of
rows on a GPU (`tiles`). Rows of the base model cost nothing.

Gradients of adapters never pass through autograd: `lora_backward` adds to the gradient rows itself. A frozen product
that gradients pass goes through `lora_linear`, also where no adapter trains it: autograd must not keep what `dense`
returns. A new trained site needs an entry in the layout and a `lora_linear` call, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from palestra.model import kernels
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.buckets import BucketedLora, RowRun
from palestra.model.lora.layout import UNEMBED, SiteName
from palestra.model.quantised.packed import FrozenWeight, PackedWeight, dense
from palestra.model.recomputation import is_left_out

if TYPE_CHECKING:
    from palestra.model.kernels.lora import ExpertTiles


class LoraProducts(Protocol):
    """What the adapters of one batch add to the products of its rows."""

    def inner(self, x: Tensor, name: SiteName) -> list[Tensor]:
        """x A^T of the adapters at this site; the backward pass needs it."""
        ...

    def add(self, y: Tensor, inner: Sequence[Tensor], name: SiteName) -> None:
        """y += scale * inner B, in place."""
        ...

    def apply(self, y: Tensor, x: Tensor, name: SiteName) -> None:
        """Both, where no backward pass follows."""
        ...

    def backward(self, dy: Tensor, x: Tensor, inner: Sequence[Tensor], dx: Tensor | None, name: SiteName) -> None:
        """Adds to the gradient rows of every adapter, and to dx."""
        ...

    def at_experts(self, layer: int) -> ExpertTiles | None:
        """Returns what kernels read; None where no adapter has something for the layer's experts, or no kernels run."""
        ...


@dataclass(slots=True)
class LoraPlan:
    products: LoraProducts | None = None
    """None: every row is the base model's."""
    anchor: Tensor | None = None
    """Requires grad, so that autograd records the first layer too; None when nothing below the head is trained."""
    runs: list[RowRun] = field(default_factory=list)
    """The rows that have adapters: experts sort them in every layer anew."""
    _parts: dict[int, list[LoraPlan]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        runs: Iterable[tuple[Adapter | None, int]],
        *,
        train: bool = False,
        through_layers: bool = False,
        device: torch.device | str = "cpu",
    ) -> LoraPlan:
        """`runs`: (adapter or None for the base model, rows) in row order. `through_layers`: layers have a backward
        pass even if nothing below the head is trained."""
        merged = merge_runs(runs)
        if not merged:
            return cls()
        below_head = any(name != UNEMBED for run in merged for name in run.adapter.stack.layout.sites)
        anchor = torch.zeros((), requires_grad=True) if train and (below_head or through_layers) else None
        return cls(_products(merged, device), anchor, merged)

    def parts(self, rows: int, size: int, device: torch.device) -> list[LoraPlan]:
        """The plans of parts of `size` rows each, the last one shorter; made once."""
        if size not in self._parts:
            self._parts[size] = [self.part(i, min(i + size, rows), device) for i in range(0, rows, size)]
        return self._parts[size]

    def part(self, start: int, stop: int, device: torch.device) -> LoraPlan:
        """The plan of some of the rows. It records what the whole one does, whether these rows have adapters or not."""
        runs = []
        for run in self.runs:
            low, high = max(run.start, start), min(run.start + run.rows, stop)
            if low < high:
                runs.append(RowRun(run.adapter, low - start, high - low))
        return LoraPlan(_products(runs, device) if runs else None, self.anchor, runs)


def _products(runs: list[RowRun], device: torch.device | str) -> LoraProducts:
    if kernels.can_run(device, runs[0].adapter.stack.dtype):
        from palestra.model.lora.tiles import TiledLora

        return TiledLora(runs, device)
    return BucketedLora(runs, device)


def merge_runs(runs: Iterable[tuple[Adapter | None, int]]) -> list[RowRun]:
    """The rows that have adapters; neighbours with the same weights are one run."""
    merged: list[RowRun] = []
    start = 0
    for adapter, rows in runs:
        if adapter is not None and rows:
            last = merged[-1] if merged else None
            if last and last.start + last.rows == start and _same_weights(last.adapter, adapter):
                last.rows += rows
            else:
                merged.append(RowRun(adapter, start, rows))
        start += rows
    return merged


def _same_weights(a: Adapter, b: Adapter) -> bool:
    return a.stack is b.stack and a.slot == b.slot  # a snapshot may read its original's slot


def lora_linear(x: Tensor, weight: FrozenWeight, bias: Tensor | None, name: SiteName, plan: LoraPlan) -> Tensor:
    """x W^T + b, plus each row's own adapter. Gradients of adapters go straight into their gradient rows."""
    if plan.anchor is not None and torch.is_grad_enabled():
        return _LoraLinear.apply(x, plan.anchor, weight, bias, name, plan)
    y = frozen_linear(x, weight, bias)
    if plan.products is not None:
        plan.products.apply(y, x, name)
    return y


def frozen_linear(x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> Tensor:
    """x W^T + b. On a GPU a single row is computed as two: alone it would go to a kernel that adds in another order."""
    if isinstance(weight, PackedWeight) and weight.is_read_in_place(x):
        return weight.linear(x, bias)
    if x.is_cuda and len(x) == 1:
        return linear(x.expand(2, -1), dense(weight), bias)[:1]
    return linear(x, dense(weight), bias)


def lora_forward(
    x: Tensor, weight: FrozenWeight, bias: Tensor | None, name: SiteName, plan: LoraPlan
) -> tuple[Tensor, list[Tensor]]:
    """The output, and what the adapters' backward pass needs of it."""
    inner = lora_inner(x, name, plan)
    if is_left_out(name):
        return x.new_empty(len(x), weight.shape[0]), inner
    y = frozen_linear(x, weight, bias)
    if plan.products is not None:
        plan.products.add(y, inner, name)
    return y, inner


def lora_inner(x: Tensor, name: SiteName, plan: LoraPlan) -> list[Tensor]:
    return [] if plan.products is None else plan.products.inner(x, name)


def lora_backward(
    dy: Tensor,
    x: Tensor,
    inner: Sequence[Tensor],
    weight: FrozenWeight,
    name: SiteName,
    plan: LoraPlan,
    *,
    need_dx: bool,
) -> Tensor | None:
    """Adds to the gradient rows of every adapter in the plan; returns dx if asked."""
    dx = dy @ dense(weight) if need_dx else None
    if plan.products is not None:
        plan.products.backward(dy, x, inner, dx, name)
    return dx


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: FrozenWeight, bias: Tensor | None, name: SiteName, plan: LoraPlan
    ) -> Tensor:
        y, inner = lora_forward(x, weight, bias, name, plan)
        ctx.save_for_backward(x, *inner)
        ctx.weight, ctx.name, ctx.plan = weight, name, plan
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, *inner), need_dx = ctx.saved_tensors, ctx.needs_input_grad[0]
        dx = lora_backward(grads[0].contiguous(), x, inner, ctx.weight, ctx.name, ctx.plan, need_dx=need_dx)
        return dx, None, None, None, None, None
