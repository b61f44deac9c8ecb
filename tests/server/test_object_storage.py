"""Checkpoints on S3: what is listed is whole, an interrupted upload goes on, what is not on this disk is fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load
from tinker import types

from tests.server.conftest import Server
from tests.server.s3_server import BUCKET, S3Server, s3_server
from tests.server.tcp_proxy import TcpProxy
from tests.server.test_faults import batch

MakeServer = Callable[..., Any]
FIRST, SECOND = "first", "second"
"""Folders of the bucket: each belongs to one server's database."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def stored(s3: S3Server, place: str, path: str) -> dict[str, bytes]:
    """The files of a checkpoint in a folder of the bucket, by their names."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    below = f"{place}/{model_id.replace(':', '_')}/{kind}/{name}@"
    return {name.rpartition("/")[2]: content for name, content in s3.objects(below).items()}


def numbers(file: bytes) -> dict[str, np.ndarray]:
    return load(file)


def listed(server: Server) -> list[str]:
    return [c.tinker_path for c in server.rest().list_user_checkpoints().result().checkpoints]


@pytest.mark.slow
def test_an_upload_cut_short_by_kill_9_is_not_there_and_goes_on(make_server: MakeServer, s3: S3Server) -> None:
    """The connection to the storage stops in the middle of a file, and both processes of the server die."""
    with TcpProxy(s3.port, checks=False) as wire:
        server = make_server(f"checkpoints=s3://{BUCKET}/{FIRST}", start=False)
        server.environment |= s3.environment(wire.port)
        server.start()
        client = server.client()
        model = client.create_lora_training_client(base_model=server.name, rank=64, seed=1)
        model.forward_backward(batch(0), "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        wire.hold_after(50_000)
        saving = model.save_state("first")
        server.until(lambda: wire.is_held)
        path = f"tinker://{model.model_id}/weights/first"
        begun = stored(s3, FIRST, path)
        assert "adapter_config.json" in begun
        assert "manifest.json" not in begun
        assert listed(server) == []
        server.kill_both()
        wire.release()
        server.start()
        assert saving.result(timeout=100).path == path
        assert listed(server) == [path]
        files = stored(s3, FIRST, path)
        manifest = json.loads(files.pop("manifest.json"))
        assert manifest["files"].keys() == files.keys()
        again = client.create_training_client_from_state(path)
        before = model.forward(batch(1), "cross_entropy").result(timeout=60).metrics["loss:sum"]
        assert again.forward(batch(1), "cross_entropy").result(timeout=60).metrics["loss:sum"] == before
        assert any(value.any() for value in numbers(files["adapter_model.safetensors"]).values())


@pytest.mark.slow
def test_a_checkpoint_that_left_the_disk_is_loaded_sampled_copied_and_deleted(
    make_server: MakeServer, s3: S3Server
) -> None:
    server = make_server(f"checkpoints=s3://{BUCKET}/{SECOND}", "keep_deleted_s=0", "keep_results_s=1", start=False)
    server.environment |= s3.environment()
    server.start()
    client = server.client()
    model = client.create_lora_training_client(base_model=server.name, rank=4, seed=1)
    model.forward_backward(batch(0), "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = model.save_state("first").result().path
    sampled = model.save_weights_for_sampler("second").result().path
    before = model.forward(batch(1), "cross_entropy").result().metrics["loss:sum"]
    leave_disk(server)
    loaded = client.create_training_client_from_state(path)
    assert loaded.forward(batch(1), "cross_entropy").result(timeout=60).metrics["loss:sum"] == before
    sampler = client.create_sampling_client(model_path=sampled)
    answer = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=4))
    assert len(answer.result(timeout=60).sequences) == 1
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    assert path not in listed(server)
    loaded.forward(batch(1), "cross_entropy").result()
    client.close("success").result()
    server.until(lambda: not stored(s3, SECOND, path))
    assert stored(s3, SECOND, sampled)


def leave_disk(server: Server) -> None:
    for folder in Path(server.checkpoints).glob("*_train_*"):
        shutil.rmtree(folder)
