"""Chooses the code that attends, by the device: kernels of our own on a GPU in half precision, torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from palestra.model import kernels
from palestra.model.attention.branches import Branches
from palestra.model.attention.kv_cache import KVCache, PagedAttention, ahead_of
from palestra.model.attention.packed import Attention, PackedAttention
from palestra.model.loading.spec import ModelSpec
from palestra.model.sampling.sequences import StepPlan

KERNEL_HEAD_DIM, WIDEST_HEAD_DIM = 256, 512
"""Heads that the kernels' tiles hold; those beyond the first number need the shared memory of Hopper."""
KERNEL_ROW = 576  # the same for compressed rows, which are read once as keys and values


def packed_attention(
    lengths: Sequence[int],
    spec: ModelSpec,
    device: torch.device | str,
    dtype: torch.dtype,
    branches: Branches | None = None,
    ahead: NDArray[np.int64] | None = None,
) -> Attention:
    """Attention within each of several sequences that stand end to end, or trees of sequences that share rows. `ahead`:
    how many rows behind itself each row sees in layers with a window; the kernels know none."""
    if ahead is not None and not ahead.any():
        ahead = None
    if ahead is None and has_kernels(spec, device, dtype):
        from palestra.model.attention.tiled import TiledPackedAttention

        return TiledPackedAttention(lengths, spec, device, branches)
    return PackedAttention(lengths, spec.windows, device, spec.kv_sources, branches, ahead)


def paged_attention(cache: KVCache, plan: StepPlan) -> Attention:
    """Attention for one step of the scheduler's plan."""
    looks_ahead = any(ahead_of(chunk).any() for chunk in plan.prefill if chunk.seq.pictures is not None)
    if not looks_ahead and has_kernels(cache.spec, cache.device, cache.dtype):
        from palestra.model.attention.tiled import TiledPagedAttention

        return TiledPagedAttention.of(cache, plan)
    return PagedAttention(cache, plan)


def has_kernels(spec: ModelSpec, device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether attention runs by our kernels."""
    if not kernels.can_run(device, dtype):
        return False
    widest = max((spec.heads[n].head_dim for n in spec.attention_layers), default=0)
    return widest <= KERNEL_HEAD_DIM or (
        widest <= (KERNEL_ROW if spec.key_tail else WIDEST_HEAD_DIM) and kernels.is_roomy(device)
    )
