"""Chooses the experts of a token, and multiplies rows that are sorted by expert.

Everything has one fixed order: rows keep theirs within an expert, and what the experts of a token return is summed in
the order in which the router named them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import embedding_bag, grouped_mm, linear

from palestra.model import kernels
from palestra.model.loading.layer_spec import ExpertsSpec
from palestra.model.transfers import to_device

if TYPE_CHECKING:
    from palestra.model.context_group import ContextRows
    from palestra.model.kernels.routing import SortedPairs

FEW_ROWS = 8
SUM_EPS = 1e-20  # what transformers adds to the sum of sigmoids before it divides
GROUPED_ALIGNMENT = 16  # bytes: what torch's grouped product asks of every row and matrix


def choose_experts(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    spec: ExpertsSpec,
    replayed: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights (float32) and numbers of each row's experts, [rows, experts per token]. Rows of `replayed` that are not
    -1 name the experts that were chosen before; what these weigh is the router's to say, now as then. Rows whose slot
    is below 0 visit no expert: their numbers are -1."""
    if kernels.can_run(x.device, x.dtype):
        return _Choice.apply(x, router, bias, spec, replayed, slots)
    return _choose(_RouterLogits.apply(x, router), bias, spec, replayed)


def _choose(logits: Tensor, bias: Tensor | None, spec: ExpertsSpec, replayed: Tensor | None) -> tuple[Tensor, Tensor]:
    numbers = _rank(logits.detach(), bias, spec).topk(spec.per_token, dim=-1).indices
    if replayed is not None:
        numbers = torch.where(replayed < 0, numbers, replayed)
    return _weigh(logits, bias, spec, numbers), numbers


def _rank(logits: Tensor, bias: Tensor | None, spec: ExpertsSpec) -> Tensor:
    """Returns the scores by which experts are chosen."""
    ranked = torch.sigmoid(logits) if spec.router == "sigmoid" else logits
    if bias is not None:
        ranked = ranked + bias
    n, kept = spec.groups
    if kept < n:  # those groups whose best two experts have the largest sums
        grouped = ranked.unflatten(-1, (n, -1))
        dropped = grouped.topk(2, -1).values.sum(-1).topk(n - kept, -1, largest=False).indices
        mask = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, dropped, True)
        ranked = grouped.masked_fill(mask[..., None], -torch.inf).flatten(-2)
    return ranked


def _weigh(logits: Tensor, bias: Tensor | None, spec: ExpertsSpec, numbers: Tensor) -> Tensor:
    """The weights of the experts that are chosen."""
    if spec.router == "sigmoid":
        weights = torch.sigmoid(logits.gather(-1, numbers))
        if spec.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + SUM_EPS)
        return weights * spec.scale
    if bias is not None:
        logits = logits + bias
    chosen = logits.gather(-1, numbers)
    if spec.normalises:
        return torch.softmax(chosen, -1)
    return torch.exp(chosen - logits.logsumexp(-1, keepdim=True))


class _RouterLogits(Function):
    """Products in float32: rounded ones would send a token to other experts in the sampler than in training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor) -> Tensor:
        ctx.save_for_backward(router)
        return linear(x.float(), router.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (router,) = ctx.saved_tensors
        return (grads[0] @ router.float()).to(router.dtype), None


class _Choice(Function):
    """By kernels; the gradient is that of the plain code, for the experts that were chosen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor, bias: Any, spec: ExpertsSpec, replayed: Any, slots: Any) -> Any:
        from palestra.model.kernels.routing import choose

        logits, weights, numbers = choose(x, router, bias, spec, replayed, slots)
        ctx.save_for_backward(logits, numbers, router, bias)
        ctx.spec = spec
        ctx.mark_non_differentiable(numbers)
        return weights, numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, numbers, router, bias = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.requires_grad_()
            weights = _weigh(logits, bias, ctx.spec, numbers)
        (d_logits,) = torch.autograd.grad(weights, logits, grads[0])
        return d_logits.to(router.dtype) @ router, None, None, None, None, None


class Routing:
    """Which experts the rows of one forward pass visit, layer by layer."""

    def __init__(self, replayed: dict[int, Tensor] | None = None, slots: Tensor | None = None) -> None:
        """`replayed`: for each layer with experts those that its rows have to visit, -1 where the router chooses.
        `slots`: below 0 for rows that are not of any sequence."""
        self.numbers: dict[int, Tensor] = {}
        self.replayed, self.slots = replayed or {}, slots

    @property
    def by_row(self) -> Tensor:
        """[rows, layers with experts, experts per token]."""
        return torch.stack(list(self.numbers.values()), 1)

    def visits(
        self, sequences: Sequence[NDArray[np.int64]], n_experts: int, divided: ContextRows | None = None
    ) -> Tensor:
        """Counts how often each expert was visited by each of the sequences, given by their rows: [sequences, layers,
        experts]. `divided`: the pass had this process's rows alone, and the others are asked for theirs."""
        by_row = self.by_row if divided is None else divided.gather(self.by_row)
        layers = by_row.transpose(0, 1)
        owners = np.repeat(np.arange(len(sequences)), [len(rows) for rows in sequences])
        layers = layers.index_select(1, to_device(np.concatenate(sequences), layers.device))
        every = torch.arange(len(layers), device=layers.device)
        owner = to_device(owners, layers.device)
        cells = (owner[None, :, None] * len(layers) + every[:, None, None]) * n_experts + layers
        counts = torch.bincount(cells.flatten(), minlength=len(sequences) * len(layers) * n_experts)
        return counts.view(len(sequences), len(layers), n_experts)


