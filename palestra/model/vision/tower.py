"""Opens the vision tower of a model's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from palestra.model.loading import gemma_tower_weights, qwen_tower_weights
from palestra.model.loading.gemma_tower_spec import GemmaTowerSpec
from palestra.model.loading.gemma_tower_weights import GemmaTowerReader
from palestra.model.loading.qwen_tower_spec import QwenTowerSpec
from palestra.model.loading.qwen_tower_weights import QwenTowerReader
from palestra.model.loading.tower_files import TowerFiles
from palestra.model.loading.tower_spec import TowerSpec
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.vision.features import Tower
from palestra.model.vision.gemma_tower import GemmaTower
from palestra.model.vision.qwen_tower import QwenTower


def open_tower(folder: Path, spec: TowerSpec, dtype: torch.dtype, device: torch.device) -> Tower | None:
    """None where the files have no tower, as those of a text model that was cut out of one that sees."""
    names = gemma_tower_weights if isinstance(spec, GemmaTowerSpec) else qwen_tower_weights
    with WeightFiles(folder) as opened:
        files = TowerFiles.find(opened, names.PREFIXES, names.FIRST, dtype, device)
        match spec:
            case _ if files is None:
                return None
            case GemmaTowerSpec():
                return GemmaTower(spec, GemmaTowerReader(files, spec).tower())
            case QwenTowerSpec():
                return QwenTower(spec, QwenTowerReader(files, spec).tower())
            case _:
                raise TypeError(f"no tower is known for {type(spec).__name__}")
