"""`optimizer.lr: auto`: a rate by the kind of run and the model's size, chosen once and saved as a number."""

from __future__ import annotations

import asyncio
import json

import pytest

from palestra.config.train import GrpoConfig, load_train_config
from palestra.endpoints.model_folders import SetupError
from palestra.runs.listener import Silence
from palestra.runs.writer import RunFolder
from palestra.training.auto_lr import ModelShape, RateKind, auto_rate, served_shape, with_learning_rates
from palestra.training.launch import train
from palestra.training.loops.lr_schedule import learning_rate
from tests.training.trainers import FEW, SMALL, merged

NOWHERE = "http://127.0.0.1:1"
GRPO = {"environments": [{"name": "arithmetic"}]}


class Notes(Silence):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("kind", "shape", "rate"),
    [
        (RateKind.SFT, ModelShape(4096, "LlamaForCausalLM"), 2.9e-4),  # as published for Llama-3.1-8B
        (RateKind.SFT, ModelShape(4096, "Qwen3ForCausalLM"), 4.7e-4),
        (RateKind.SFT, ModelShape(7168, "DeepseekV3ForCausalLM"), 3.5e-4),
        (RateKind.RL, ModelShape(4096, "Qwen3ForCausalLM"), 4.7e-5),
        (RateKind.RL, ModelShape(2560, "qwen3"), 4.9e-5),
        (RateKind.DPO, ModelShape(4096, "Qwen3ForCausalLM"), 9.5e-6),
        (RateKind.RL, ModelShape(256, "Qwen3ForCausalLM"), 1e-3),
        (RateKind.SFT, ModelShape(64, "LlamaForCausalLM"), 2e-3),
    ],
)
def test_the_rate_follows_from_kind_family_and_hidden_size(kind, shape, rate):
    assert auto_rate(kind, shape) == pytest.approx(rate, rel=1e-9)


def test_a_server_tells_the_size_of_its_models(ephebe_url):
    assert asyncio.run(served_shape(ephebe_url, "ephebe")) == ModelShape(256, "Qwen3ForCausalLM")
    assert asyncio.run(served_shape(ephebe_url, "no-such-model")) is None
    assert asyncio.run(served_shape(NOWHERE, "ephebe")) is None


def test_a_run_says_its_rate_and_saves_it_as_a_number(ephebe_url, tmp_path):
    saved = merged(SMALL, {**GRPO, "server": ephebe_url, "steps": 1, "rollout": FEW, "optimizer": {"lr": "auto"}})
    config, notes = load_train_config([], [], saved), Notes()
    with RunFolder.create(tmp_path, "auto", config) as run:
        asyncio.run(train(config, run, notes))
    assert "learning rate 0.001 (auto: RL, hidden size 256, Qwen3ForCausalLM)" in notes.said
    assert run.read_about()["config"]["optimizer"]["lr"] == 1e-3
    assert run.read_metrics()[-1]["optim/lr"] == 1e-3
    again = load_train_config([], [], run.read_about()["config"])
    assert again.optimizer.lr == 1e-3


def test_files_tell_the_size_where_the_server_does_not(tmp_path):
    shape = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": 2560}}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = {"name": "org/absent", "tokenizer": str(tmp_path)}
    imitation = {"data": ["x.jsonl"], "optimizer": {"warmup_steps": 3}}
    config, notes = load_train_config([], [], {**GRPO, "model": model, "imitation": imitation}), Notes()
    assert isinstance(config, GrpoConfig)
    found = asyncio.run(with_learning_rates(config, NOWHERE, notes))
    assert found.imitation is not None
    assert (found.optimizer.lr, found.imitation.optimizer.lr) == (4.7e-5, 4.7e-4)
    assert found.imitation.optimizer.warmup_steps == 3
    assert [note.partition(" (")[0] for note in notes.said] == [
        "learning rate 4.7e-05",
        "learning rate of the imitation 0.00047",
    ]
    assert asyncio.run(with_learning_rates(found, NOWHERE, Notes())) is found  # numbers stay


def test_where_nobody_tells_the_size_a_number_is_asked_for(tmp_path):
    config = load_train_config([], [], {**GRPO, "model": {"name": "org/absent", "tokenizer": str(tmp_path)}})
    with pytest.raises(
        SetupError, match=r"the hidden size of org/absent, and http://127.* give a number: optimizer.lr="
    ):
        asyncio.run(with_learning_rates(config, NOWHERE, Silence()))
    with pytest.raises(ValueError, match="still auto"):
        learning_rate(config.optimizer, 0, 1)
