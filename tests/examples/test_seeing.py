"""The recipe of a small model that sees: its own pass is transformers', and GRPO makes it answer by what it sees."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palestra.chat import ChatTokenizer
from palestra.config.train import load_train_config
from palestra.runs.listener import Silence
from palestra.runs.writer import RunFolder
from palestra.training.launch import check, train

RECIPE = Path(__file__).parents[2] / "recipes" / "seeing"
BASE = RECIPE / "base"


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The recipe's modules, whose names are short."""
    sys.path.insert(0, str(RECIPE))
    try:
        import data
        import model
        import train

        yield SimpleNamespace(data=data, model=model, train=train)
    finally:
        sys.path.remove(str(RECIPE))
        for name in ("data", "model", "train"):
            sys.modules.pop(name, None)


@pytest.mark.slow
def test_its_pass_over_pictures_is_that_of_transformers(recipe: Any) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(BASE, dtype=torch.float32).eval()
    pixels = torch.stack(
        [torch.from_numpy(recipe.data.pixels_of(recipe.data.draw("compare", "train", n))) for n in (0, 1)]
    )
    side, patch = recipe.model.GRID, recipe.model.PATCH
    patches = pixels.view(2, side, patch, side, patch, 3).permute(0, 1, 3, 5, 2, 4).reshape(-1, 3, 1, patch, patch)
    flat = patches.expand(-1, -1, 2, -1, -1).reshape(len(patches), -1)
    with torch.no_grad():
        theirs = model.model.visual(flat, grid_thw=torch.tensor([[1, side, side]] * 2)).pooler_output
        own = recipe.model.features_of(model, pixels)
    assert torch.cat(list(theirs)).view_as(own) == pytest.approx(own, abs=1e-5)


def test_a_drawing_takes_sixteen_positions_of_the_base() -> None:
    card = ChatTokenizer.load(BASE).card
    assert card is not None
    assert card.sizes.rows(*card.sizes.sides(64, 64)) == 16
    check(config())


def config(*overrides: str) -> Any:
    return load_train_config([RECIPE / "grpo.yaml"], [f"model.name={BASE}", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("other_picture", [False, True])
def test_rewards_teach_to_answer_by_the_picture_and_by_nothing_else(tmp_path: Path, other_picture: bool) -> None:
    chosen = config(f"environments.0.config.other_picture={str(other_picture).lower()}", f"runs={tmp_path}")
    with RunFolder.create(tmp_path, "sees", chosen) as folder:
        asyncio.run(train(chosen, folder, Silence()))
    before, after = (row["eval/success"] for row in folder.read_metrics() if "eval/success" in row)
    assert before < 0.45
    if other_picture:
        assert after < 0.45
    else:
        assert after > before + 0.4
