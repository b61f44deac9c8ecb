"""What the decoder gets of a micro-batch: its rows, and how they see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.attention.backends import packed_attention
from palestra.model.attention.packed import Attention
from palestra.model.decoder import Decoder
from palestra.model.loading.context_parallel import divide_heads
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.linear import LoraPlan
from palestra.model.mixers.context import ContextAttention, ContextRecurrence
from palestra.model.mixers.inputs import Recurrence
from palestra.model.mixers.packed_recurrence import packed_recurrence
from palestra.model.mlp.routing import Routing
from palestra.model.training.prefix_trees import PrefixTrees
from palestra.model.training.prepared import Prepared
from palestra.model.transfers import to_device
from palestra.model.vision.placed import BatchPictures, PictureRows, sequence_positions

if TYPE_CHECKING:
    from palestra.model.context_group import ContextRows


@dataclass(frozen=True, slots=True)
class BatchInputs:
    tokens: Tensor
    positions: Tensor
    attend: Attention
    plan: LoraPlan
    recur: Recurrence | None
    routing: Routing | None
    pictures: PictureRows | None

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        batch: Sequence[Prepared],
        trees: PrefixTrees,
        *,
        train: bool,
        divided: ContextRows | None,
    ) -> BatchInputs:
        """`divided`: other processes compute the other rows."""
        device, spec, dtype = decoder.device, decoder.spec, decoder.dtype
        own = slice(0, trees.rows) if divided is None else divided.own
        tokens = to_device(trees.of_rows([d.tokens for d in batch])[own], device)
        positions, pictures = _positions(decoder, batch, trees)
        ahead = None
        if pictures is not None:
            assert divided is None, "several ranks read text only"
            tokens, ahead = tokens.clamp_min(0), trees.of_rows([_ahead(d) for d in batch])
        # Layers that lie across ranks are gathered in their backward pass too, where the others may train them.
        is_gathered, branches = decoder.sharded is not None, trees.branches()
        plan = LoraPlan.of(tree_runs(batch, trees), train=train, through_layers=is_gathered, device=device)
        heads = spec if divided is None else divide_heads(spec, divided.group.ranks)
        attend = packed_attention(trees.lengths, heads, device, dtype, branches, ahead)
        recur = packed_recurrence(trees.lengths, heads, device, dtype, branches)
        if divided is not None:
            plan, attend = plan.part(own.start, own.stop, device), ContextAttention(attend, divided)
            recur = None if recur is None else ContextRecurrence(recur, divided, spec.recurrences)
        routing = Routing(_replayed(decoder, batch, trees, own)) if spec.experts else None
        return cls(tokens, to_device(positions[own], device), attend, plan, recur, routing, pictures)


def tree_runs(batch: Sequence[Prepared], trees: PrefixTrees) -> list[tuple[Adapter | None, int]]:
    """The adapters of the rows."""
    return [(batch[i].adapter, n) for i, n in zip(trees.owners, trees.lengths, strict=True)]


def _positions(
    decoder: Decoder, batch: Sequence[Prepared], trees: PrefixTrees
) -> tuple[NDArray[np.int64], PictureRows | None]:
    """Rope positions of the rows, and what pictures are to them."""
    vision = decoder.vision
    if vision is None or all(d.pictures is None for d in batch):
        return trees.of_rows([np.arange(len(d.tokens)) for d in batch]), None
    positions = [sequence_positions(d.pictures, 0, len(d.tokens)) for d in batch]
    found = BatchPictures()
    index = trees.of_rows([found.index(d.pictures, 0, len(d.tokens)) for d in batch])
    return trees.of_rows(positions), found.rows(index, vision, decoder.device)


def _replayed(decoder: Decoder, batch: Sequence[Prepared], trees: PrefixTrees, own: slice) -> dict[int, Tensor] | None:
    """The experts that own rows have to visit, by layer; None if the router chooses all."""
    found = next((d.routing for d in batch if d.routing is not None), None)
    if found is None:
        return None
    parts = [np.full((len(d.tokens), *found.shape[1:]), -1) if d.routing is None else d.routing for d in batch]
    layers = to_device(trees.of_rows(parts)[own], decoder.device).unbind(1)
    return dict(zip(decoder.spec.experts, layers, strict=True))


def _ahead(datum: Prepared) -> NDArray[np.int64]:
    """How many rows behind itself each row sees, in layers with a window."""
    n = len(datum.tokens)
    return np.zeros(n, np.int64) if datum.pictures is None else datum.pictures.ahead(0, n)
