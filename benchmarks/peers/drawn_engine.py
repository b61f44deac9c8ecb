"""An engine that draws the weights of its base model on the device: the folder has a config and a tokenizer alone.

`os.environ | drawn_engine(folder)` is the environment of a server that starts such engines, by the interpreter's
`sitecustomize`: the product has no such switch. So a model of 60 GB is there in seconds, and no disk has to hold it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from palestra.model.loading.spec import ModelSpec
    from palestra.model.loading.weights import DecoderWeights
    from palestra.model.quantised.forms import Form


def drawn_engine(folder: Path) -> dict[str, str]:
    """`folder` gets the file that the interpreter of each worker runs first."""
    folder.mkdir(parents=True, exist_ok=True)
    run = f"runpy.run_path({__file__!r}, run_name='__main__')"
    (folder / "sitecustomize.py").write_text(f"import os, runpy\nif 'PALESTRA_WORKER' in os.environ:\n    {run}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def draw_weights(
    folder: str | Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, form: Form | None = None
) -> DecoderWeights:
    from palestra.model.loading.weights import lay_out
    from palestra.testing.drawn_model import RandomWeights

    config = json.loads((Path(folder) / "config.json").read_bytes())
    return lay_out(RandomWeights(config, device), spec, dtype, device, form)


if __name__ == "__main__":
    from palestra.model.loading import model_folder

    model_folder.read_weights = draw_weights
