"""A worker that cannot start says why, in words for whoever typed the model's name."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from palestra.engine.__main__ import CANNOT_START, main


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """What a worker in this process says on stderr."""
    handlers = logging.root.handlers[:]

    def started(model: Path, **settings: object) -> str:
        config = {"address": "ipc:///nowhere", "model": str(model), "state": str(tmp_path / "state"), **settings}
        monkeypatch.setenv("PALESTRA_WORKER", json.dumps(config))
        assert main() == CANNOT_START
        return capsys.readouterr().err

    yield started
    logging.root.handlers[:] = handlers


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", b"{nope", "config.json: not valid JSON"),
        ("config.json", b'{"architectures": ["Falcon9ForCausalLM"]}', "names 'Falcon9ForCausalLM'; supported: "),
        ("model.safetensors", None, "no model.safetensors and no model.safetensors.index.json"),
        ("model.safetensors", b"half", "model.safetensors: not a complete safetensors file"),
    ],
)
def test_a_broken_model_folder_is_one_line_with_the_file_in_it(start, micro_model, tmp_path, file, content, reason):
    folder = shutil.copytree(micro_model, tmp_path / "broken")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    said = start(folder)
    assert said.startswith(f"error: {folder}")
    assert reason in said
    assert said.count("\n") == 1
    assert "level=" not in said


def test_a_model_that_does_not_fit_into_memory_says_so(start, micro_model):
    said = start(micro_model, cache_tokens=10**12)
    assert said.startswith("error: there is not enough memory for the model on its device")
    assert "use a smaller model" in said


def test_a_device_that_is_not_there_is_named(start, micro_model):
    assert start(micro_model, device="gpu7").startswith("error: device 'gpu7' cannot be used here")


def test_without_torch_it_says_what_to_install(start, micro_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "palestra.engine.torch_backend", raising=False)
    assert start(micro_model) == "error: the engine needs torch; to install it: pip install 'palestra[engine]'\n"


def test_weights_in_an_unknown_form_name_those_there_are(start, micro_model):
    assert start(micro_model, weights="int3").startswith("error: weights 'int3' are not known; there are: bf16, fp8")
