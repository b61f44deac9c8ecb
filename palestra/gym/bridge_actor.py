"""The old name of `palestra.gym.nemo_rl.ray_actor`, for one version."""

from __future__ import annotations

from palestra.util.renamed import renamed

NEW = "palestra.gym.nemo_rl.ray_actor"
__getattr__ = renamed(__name__, NemoGym=f"{NEW}:NemoGym", every_row=f"{NEW}:every_row")
