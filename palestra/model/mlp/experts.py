"""Mixture of experts of a layer: the router's choice, the experts, and the one that every token visits.

Cost follows the experts that are visited. The backward pass computes activations again from what gate and up
returned. Owns: the passes through the experts. Never touches: how rows are sorted, what adapters add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from palestra.model import kernels
from palestra.model.block_ops import BlockOps, SwiGlu
from palestra.model.loading.layer_spec import GATE_SLOPE, ExpertsSpec
from palestra.model.loading.weights import ExpertsWeights
from palestra.model.lora.expert_products import ExpertLora
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mlp.activations import activation
from palestra.model.mlp.dense import DenseMlp
from palestra.model.mlp.routing import Dispatch, Routing, choose_experts
from palestra.model.quantised.packed import FrozenWeight, dense_stack


class ExpertsMlp:
    def __init__(self, n: int, spec: ExpertsSpec, weights: ExpertsWeights, ops: BlockOps):
        self.n, self.spec, self.weights = n, spec, weights
        plain = activation(spec.activation, ops)
        self.activate = plain if spec.limit is None else partial(clamped_swiglu, limit=spec.limit)
        self.shared = None if weights.shared is None else DenseMlp(n, weights.shared, plain, kind="shared_")
        self._products = _products_on(weights.router)

    def __call__(
        self, x: Tensor, plan: LoraPlan, routing: Routing | None = None, *, seen_by_router: Tensor | None = None
    ) -> Tensor:
        """`routing`, if given, records which experts the rows visit, and may prescribe them. `seen_by_router`: what the
        router reads, if that is not x."""
        replayed, seen = None if routing is None else routing.replayed.get(self.n), seen_by_router
        weights, numbers = choose_experts(
            x if seen is None else seen,
            self.weights.router,
            self.weights.router_bias,
            self.spec,
            replayed,
            None if routing is None else routing.slots,
        )
        if (scale := self.weights.expert_scale) is not None:
            weights = weights * scale[numbers]
        if routing is not None:
            routing.numbers[self.n] = numbers
        y = self._visit(x, weights, numbers, plan)
        if self.shared is None:
            return y
        shared, gate = self.shared(x, plan), self.weights.shared_gate
        return y + shared if gate is None else _GatedSum.apply(y, shared, x, gate)

    def _visit(self, x: Tensor, weights: Tensor, numbers: Tensor, plan: LoraPlan) -> Tensor:
        """What the chosen experts return; some work in a width of their own."""
        w, n = self.weights, self.n
        pairs = self._products(w, self.activate, Dispatch.of(numbers, self.spec.n_experts), n, plan)
        if w.latent_in is not None:
            x = lora_linear(x, w.latent_in, None, (n, "latent_in"), plan)
        if plan.anchor is not None and torch.is_grad_enabled():
            y = _ExpertsFunction.apply(x, weights, plan.anchor, pairs)
        else:
            y = pairs.forward(x, weights)[0]
        return y if w.latent_out is None else lora_linear(y, w.latent_out, None, (n, "latent_out"), plan)


@dataclass(frozen=True)
class Experts:
    """The experts of one layer for one batch, whose rows are dispatched."""

    weights: ExpertsWeights
    activate: SwiGlu
    dispatch: Dispatch
    layer: int
    plan: LoraPlan

    @cached_property
    def lora(self) -> ExpertLora:
        return ExpertLora(self.plan.runs, self.layer, self.dispatch)

    def dense(self, weight: FrozenWeight) -> Tensor:
        """Written out for the experts that are visited; on a GPU for all, since asking which would wait for it."""
        visited = [n for n, _, _ in self.dispatch.spans] if self.dispatch.ends.device.type == "cpu" else []
        return dense_stack(weight, visited)

    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The output, and what the backward pass needs: gate and up of each pair, what adapters made inside."""
        gate_up = self.dispatch.product(x.index_select(0, self.dispatch.rows), self.dense(self.weights.gate_up).mT)
        if (bias := self.weights.gate_up_bias) is not None:
            gate_up += bias.index_select(0, self.dispatch.experts)
        up_inner = self.lora.add_gate_up(gate_up, x)
        activated = self.activate(gate_up)
        out = self.dispatch.product(activated, self.dense(self.weights.down).mT)
        if (bias := self.weights.down_bias) is not None:
            out += bias.index_select(0, self.dispatch.experts)
        down_inner = self.lora.add_down(out, activated)
        y = self.dispatch.sum_pairs(out, weights)
        self.lora.add_rows(y, weights, down_inner)
        return y, gate_up, [*up_inner, *down_inner]

    def inner(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of each adapter's run, what it made of x, and then what it made of what was activated."""
        return saved

    def backward(
        self, dy: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, saved: Sequence[Tensor], *, need_dx: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of x, if asked, and of the router's weights. But for its bias, an expert is linear in what it
        activates, so the gradient of its weight needs no output of it."""
        dispatch, n, inner = self.dispatch, len(self.lora.runs), self.inner(saved)
        with torch.enable_grad():
            gate_up = gate_up.detach().requires_grad_()
            recorded = self.activate(gate_up)
        activated = recorded.detach()
        dy_pairs = dy.index_select(0, dispatch.rows)
        d_activated = dispatch.product(dy_pairs, self.dense(self.weights.down))
        self.lora.down_backward(dy, activated, weights, inner[n:], d_activated)
        d_weights = dispatch.weigh_gradient(d_activated, activated, weights)
        if (bias := self.weights.down_bias) is not None:
            of_bias = torch.linalg.vecdot(dy_pairs.float(), bias.index_select(0, dispatch.experts).float())
            d_weights = d_weights + of_bias[dispatch.places]
        (d_gate_up,) = torch.autograd.grad(recorded, gate_up, d_activated)
        dx_pairs = dispatch.product(d_gate_up, self.dense(self.weights.gate_up)) if need_dx else None
        dx = None if dx_pairs is None else torch.zeros_like(x)
        self.lora.gate_up_backward(d_gate_up, x, inner[:n], dx, dx_pairs)
        if dx is not None and dx_pairs is not None:
            dx += dispatch.sum_pairs(dx_pairs)
        return dx, d_weights


def _products_on(router: Tensor) -> type[Experts]:
    if kernels.can_run(router.device, router.dtype):
        from palestra.model.mlp.tiled_experts import TiledExperts

        return TiledExperts
    return Experts


def clamped_swiglu(gate_up: Tensor, *, limit: float) -> Tensor:
    """gpt-oss's activation: both sides are clamped, and up counts from 1."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(GATE_SLOPE * gate)


class _GatedSum(Function):
    """y + sigmoid(x gate^T) * shared, by a kernel in half precision on a GPU: a product with so few columns has other
    bits for other rows beside it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(shared, x, gate)
        if kernels.can_run(x.device, x.dtype):
            from palestra.model.kernels.experts import add_gated

            return add_gated(y, shared, x, gate)
        return y + torch.sigmoid(linear(x, gate)) * shared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,), (shared, x, gate) = grads, ctx.saved_tensors
        share = torch.sigmoid(linear(x, gate))
        d_logit = torch.linalg.vecdot(dy, shared)[:, None] * share * (1 - share)
        return dy, dy * share, d_logit * gate, None


class _ExpertsFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, anchor: Tensor, experts: Experts) -> Tensor:
        y, gate_up, inner = experts.forward(x, weights)
        ctx.save_for_backward(x, weights, gate_up, *inner)
        ctx.experts = experts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weights, gate_up, *saved = ctx.saved_tensors
        need_dx = ctx.needs_input_grad[0]
        dx, d_weights = ctx.experts.backward(grads[0].contiguous(), x, weights, gate_up, saved, need_dx=need_dx)
        return dx, d_weights, None, None
