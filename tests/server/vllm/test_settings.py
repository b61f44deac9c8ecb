"""What can be set, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from palestra.config import ConfigError, load_config
from palestra.config.serve import ServeConfig, worker_config
from palestra.server.core.errors import Refusal
from palestra.server.vllm.runner import refuse_unserved
from palestra.types import LoraConfig
from palestra.types.engine import ModelCard


def load(*overrides: str) -> ServeConfig:
    return load_config(ServeConfig, [], ['models=[{"path": "ephebe"}]', *overrides])


def test_a_model_may_be_sampled_by_vllm(tmp_path: Path):
    config = load("models.0.sampler=vllm", 'models.0.vllm.urls=["http://one:8000/v1/", "http://two:8000"]')
    assert config.models[0].vllm.urls == ["http://one:8000", "http://two:8000"]
    response = msgspec.to_builtins(worker_config(config, config.models[0], "ipc://x", tmp_path))
    assert response["cache_tokens"] == 1  # its memory is for training
    assert not {"sampler", "vllm"} & response.keys()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["models.0.sampler=vllm"], r"needs the addresses of running servers \(vllm.urls\)"),
        (['models.0.vllm.urls=["http://one:1"]'], "but sampler is torch; set sampler=vllm"),
        (["models.0.sampler=vllm", 'models.0.vllm.urls=["one:8000"]'], "write it as http://host:port"),
        (
            ["models.0.sampler=vllm", 'models.0.vllm.urls=["http://one:1"]', "models.0.vllm.python=p"],
            "give either urls",
        ),
        (
            ["models.0.sampler=vllm", "models.0.vllm.python=p", 'models.0.vllm.devices=["0", "1"]'],
            "2 entries for 1 replicas",
        ),
        (["models.0.sampler=vllm", "models.0.vllm.python=p", "models.0.vllm.max_lora_rank=10"], "max_lora_rank"),
    ],
)
def test_settings_that_cannot_be_meant_are_told(overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        load(*overrides)


@pytest.mark.parametrize(
    ("beyond", "lora", "message"),
    [
        (("delta_nets",), LoraConfig(), "delta nets.*which Qwen3_5ForCausalLM has; set train_attn=False"),
        (("experts",), LoraConfig(train_attn=False), "experts in Tinker's layout.*set train_mlp=False"),
    ],
)
def test_what_vllm_cannot_serve_of_a_family_is_refused_when_the_model_is_made(beyond, lora, message):
    card = ModelCard(
        folder="",
        architecture="Qwen3_5ForCausalLM",
        vocab_size=1,
        max_positions=1,
        parameters=1,
        dtype="bfloat16",
        device="cuda",
        lora_beyond_dense=beyond,
    )
    with pytest.raises(Refusal, match=message):
        refuse_unserved(card, lora)
    refuse_unserved(card, LoraConfig(train_attn=False, train_mlp=False, train_unembed=True))