@dataclass(frozen=True)
class Dispatch:
    """Pairs of a row and one of its experts, sorted by expert; pair p is of row p // k."""

    numbers: Tensor
    """[rows, k]: the experts of each row."""
    order: Tensor
    """Pairs in sorted order."""
    places: Tensor
    """[rows, k]: where each pair stands in sorted order."""
    ends: Tensor
    """[experts]: where each expert's pairs end, in sorted order."""
    sorted: SortedPairs | None = None
    """As kernels read it."""

    @classmethod
    def of(cls, numbers: Tensor, n_experts: int) -> Dispatch:
        if kernels.can_run_on(numbers.device):
            from palestra.model.kernels.routing import sort_pairs

            found = sort_pairs(numbers, n_experts)
            return cls(numbers, found.order, found.places, found.ends, found)
        experts, order = numbers.flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        every = torch.arange(n_experts, device=order.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        return cls(numbers, order, places.view_as(numbers), ends)

    @cached_property
    def experts(self) -> Tensor:
        """The expert of each sorted pair."""
        return self.numbers.flatten().index_select(0, self.order)

    @cached_property
    def rows(self) -> Tensor:
        """The row of each sorted pair."""
        return self.order // self.numbers.shape[1]

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Number, start and end of each expert that is visited; on a GPU, asking waits for it."""
        ends = self.ends.tolist()
        starts = [0, *ends[:-1]]
        return [(n, start, end) for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < end]

    def product(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Each sorted row times its expert's matrix: [pairs, in] by [experts, in, out]."""
        if _can_group(x, matrices) or _can_loop(x, matrices):
            return grouped_mm(x, matrices, offs=self.ends)
        y = x.new_empty(len(x), matrices.shape[2])
        for n, start, end in self.spans:
            _multiply(x[start:end], matrices[n], y[start:end])
        return y

    def add_gradient(self, grads: Tensor, left: Tensor, right: Tensor) -> None:
        """grads[expert] += left^T right over each expert's rows: [experts, m, n] from [pairs, m] and [pairs, n]."""
        if _can_group(left.T, right):
            grads.add_(grouped_mm(left.T, right, offs=self.ends))
            return
        for n, start, end in self.spans:
            pair = (left[start:end].T, right[start:end])
            if left.dtype == grads.dtype:
                grads[n].addmm_(*pair)
            else:
                grads[n].add_(torch.mm(*pair))

    def weigh_gradient(self, grad: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        """The gradient of the router's weights, [rows, k], from that of weighted values [pairs, n]; `grad` becomes that
        of the values themselves."""
        if self.sorted is not None and kernels.can_run(grad.device, grad.dtype):
            from palestra.model.kernels.experts import weigh_gradient

            return weigh_gradient(grad, values, self.order, weights)
        d_weights = torch.linalg.vecdot(grad.float(), values.float())
        grad.mul_(weights.flatten()[self.order, None].to(grad.dtype))
        return d_weights[self.places]

    def sum_pairs(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sums what stands at each row's pairs, in the router's order: [pairs, n] to [rows, n]."""
        if self.sorted is not None and kernels.can_run(values.device, values.dtype):
            from palestra.model.kernels.experts import sum_pairs

            return sum_pairs(values, self.places, weights)
        weights = None if weights is None else weights.to(values.dtype)
        return embedding_bag(self.places, values, mode="sum", per_sample_weights=weights)


def _multiply(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    """out = x matrix. With a transposed matrix and more than a few rows, OpenBLAS on ARM takes 2 to 10 times as long;
    the transposed product of transposed rows does not."""
    if len(x) <= FEW_ROWS or matrix.stride(-1) == 1 or x.is_cuda:
        torch.mm(x, matrix, out=out)
    else:
        out.copy_(torch.mm(matrix.T, x.T.contiguous()).T)


def _can_group(*operands: Tensor) -> bool:
    """Whether torch has one kernel for all groups."""
    return all(t.is_cuda and t.dtype == torch.bfloat16 and _is_aligned(t) for t in operands)


def _can_loop(x: Tensor, matrices: Tensor) -> bool:
    """Whether torch's own loop on a CPU, which is faster than one in Python, does what `_multiply` would do."""
    is_plain = not x.is_cuda and x.dtype == torch.float32 and matrices.stride(-1) == 1
    return is_plain and _is_aligned(x) and _is_aligned(matrices)


def _is_aligned(t: Tensor) -> bool:
    in_bytes = (s * t.itemsize for s in t.stride() if s != 1)
    return t.data_ptr() % GROUPED_ALIGNMENT == 0 and all(s % GROUPED_ALIGNMENT == 0 for s in in_bytes)
