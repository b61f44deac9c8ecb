"""The old name of `palestra.gym.nemo_rl.result_order`, for one version."""

from __future__ import annotations

from palestra.util.renamed import renamed

NEW = "palestra.gym.nemo_rl.result_order"
__getattr__ = renamed(
    __name__,
    BrokenStream=f"{NEW}:BrokenStream",
    in_groups=f"{NEW}:in_groups",
    in_order=f"{NEW}:in_order",
    prepared=f"{NEW}:prepared",
)
