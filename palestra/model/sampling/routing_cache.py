"""The experts that cached positions visited, kept in pages as keys and values are.

So whoever finds a prefix in the cache finds its routing, too, and samples of one prompt share it. Owns: these ids.
Never touches: which page belongs to whom, the router.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from palestra.model.attention.kv_cache import write_slots
from palestra.model.loading.spec import ModelSpec
from palestra.model.sampling.sequences import StepPlan
from palestra.model.transfers import to_device
from palestra.types import RoutedExperts
from palestra.types.training import routed_bytes


class RoutingCache:
    """[positions, layers with experts, experts per token]."""

    def __init__(self, spec: ModelSpec, n_pages: int, page_size: int, device: torch.device):
        experts = list(spec.experts.values())
        dtype = torch.uint8 if routed_bytes(experts[0].n_experts) == 1 else torch.int16
        shape = (n_pages, page_size, len(experts), experts[0].per_token)
        self._pages = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size

    def write(self, plan: StepPlan, ids: Tensor) -> None:
        """`ids`: of the plan's rows, [rows, layers with experts, experts per token]."""
        slots = to_device(write_slots(plan, self.page_size), ids.device)
        self._pages.flatten(0, 1).index_copy_(0, slots, ids.to(self._pages.dtype))

    def copy(self, copies: Seq[tuple[int, int]]) -> None:
        if copies:
            source, target = (to_device(np.array(side), self._pages.device) for side in zip(*copies, strict=True))
            self._pages.index_copy_(0, target, self._pages.index_select(0, source))

    def read(self, pages: Seq[int], n: int) -> Tensor:
        """Ids of the first `n` positions of these pages, still on the device."""
        held = to_device(np.array(pages[: -(-n // self.page_size)], np.int64), self._pages.device)
        return self._pages.index_select(0, held).flatten(0, 1)[:n]


def routed_experts(ids: Tensor) -> RoutedExperts:
    positions, layers, per_token = ids.shape
    return RoutedExperts(data=ids.cpu().numpy().tobytes(), shape=(positions, layers, per_token))
