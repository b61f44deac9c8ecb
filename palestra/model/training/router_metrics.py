"""Measures how evenly a router spreads tokens over experts, under the names of Tinker's metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def router_metrics(visits: Sequence[NDArray[np.int64] | None]) -> dict[str, float]:
    """Returns metrics of each datum's visits, [layers with experts, experts]; nothing for models without experts.

    A violation is how far the most (or least) visited expert is from an even share, in such shares.
    """
    found = [v for v in visits if v is not None]
    if not found:
        return {}
    counts = np.sum(found, axis=0)
    even = counts.sum(1) / counts.shape[1]
    most, least = counts.max(1) / even - 1, counts.min(1) / even - 1
    return {
        "e_frac_with_tokens:mean": float((counts > 0).mean()),
        "e_frac_oversubscribed:mean": float((counts > even[:, None]).mean()),
        "e_max_violation:mean": float(most.mean()),
        "e_max_violation:max": float(most.max()),
        "e_min_violation:mean": float(least.mean()),
    }
