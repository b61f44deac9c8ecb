"""The SDK's RestClient and AdminClient against a real server: every method, on checkpoints an engine wrote."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import tinker
from safetensors.numpy import load
from tinker import types

from tests.server.conftest import created

BASE = "Qwen/Qwen3-8B"


@dataclass(frozen=True)
class Trained:
    run_id: str
    session_id: str
    weights: str
    sampler: str
    external: str


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[tinker.ServiceClient]:
    client = server.client(user_metadata={"who": "rest-tests"}, project_id="rest-project")
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def trained(client: tinker.ServiceClient) -> Trained:
    """A run with one step and a checkpoint of each kind."""
    training = client.create_lora_training_client(
        BASE, rank=4, seed=1, train_unembed=False, user_metadata={"renderer_name": "qwen3"}
    )
    target = types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": target})
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    weights = training.save_state("first", user_metadata={"step": "1"}).result().path
    sampler = training.save_weights_for_sampler("first", ttl_seconds=7200).result().path
    external = training.save_weights_external("export").result().path
    run_id = training.model_id
    return Trained(run_id, run_id.partition(":")[0], weights, sampler, external)


@pytest.fixture(scope="module")
def rest(server: Any) -> tinker.RestClient:
    return server.rest()


def test_training_runs(rest, trained):
    run = rest.get_training_run(trained.run_id).result()
    assert (run.base_model, run.is_lora, run.lora_rank, run.corrupted) == (BASE, True, 4, False)
    assert run.user_metadata == {"renderer_name": "qwen3"}
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == trained.weights
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == trained.sampler
    assert abs(datetime.now(UTC) - run.last_request_time) < timedelta(minutes=5)
    assert rest.get_training_run_by_tinker_path(trained.weights).result() == run
    page = rest.list_training_runs(limit=1, project_id="rest-project").result()
    assert [r.training_run_id for r in page.training_runs] == [trained.run_id]
    assert page.cursor.total_count == 1
    assert trained.run_id in {r.training_run_id for r in rest.list_training_runs(limit=1000).result().training_runs}


def test_checkpoints(rest, trained):
    found = {c.tinker_path: c for c in rest.list_checkpoints(trained.run_id).result().checkpoints}
    assert set(found) >= {trained.weights, trained.sampler, trained.external}
    weights, sampler = found[trained.weights], found[trained.sampler]
    assert (weights.checkpoint_id, weights.checkpoint_type) == ("weights/first", "training")
    assert (weights.user_metadata, weights.public, weights.expires_at) == ({"step": "1"}, False, None)
    assert (weights.size_bytes or 0) > (found[trained.external].size_bytes or 0) > 0
    assert sampler.expires_at is not None
    assert timedelta(hours=1) < sampler.expires_at - datetime.now(UTC) <= timedelta(hours=2)
    everywhere = rest.list_user_checkpoints(limit=1000).result()
    assert {c.tinker_path for c in everywhere.checkpoints} >= set(found)
    assert everywhere.cursor is not None
    assert everywhere.cursor.total_count >= len(found)


def test_weights_info_keeps_the_flags(rest, trained):
    info = rest.get_weights_info_by_tinker_path(trained.weights).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (BASE, True, 4)
    assert (info.train_unembed, info.train_mlp, info.train_attn) == (False, True, True)


def test_publish_and_ttl(rest, trained):
    def now() -> types.Checkpoint:
        return {c.tinker_path: c for c in rest.list_checkpoints(trained.run_id).result().checkpoints}[trained.external]

    rest.publish_checkpoint_from_tinker_path(trained.external).result()
    assert now().public
    rest.unpublish_checkpoint_from_tinker_path(trained.external).result()
    assert not now().public
    rest.set_checkpoint_ttl_from_tinker_path(trained.external, 7200).result()
    assert now().expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(trained.external, None).result()
    assert now().expires_at is None


def test_external_weights_are_a_peft_folder(rest, trained):
    answer = rest.get_external_weights_urls(trained.external).result()
    assert timedelta(minutes=50) < answer.expires - datetime.now(UTC) <= timedelta(hours=1)
    files = {name: urllib.request.urlopen(url).read() for name, url in answer.urls.items()}
    config = json.loads(files["adapter_config.json"])
    assert config["r"] == 4
    assert config["lora_alpha"] > 0
    assert len(load(files["adapter_model.safetensors"])) > 0
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(answer.urls["adapter_config.json"][:-4] + "0000")


def test_a_copy_can_be_loaded_and_sampled(rest, client, trained):
    weights = rest.copy_weights(trained.weights, "archive", ttl_seconds=7200).result()
    restored = client.create_training_client_from_state_with_optimizer(weights)
    assert restored.get_info().lora_rank == 4
    sampler = client.create_sampling_client(model_path=rest.copy_weights(trained.sampler, "archive").result())
    params = types.SamplingParams(max_tokens=2, temperature=0.0)
    done = sampler.sample(types.ModelInput.from_ints([1, 2]), num_samples=1, sampling_params=params).result()
    assert len(done.sequences[0].tokens) == 2
    run = rest.get_training_run_by_tinker_path(weights).result()
    assert run.user_metadata == {"renderer_name": "qwen3"}
    with pytest.raises(tinker.NotFoundError):
        rest.copy_weights(trained.weights + "x", "archive").result()


def test_delete(rest, client, trained):
    copy = rest.copy_weights(trained.weights, "archive").result()
    rest.delete_checkpoint_from_tinker_path(copy).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(copy).result()
    with pytest.raises(tinker.NotFoundError):
        created(client.create_training_client_from_state(copy))
    with pytest.raises(tinker.BadRequestError):
        rest.delete_checkpoint(trained.run_id, "models/x").result()


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_sessions(rest, trained):
    assert trained.session_id in rest.list_sessions(limit=1000).result().sessions
    session = rest.get_session(trained.session_id).result()
    assert trained.run_id in session.training_run_ids
    assert session.user_metadata == {"who": "rest-tests"}
    rest.assign_session_project(trained.session_id, "other-project").result()
    request = types.SessionSearchRequest(project_ids=["other-project"], user_metadata={"who": "rest-tests"})
    (found,) = rest.search_sessions(request).result().sessions
    assert (found.session_id, found.project_id) == (trained.session_id, "other-project")
    assert found.status is not None
    assert found.status.type == "active"
    assert found.checkpoints_count >= 3
    rest.assign_session_project(trained.session_id, "rest-project").result()
    with pytest.raises(Exception, match="this server stores no traces"):
        rest.export_session_trace(trained.session_id).result()
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("nobody").result()


def test_the_async_methods_answer_too(rest, trained):
    async def ask() -> None:
        run = await rest.get_training_run_async(trained.run_id)
        assert run.training_run_id == trained.run_id
        assert (await rest.list_checkpoints_async(trained.run_id)).checkpoints
        assert (await rest.list_user_checkpoints_async()).checkpoints
        assert (await rest.get_external_weights_urls_async(trained.external)).urls

    asyncio.run(ask())


def test_admin_methods_find_nothing_to_bill(server):
    admin = tinker.AdminClient(base_url=server.url, api_key=server.key)
    assert admin.get_audit_log().result().entries == []
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=1)
    assert admin.get_billing_usage(start, start + timedelta(hours=1)).result().data == []
    assert admin.get_current_checkpoint_storage_usage().result().data == []


def test_no_signed_url_is_in_the_log(server, rest, trained):
    url = next(iter(rest.get_external_weights_urls(trained.external).result().urls.values()))
    urllib.request.urlopen(url).read()
    signature = url.partition("signature=")[2]
    assert len(signature) == 64
    assert signature not in server.log.read_text()
