"""A base model that lies across several processes: each holds its rows of every linear layer, and a layer's are
gathered before it computes (FSDP2). What is gathered is the weight as it was, so every product has the bits it has on
one device.

Embeddings, norms and biases are whole everywhere, and adapters are not the base model's. All processes run the same
layers in the same order, since each waits for the others' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from palestra.model.decoder import Decoder
from palestra.model.loading.row_share import HeldRows, RowShare
from palestra.model.lora.linear import LoraPlan
from palestra.model.mixers.inputs import MixerInputs
from palestra.model.quantised.packed import as_laid_out, as_stack


def shard_layers(decoder: Decoder, share: RowShare, mesh: DeviceMesh) -> None:
    """Takes over the rows that were read of each layer; from now on the decoder gathers them."""
    stack = ShardedStack(decoder, share, mesh)
    stack.take_over(decoder.device)
    decoder.sharded = ShardedRun(stack)


class LayerContext:
    """What layers need beside the residual stream. Not a dataclass: FSDP looks for gradients in those, and follows an
    adapter to its snapshots and back for ever."""

    def __init__(self, inputs: MixerInputs, plan: LoraPlan):
        self.inputs, self.plan = inputs, plan


class ShardedRun:
    """Runs all layers, as `Decoder.run_layers` does."""

    def __init__(self, stack: ShardedStack):
        self.stack = stack

    def __call__(self, hidden: Tensor, inputs: MixerInputs, plan: LoraPlan, *, checkpointing: bool) -> Any:
        return self.stack(hidden, LayerContext(inputs, plan), checkpointing=checkpointing)


@dataclass(frozen=True, slots=True)
class ShareInUse:
    holder: Any
    """The record of a layer's weights that has it."""
    name: str
    rows: HeldRows


class ShardedStack(nn.Module):
    """All layers: FSDP gathers the next while one computes."""

    def __init__(self, decoder: Decoder, share: RowShare, mesh: DeviceMesh):
        super().__init__()
        self._run = decoder.run_layers
        runs = [decoder.layer(n) for n in range(decoder.spec.n_layers)]
        pairs = zip(runs, decoder.weights.layers, strict=True)
        self.layers = nn.ModuleList(ShardedLayer(run, list(_shares(weights, share))) for run, weights in pairs)
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(self, mesh=mesh)

    def take_over(self, device: torch.device) -> None:
        for layer in self._sharded_layers:  # by turns: a second copy of all would not fit
            layer.to_empty(device=device)
            layer.take_over()

    def forward(self, hidden: Tensor, context: LayerContext, *, checkpointing: bool) -> Any:
        calls: list[Callable[..., Any]] = list(self._sharded_layers)
        if not torch.is_grad_enabled():
            calls = [layer.run_alone for layer in self._sharded_layers]
        layers = [partial(_call, call, context) for call in calls]
        return self._run(layers, hidden, context.inputs, context.plan, checkpointing=checkpointing)

    @property
    def _sharded_layers(self) -> Sequence[ShardedLayer]:
        return list(self.layers)  # type: ignore[arg-type]


class ShardedLayer(nn.Module):
    def __init__(self, run: Callable[..., Any], shares: list[ShareInUse]):
        super().__init__()
        self._run, self._shares = run, shares
        for number, share in enumerate(shares):
            rows, held = share.rows, share.rows.held
            shape = (rows.whole_rows,) if rows.stack is None else (rows.stack, rows.whole_rows // rows.stack)
            whole = torch.empty(*shape, held.shape[1], dtype=held.dtype, device="meta")
            self.register_parameter(f"weight{number}", nn.Parameter(whole, requires_grad=False))

    def take_over(self) -> None:
        with torch.no_grad():
            for number, share in enumerate(self._shares):
                rows, local = share.rows, self.get_parameter(f"weight{number}").to_local()  # type: ignore[operator]
                if rows.stack is not None and len(local):
                    as_stack(rows.held, len(local))  # lays it out, in place
                local.copy_(rows.held.view(local.shape))
                rows.held = torch.empty(0)
                setattr(share.holder, share.name, None)

    def forward(self, hidden: Tensor, update: Tensor | None, context: LayerContext) -> Any:
        """FSDP gathers before it, and again before its backward pass, into the same memory."""
        for number, share in enumerate(self._shares):
            whole = self.get_parameter(f"weight{number}")
            setattr(share.holder, share.name, whole if share.rows.stack is None else as_laid_out(whole))
        return self._run(hidden, update, context.inputs, context.plan)

    def run_alone(self, hidden: Tensor, update: Tensor | None, context: LayerContext) -> Any:
        """Runs without a backward pass to come, for which FSDP would keep notes."""
        assert isinstance(self, FSDPModule)
        self.unshard()
        try:
            return ShardedLayer.forward(self, hidden, update, context)
        finally:
            self.reshard()


def _call(
    layer: Callable[..., Any],
    context: LayerContext,
    hidden: Tensor,
    update: Tensor | None,
    inputs: MixerInputs,
    plan: LoraPlan,
) -> Any:
    """A layer as `run_layers` calls it; inputs and plan are those of the context."""
    return layer(hidden, update, context)


def _shares(weights: Any, share: RowShare) -> Iterator[ShareInUse]:
    """Every share of a linear layer's weight."""
    for field in fields(weights):
        value = getattr(weights, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _shares(value, share)
        elif (rows := share.find(value)) is not None:
            yield ShareInUse(weights, field.name, rows)
