"""A group of one rank, and layers that are gathered though one process has all of them, change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.engine.torch_backend import TorchBackend
from palestra.engine.torch_trainer import TorchConfig
from palestra.types import AdamParams, LoraConfig, SampleRequest, SamplingParams
from palestra.types.engine import WorkerConfig
from tests.engine.conftest import Data

DEVICES = [pytest.param("cpu", marks=pytest.mark.distributed), pytest.param("cuda:0", marks=pytest.mark.gpu)]


def train_and_sample(backend: Any) -> tuple[dict[str, bytes], Any]:
    model = backend.create(LoraConfig(rank=4, seed=1))
    for step in range(3):
        for seed in (step, step + 10):
            request = Data.a_pass(20, seed=seed)
            parts, begun = backend.plan(model, request), backend.begin_pass(model)
            for part in parts:
                backend.backward(backend.forward([part], train=True))
            backend.end_pass(model, begun)
        outcome = backend.optim_step({model: AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)})[model]
        assert isinstance(outcome, dict), outcome
    image = {name: np.ascontiguousarray(row).tobytes() for name, row in backend.image(model).tensors.items()}
    params = SamplingParams(max_tokens=8, temperature=0.0, seed=0, stop_token_ids=())
    backend.submit(SampleRequest(prompt=(3, 1, 4), num_samples=1, params=params), backend.freeze(model))
    while not (found := backend.sample_step()).finished:
        assert not found.failed, found.failed
    (sequence,) = found.finished[0][1].sequences
    return image, (sequence.tokens, sequence.logprobs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_of_one_and_gathered_layers_have_the_bits_of_a_plain_worker(
    random_model: Any, tmp_path: Path, device: str
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from palestra.engine.ranks.group_backend import GroupBackend

    kind = device.partition(":")[0]
    model = random_model(dtype="bfloat16" if kind == "cuda" else "float32")
    config = WorkerConfig(
        address=f"ipc://{tmp_path}/link",
        model=str(model),
        state=str(tmp_path / "state"),
        devices=(device,),
        gradient_shards=8,
        micro_batch_tokens=48,
        cache_tokens=1024,
        max_sample_rows=8,
    )
    expected = train_and_sample(TorchBackend(TorchConfig.of(config)))
    group = GroupBackend(config)
    try:
        assert train_and_sample(group) == expected
        gathered = TorchBackend(TorchConfig.of(config), init_device_mesh(kind, (1,)))
        gathered.forward([], train=False)  # as a group does before it samples
        image, (tokens, logprobs) = train_and_sample(gathered)
        assert image == expected[0]
        assert (tokens, logprobs) == expected[1]
    finally:
        group.close()
