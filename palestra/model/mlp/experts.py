"""Mixture of experts of a layer: the router's choice, the experts, and the one that every token visits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from palestra.model import kernels
from palestra.model.block_ops import BlockOps
from palestra.model.loading.layer_spec import GATE_SLOPE, ExpertsSpec
from palestra.model.loading.weights import ExpertsWeights
from palestra.model.lora.layout import SiteName
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mlp.activations import activation
from palestra.model.mlp.dense import DenseMlp
from palestra.model.mlp.plain_experts import Experts
from palestra.model.mlp.routing import Dispatch, Routing, choose_experts


class ExpertsMlp:
    def __init__(self, n: int, spec: ExpertsSpec, weights: ExpertsWeights, ops: BlockOps):
        self.n, self.spec, self.weights = n, spec, weights
        plain = activation(spec.activation, ops)
        self.activate = plain if spec.limit is None else partial(clamped_swiglu, limit=spec.limit)
        self.shared = None if weights.shared is None else DenseMlp(n, weights.shared, plain, kind="shared_")
        self._products = _products_on(weights.router)

    @property
    def unread_sites(self) -> frozenset[SiteName]:
        """Those whose outputs no gradient reads. A gate does read the output of the expert behind it."""
        last = "down" if self.weights.latent_out is None else "latent_out"
        shared = {(self.n, "shared_down")} if self.weights.shared_gate is None else set()
        return frozenset({(self.n, last), *shared})

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
        """Returns the outputs of the chosen experts; some families' work in a width of their own."""
        w, n = self.weights, self.n
        pairs = self._products(w, self.activate, Dispatch.of(numbers, self.spec.n_experts), n, plan)
        if w.latent_in is not None:
            x = lora_linear(x, w.latent_in, None, (n, "latent_in"), plan)
        if plan.anchor is not None and torch.is_grad_enabled():
            y = _ExpertsFunction.apply(x, weights, plan.anchor, pairs)
        else:
            y = pairs.forward(x, weights)[0]
        return y if w.latent_out is None else lora_linear(y, w.latent_out, None, (n, "latent_out"), plan)


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
