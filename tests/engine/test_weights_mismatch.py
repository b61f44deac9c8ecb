"""Training goes on only with base weights in the form it began with, unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra.engine.snapshots import StateRefused
from palestra.model import AdapterError
from palestra.types import LoraConfig
from palestra.types.engine import CreateModel
from tests.engine.conftest import Desk

LORA = LoraConfig(rank=2)


@pytest.fixture
def checkpoint(get_backend: Callable[..., Any], tmp_path: Path) -> Path:
    """Of a model trained on weights in int8."""
    backend = get_backend(weights="int8")
    assert backend.card.weights == "int8"
    backend.writer(backend.create(LORA), optimizer=True)(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_checkpoint_goes_on_with_the_weights_it_was_trained_on(get_backend, checkpoint):
    backend = get_backend(weights="int8")
    backend.load(backend.create(LORA), str(checkpoint), optimizer=True)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize(("weights", "name"), [(None, "unquantised"), ("nf4", "nf4")])
def test_checkpoint_of_other_weights_is_refused(get_backend, checkpoint, weights, name, optimizer):
    backend = get_backend(weights=weights)
    model = backend.create(LORA)
    before = model.row("weights").clone()
    with pytest.raises(AdapterError) as found:
        backend.load(model, str(checkpoint), optimizer=optimizer)
    for part in (str(checkpoint), "trained on int8 weights", f"served with {name}", "models.0.weights=int8"):
        assert part in str(found.value)
    assert torch.equal(model.row("weights"), before)


def test_checkpoint_of_other_weights_goes_on_when_told(get_backend, checkpoint):
    backend = get_backend(allow_weights_mismatch=True)
    backend.load(backend.create(LORA), str(checkpoint), optimizer=True)


def test_sampling_from_a_checkpoint_of_other_weights_is_no_training(get_backend, checkpoint):
    get_backend().open_folder(str(checkpoint))


def test_state_folder_of_other_weights_is_refused_and_kept(get_backend, tmp_path):
    desk = Desk(tmp_path / "state", get_backend(weights="int8"))
    desk.train("a", CreateModel(lora=LORA))
    desk.run()
    desk.snapshots.take_all()
    desk.files.close()
    other = Desk(tmp_path / "state", get_backend())
    with pytest.raises(StateRefused, match=r"the model a was trained on int8 weights.*models\.0\.weights=int8"):
        other.snapshots.restore()
    other.files.close()
    told = Desk(tmp_path / "state", get_backend())
    told.snapshots.allow_weights_mismatch = True
    told.snapshots.restore()
    assert list(told.table.models) == ["a"]
    told.files.close()
