"""The old name of `palestra.gym.nemo_rl`, for one version."""

from __future__ import annotations

from palestra.util.renamed import renamed

__getattr__ = renamed(__name__, GymBridge="palestra.gym.nemo_rl:NemoRlGym")
