"""Clients from before protobuf: the JSON bodies of SDK 0.24, and old SDKs as they are, from their own wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

    from tests.server.conftest import Server

TOKENS = list(range(10, 22))
N = len(TOKENS) - 1
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [N]},
        "weights": {"data": [1.0] * N, "dtype": "float32", "shape": [N]},
    },
}
INPUT = {"data": [DATUM], "loss_fn": "cross_entropy"}


class OldClient:
    """What SDK 0.24 puts on the wire, by hand."""

    def __init__(self, http: httpx.Client, name: str):
        self.http = http
        session = self.post("create_session", tags=[], sdk_version="0.24.0", type="create_session")["session_id"]
        lora = {"rank": 4, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
        created = self.wait(
            "create_model", session_id=session, model_seq_id=0, base_model=name, lora_config=lora, type="create_model"
        )
        self.session, self.model, self.seq = session, created["model_id"], 0

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(f"/api/v1/{route}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait(self, route: str, **body: Any) -> dict[str, Any]:
        request_id = self.post(route, **body)["request_id"]
        return self.post("retrieve_future", request_id=request_id)

    def train(self, route: str, **body: Any) -> dict[str, Any]:
        self.seq += 1
        return self.wait(route, model_id=self.model, seq_id=self.seq, **body)


@pytest.fixture
def old(server: Server) -> OldClient:
    return OldClient(server.http(), server.name)


def test_a_json_client_trains_saves_and_loads(old: OldClient) -> None:
    before = old.train("forward", forward_input=INPUT, type="forward")
    trained = old.train("forward_backward", forward_backward_input=INPUT, type="forward_backward")
    adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
    old.train("optim_step", adam_params=adam, type="optim_step")
    after = old.train("forward", forward_input=INPUT, type="forward")
    path = old.train("save_weights", path="ck", type="save_weights")["path"]
    old.train("optim_step", adam_params=adam | {"weight_decay": 1.0}, type="optim_step")
    old.train("load_weights", path=path, optimizer=True, type="load_weights")
    loaded = old.train("forward", forward_input=INPUT, type="forward")

    assert trained["metrics"]["loss:sum"] == before["metrics"]["loss:sum"]
    assert after["metrics"]["loss:sum"] < before["metrics"]["loss:sum"]
    assert loaded["loss_fn_outputs"] == after["loss_fn_outputs"]
    (output,) = loaded["loss_fn_outputs"]
    assert output["logprobs"]["shape"] == [N]
    assert sum(output["logprobs"]["data"]) == pytest.approx(-loaded["metrics"]["loss:sum"], rel=1e-5)


def test_a_json_client_may_say_minus_100_at_weight_0(old: OldClient) -> None:
    def loss_with(first: int, weight: float) -> dict[str, Any]:
        inputs = {
            "target_tokens": {"data": [first, *TOKENS[2:]], "dtype": "int64", "shape": [N]},
            "weights": {"data": [weight, *[1.0] * (N - 1)], "dtype": "float32", "shape": [N]},
        }
        data = {"data": [{**DATUM, "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
        return old.train("forward_backward", forward_backward_input=data, type="forward_backward")

    assert loss_with(-100, 0.0)["metrics"] == loss_with(TOKENS[1], 0.0)["metrics"]
    refused = loss_with(-100, 1.0)
    assert refused["category"] == "user"
    assert "target_tokens[0] is -100" in refused["error"]


@pytest.mark.parametrize("route", ["sample", "asample"])
def test_a_json_client_samples(old: OldClient, server: Server, route: str) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    params = {"max_tokens": 3, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    session = old.post(
        "create_sampling_session", session_id=old.session, sampling_session_seq_id=0, base_model=server.name
    )
    result = old.wait(
        route,
        sampling_session_id=session["sampling_session_id"],
        seq_id=0,
        prompt=prompt,
        num_samples=2,
        sampling_params=params,
        prompt_logprobs=True,
        type="sample",
    )
    assert [len(s["tokens"]) for s in result["sequences"]] == [3, 3]
    assert [len(s["logprobs"]) for s in result["sequences"]] == [3, 3]
    assert len(result["prompt_logprobs"]) == len(TOKENS)
    assert result["prompt_logprobs"][0] is None


def test_a_json_client_unloads_its_model(old: OldClient) -> None:
    old.wait("unload_model", model_id=old.model, type="unload_model")
    gone = old.http.post("/api/v1/get_info", json={"model_id": old.model, "type": "get_info"})
    assert 400 <= gone.status_code < 500


SCRIPT = """
import json, sys
import tinker
from tinker import types

url, version = sys.argv[1:]
assert tinker.__version__ == version, tinker.__version__
tokens = list(range(10, 22))
weights = types.TensorData(data=[1.0] * 11, dtype="float32", shape=[11])
targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[11])
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": targets, "weights": weights},
)
service = tinker.ServiceClient(base_url=url, api_key="tml-test")
client = service.create_lora_training_client("Qwen/Qwen3-8B", rank=4, seed=1)
assert client.get_info().lora_rank == 4
first = client.forward([datum], "cross_entropy").result()
passes = client.forward_backward([datum] * 3, "cross_entropy")
step = client.optim_step(types.AdamParams(learning_rate=0.01))
passes.result(), step.result()
second = client.forward([datum], "cross_entropy").result()
assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
custom = client.forward_backward_custom([datum], lambda data, lps: (-lps[0].sum(), {"mine": 1.0})).result()
assert custom.metrics["mine"] == 1.0

sampler = client.save_weights_and_get_sampling_client()
prompt, params = types.ModelInput.from_ints(tokens), types.SamplingParams(max_tokens=4, seed=1)
sampled = sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
assert [len(s.tokens) for s in sampled.sequences] == [4, 4]
assert len(sampled.topk_prompt_logprobs[1]) == 2
scored = sampler.compute_logprobs(prompt).result()
assert abs(sum(scored[1:]) + second.metrics["loss:sum"]) < 1e-3

path = client.save_state("old").result().path
again = service.create_training_client_from_state_with_optimizer(path)
assert again.forward([datum], "cross_entropy").result().metrics == second.metrics
client.load_state(path).result()
saved = service.create_sampling_client(model_path=client.save_weights_for_sampler("s").result().path)
assert saved.sample(prompt, 1, params).result().sequences[0].tokens == sampled.sequences[0].tokens
print(json.dumps("all of it"))
"""


@pytest.mark.e2e
@pytest.mark.parametrize("version", ["0.24.0", "0.25.0"])
def test_an_old_sdk_works_as_it_is(server: Server, tmp_path: Path, version: str) -> None:
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "0", "--timeout", "10", "-q"]
    fetched = subprocess.run(
        [*fetch, "--dest", str(tmp_path), f"tinker=={version}"], capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        pytest.skip(f"tinker {version} cannot be fetched from the package index: {fetched.stderr.strip()[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "sdk")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url, version],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "sdk")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "all of it"
