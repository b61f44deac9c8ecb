"""The official SDK over a real socket: sessions, training, checkpoints. Sampling is in test_sdk_sampling.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.lib.internal_client_holder import InternalClientHolder

from tests.server.conftest import Server, created

VOCAB = 500  # the special tokens behind it are left alone
STEP = types.AdamParams(learning_rate=0.01)
rng = np.random.default_rng(0)


def tokens_of(n: int) -> list[int]:
    return rng.integers(0, VOCAB, n).tolist()


def datum(n: int = 8, *, tokens: list[int] | None = None, **inputs: Any) -> types.Datum:
    """The next tokens as targets; cross-entropy weights unless other inputs are given."""
    tokens = tokens or tokens_of(n + 1)
    targets = inputs.pop("target_tokens", np.array(tokens[1:]))
    inputs = inputs or {"weights": np.ones(len(tokens) - 1)}
    floats = {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}
    tensors = {"target_tokens": targets, **floats}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            name: value if isinstance(value, types.TensorData) else types.TensorData.from_numpy(value)
            for name, value in tensors.items()
        },
    )


def logprobs(client: tinker.TrainingClient, *data: types.Datum) -> list[np.ndarray]:
    result = client.forward(list(data), "cross_entropy").result()
    return [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]


def step(client: tinker.TrainingClient, *data: types.Datum, adam: types.AdamParams = STEP) -> None:
    passed, stepped = client.forward_backward(list(data), "cross_entropy"), client.optim_step(adam)
    passed.result(), stepped.result()


DATUM = datum(12)


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with server.client(user_metadata={"who": "test_sdk"}, display_name="test_sdk") as client:
        yield client


@pytest.fixture
def create(service: tinker.ServiceClient, server: Server) -> Callable[..., tinker.TrainingClient]:
    def make(seed: int = 1, rank: int = 4, **options: Any) -> tinker.TrainingClient:
        return service.create_lora_training_client(server.name, rank=rank, seed=seed, **options)

    return make


@pytest.fixture(scope="module")
def reference(server: Server) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()


def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of every token but the first."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


# Service


def test_the_ready_line_names_device_and_dtype(server):
    (ready,) = (line for line in server.said().splitlines() if line.startswith("Palestra is ready at "))
    assert ready.endswith(f"serving {server.name} (cpu, float32)")


def test_get_server_capabilities(service, server):
    (model,) = service.get_server_capabilities().supported_models
    assert model.model_name == server.name
    assert model.max_context_length == 4096


def test_get_info_and_get_tokenizer(create, server):
    client = create(user_metadata={"a": "b"})
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (server.name, 4, True)
    assert info.model_id == client.model_id
    tokenizer = client.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a small school")) == "a small school"


def test_a_session_is_finished_by_its_with_block(server):
    with server.client(display_name="short") as service:
        client = service.create_lora_training_client(server.name, rank=2)
        session = client.model_id.partition(":")[0]
    beat = server.http().post("/api/v1/session_heartbeat", json={"session_id": session})
    assert beat.status_code == 410
    with pytest.raises(tinker.APIStatusError):
        created(server.client().create_training_client_from_state(f"tinker://{client.model_id}/weights/none"))


def test_an_unknown_base_model_is_refused_at_once(service):
    with pytest.raises(
        (tinker.BadRequestError, tinker.NotFoundError, tinker.RequestFailedError), match="Qwen/Qwen3-8B"
    ):
        created(service.create_lora_training_client("Qwen/Qwen3-9B", rank=4))


# Passes


def test_forward_agrees_with_transformers(create, reference):
    sequences = [tokens_of(n) for n in (2, 9, 40)]
    found = logprobs(create(), *(datum(tokens=tokens) for tokens in sequences))
    for tokens, ours in zip(sequences, found, strict=True):
        theirs = reference_logprobs(reference, tokens).detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_training_agrees_with_peft(create, service, server, reference, tmp_path):
    """From the adapter as downloaded, through steps with decay and clipping."""
    from peft import PeftModel

    client = create(seed=5)
    data = [datum(10, weights=rng.normal(size=10)), datum(14)]
    model = PeftModel.from_pretrained(reference, str(download(client, server, tmp_path)), is_trainable=True).eval()
    weights = [p for p in model.parameters() if p.requires_grad]
    adam = types.AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
    optimizer = torch.optim.AdamW(weights, lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    try:
        for _ in range(3):
            step(client, *data, adam=adam)
            optimizer.zero_grad()
            loss = -sum((theirs(model, d) * d.loss_fn_inputs["weights"].to_torch()).sum() for d in data)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        for ours, d in zip(logprobs(client, *data), data, strict=True):
            np.testing.assert_allclose(ours, theirs(model, d).detach().numpy(), atol=1e-3)
    finally:
        model.unload()


def theirs(model: Any, d: types.Datum) -> torch.Tensor:
    return reference_logprobs(model, [*d.model_input.to_ints(), d.loss_fn_inputs["target_tokens"].data[-1]])


def download(client: tinker.TrainingClient, server: Server, folder: Path) -> Path:
    path = client.save_weights_external("peft").result().path
    for name, url in server.rest().get_external_weights_urls(path).result().urls.items():
        (folder / name).write_bytes(httpx.get(url).content)
    return folder


def test_forward_leaves_no_gradient(create):
    client = create()
    before = logprobs(client, DATUM)[0]
    client.optim_step(STEP).result()
    assert np.array_equal(logprobs(client, DATUM)[0], before)


def test_gradients_add_up_until_the_step(create):
    one, two = create(), create()
    other = datum(5)
    one.forward_backward([DATUM], "cross_entropy").result()
    step(one, other)
    step(two, DATUM, other)
    np.testing.assert_allclose(logprobs(one, DATUM)[0], logprobs(two, DATUM)[0], atol=1e-5)


def test_calls_sent_ahead_of_their_results_run_in_order(create):
    ahead, waiting = create(), create()
    futures: list[Any] = []
    for _ in range(5):
        futures += [ahead.forward_backward([DATUM], "cross_entropy"), ahead.optim_step(STEP)]
    last = ahead.forward([DATUM], "cross_entropy")
    losses = [f.result().metrics["loss:sum"] for f in futures[::2]]
    assert losses == sorted(losses, reverse=True)
    for _ in range(5):
        step(waiting, DATUM)
    assert last.result().loss_fn_outputs[0]["logprobs"].data == logprobs(waiting, DATUM)[0].tolist()


RATIOS = {"logprobs": -np.linspace(1, 20, 8), "advantages": np.array([0, 1, -1, 2, 0, -2, 1, 0.5])}


def expected_loss(name: str, lp: np.ndarray) -> float:
    q, a = RATIOS["logprobs"], RATIOS["advantages"]
    r = np.where(a == 0, 0, np.exp(np.where(a == 0, 0, lp - q)))
    match name:
        case "importance_sampling":
            return float(-(r * a).sum())
        case "ppo":
            return float(-np.minimum(r * a, np.clip(r, 0.5, 1.5) * a).sum())
        case "cispo":
            return float(-(np.clip(r, 0.5, 1.5) * lp * a).sum())
        case "gspo":
            s = np.exp((lp - q).mean())
            return float(-np.minimum(s * a, np.clip(s, 0.5, 1.5) * a).sum())
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_losses_of_reinforcement_learning(create, name):
    inputs = RATIOS | ({"sequence_ratio_mask": np.ones(8)} if name == "gspo" else {})
    config = {} if name == "importance_sampling" else {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    client = create()
    result = client.forward_backward([datum(8, **inputs)], name, config).result()
    lp = result.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert result.metrics["loss:sum"] == pytest.approx(expected_loss(name, lp.astype(np.float64)), rel=1e-3)
    assert client.optim_step(STEP).result().metrics["grad_norm"] > 0


def test_dro(create):
    q, a = RATIOS["logprobs"], np.full(8, 0.5)
    result = create().forward_backward([datum(8, logprobs=q, advantages=a)], "dro", {"beta": 0.05}).result()
    lp = result.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    assert result.metrics["loss:sum"] == pytest.approx(-(lp * a - 0.5 * 0.05 * (lp - q) ** 2).sum(), rel=1e-4)


def test_minus_100_at_weight_0_trains_as_any_token_there(create):
    tokens, weights = tokens_of(9), np.array([0, 0, 1, 1, 0, 1, 1, 0])
    trained = []
    for target in (-100, 3):
        labels = np.where(weights == 0, target, tokens[1:])
        trained.append(client := create())
        step(client, datum(tokens=tokens, target_tokens=labels, weights=weights))
    after = [logprobs(client, DATUM)[0] for client in (*trained, create())]
    assert np.array_equal(after[0], after[1])
    assert not np.array_equal(after[0], after[2])


def test_forward_backward_custom_is_the_loss_it_computes(create):
    custom, plain = create(), create()

    def negative_log_likelihood(data, logprobs_list):
        loss = -sum(
            (lp * d.loss_fn_inputs["weights"].to_torch()).sum() for d, lp in zip(data, logprobs_list, strict=True)
        )
        return loss, {"mine": 7.0}

    result = custom.forward_backward_custom([DATUM, DATUM], negative_log_likelihood).result()
    custom.optim_step(STEP).result()
    step(plain, DATUM, DATUM)
    assert result.metrics["mine"] == 7.0
    assert result.metrics["loss:sum"] == pytest.approx(result.metrics["surrogate_loss:sum"], rel=1e-5)
    np.testing.assert_allclose(logprobs(custom, DATUM)[0], logprobs(plain, DATUM)[0], atol=1e-5)


def test_create_custom_loss_runs_on_the_client(create, service):
    def half(logprobs, weights):
        loss = -(logprobs * weights).sum() / 2
        return loss, {"custom/half:sum": loss}

    handle = service.create_custom_loss(half, input_ranks={"logprobs": 1, "weights": 1}).result()
    client = create()
    whole = client.forward([DATUM], "cross_entropy").result().metrics["loss:sum"]
    result = client.forward_backward_custom([DATUM], handle).result()
    assert result.metrics["custom/half:sum"] == pytest.approx(whole / 2, rel=1e-5)


def test_a_batch_of_2500_comes_back_in_its_own_order(create):
    """Three requests, of which the SDK sends the first last."""
    distinct = [datum(n) for n in (1, 2, 3, 4, 5)]
    data = [distinct[i % 5] for i in range(2500)]
    client = create()
    passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)
    result = passed.result()
    alone = [o["logprobs"].to_numpy() for o in result.loss_fn_outputs[:5]]
    assert len(result.loss_fn_outputs) == 2500
    for i, output in enumerate(result.loss_fn_outputs):
        np.testing.assert_allclose(output["logprobs"].to_numpy(), alone[i % 5], atol=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(-500 * sum(a.sum() for a in alone), rel=1e-4)
    assert stepped.result().metrics["grad_norm"] > 0


def test_several_targets_a_position_dense_and_sparse(create):
    """(N, K) candidates with weights: most cells empty, so that torch tensors travel as CSR."""
    n, k = 6, 20
    targets, weights = torch.zeros(n, k, dtype=torch.int64), torch.zeros(n, k)
    targets[:, 3], weights[:, 3] = torch.arange(10, 10 + n), torch.linspace(0.1, 1, n)
    targets[2, 7], weights[2, 7] = 99, -0.5
    tokens = tokens_of(n + 1)

    def of(make: Callable[[torch.Tensor], types.TensorData]) -> types.Datum:
        inputs = {"target_tokens": make(targets), "weights": make(weights)}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    sparse, dense = of(types.TensorData.from_torch_sparse), of(types.TensorData.from_torch)
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    client = create()
    one, two = (client.forward_backward([d], "cross_entropy").result() for d in (sparse, dense))
    found = one.loss_fn_outputs[0]["logprobs"]
    assert found.shape == [n, k]
    np.testing.assert_allclose(found.to_numpy(), two.loss_fn_outputs[0]["logprobs"].to_numpy(), atol=1e-5)
    assert one.metrics["loss:sum"] == pytest.approx(-(found.to_torch() * weights).sum().item(), rel=1e-5)
    plain = logprobs(client, datum(tokens=tokens, target_tokens=targets[:, 3].numpy(), weights=weights[:, 3].numpy()))
    np.testing.assert_allclose(found.to_numpy()[:, 3], plain[0], atol=1e-5)


@pytest.fixture
def flagged(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tinker.ServiceClient]:
    """A client that believes the server has told it these flags."""

    def make(**flags: bool) -> tinker.ServiceClient:
        async def fetch(*_: object) -> types.ClientConfigResponse:
            return types.ClientConfigResponse(**flags)

        monkeypatch.setattr(InternalClientHolder, "_fetch_client_config", fetch)
        return server.client()

    return make


def test_compressed_bodies(flagged, create, server):
    compressed = flagged(proto_compress_fwdbwd=True).create_lora_training_client(server.name, rank=4, seed=1)
    assert np.array_equal(logprobs(compressed, DATUM)[0], logprobs(create(), DATUM)[0])


def test_a_model_made_by_loading_weights(flagged, create):
    client = create()
    step(client, DATUM)
    path = client.save_state("for-loading").result().path
    loaded = flagged(create_model_via_load_weights=True).create_training_client_from_state_with_optimizer(path)
    for one in (client, loaded):
        step(one, DATUM)
    assert np.array_equal(logprobs(client, DATUM)[0], logprobs(loaded, DATUM)[0])


# Mistakes


@pytest.mark.parametrize(
    ("data", "loss", "says"),
    [
        ([DATUM], "cross_entropi", "cross_entropy"),
        ([datum(tokens=[1, 2, 10_000, 3])], "cross_entropy", "10000"),
        ([datum(4, target_tokens=np.full(4, -100), weights=[0, 0, 1, 0])], "cross_entropy", r"weights\[2\] is 1"),
        ([datum(4, target_tokens=np.full(4, -1), weights=np.zeros(4))], "cross_entropy", "-1"),
        ([datum(4, weights=np.ones(3))], "cross_entropy", "weights"),
        ([datum(4, weights=[1, 1, np.nan, 1])], "cross_entropy", "weights"),
        ([datum(4, weights=np.ones(4))], "ppo", "logprobs"),
    ],
)
def test_a_mistake_is_told_and_the_next_request_runs(create, data, loss, says):
    client = create()
    failing, following = client.forward_backward(data, loss), client.forward([DATUM], "cross_entropy")
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=says):
        failing.result()
    assert following.result().metrics["loss:sum"] > 0


def test_an_optimizer_of_another_family_is_refused(create):
    client = create()
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError, tinker.UnprocessableEntityError)):
        client.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    step(client, DATUM)


# Checkpoints


def test_save_and_continue_with_and_without_the_optimizer(create, service, server):
    client = create(rank=3, train_mlp=False, train_unembed=False)
    step(client, DATUM)
    path = client.save_state("state", user_metadata={"k": "v"}).result().path
    at_save = logprobs(client, DATUM)[0]
    step(client, DATUM)
    continued = logprobs(client, DATUM)[0]

    info = server.rest().get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_mlp, info.train_attn, info.train_unembed) == (3, False, True, False)
    whole = service.create_training_client_from_state_with_optimizer(path)
    fresh = service.create_training_client_from_state(path)
    for one in (whole, fresh):
        assert np.array_equal(logprobs(one, DATUM)[0], at_save)
        step(one, DATUM)
    assert np.array_equal(logprobs(whole, DATUM)[0], continued)
    assert not np.allclose(logprobs(fresh, DATUM)[0], continued, atol=1e-6)


def test_load_state_brings_a_running_model_back(create):
    client = create()
    step(client, DATUM)
    before = logprobs(client, DATUM)[0]
    path = client.save_state("back").result().path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load in (client.load_state, client.load_state_with_optimizer):
            step(client, DATUM)
            load(path).result()
            assert np.array_equal(logprobs(client, DATUM)[0], before)


def test_loading_another_rank_is_refused(create):
    path = create(rank=2).save_state("rank2").result().path
    with pytest.warns(FutureWarning):
        loading = create(rank=4).load_state(path)
    with pytest.raises(tinker.RequestFailedError, match="rank"):
        loading.result()


@pytest.mark.slow
def test_a_new_process_goes_on_where_this_one_was(create, server):
    client = create()
    step(client, DATUM)
    path = client.save_state("elsewhere").result().path
    script = f"""
import json, tinker
from tinker import types
client = tinker.ServiceClient(base_url={server.url!r}, api_key={server.key!r})
client = client.create_training_client_from_state_with_optimizer({path!r})
datum = types.Datum(
    model_input=types.ModelInput.from_ints({DATUM.model_input.to_ints()!r}),
    loss_fn_inputs={{
        "target_tokens": types.TensorData(data={DATUM.loss_fn_inputs["target_tokens"].data!r}, dtype="int64"),
        "weights": types.TensorData(data=[1.0] * 12, dtype="float32"),
    }},
)
client.forward_backward([datum], "cross_entropy")
client.optim_step(types.AdamParams(learning_rate=0.01)).result()
result = client.forward([datum], "cross_entropy").result()
print(json.dumps(result.loss_fn_outputs[0]["logprobs"].data))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    step(client, DATUM)
    assert json.loads(done.stdout) == logprobs(client, DATUM)[0].tolist()


def test_a_name_is_taken_once_unless_overwritten(create, server):
    client = create()
    path = client.save_state("name", user_metadata={"n": "1"}).result().path
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match="name"):
        client.save_state("name").result()
    assert client.save_state("name", overwrite=True, user_metadata={"n": "2"}).result().path == path
    (checkpoint,) = server.rest().list_checkpoints(client.model_id).result().checkpoints
    assert (checkpoint.tinker_path, checkpoint.user_metadata) == (path, {"n": "2"})


def test_a_checkpoint_lives_as_long_as_it_is_told(create, server):
    client = create()
    client.save_state("short", ttl_seconds=3600).result()
    client.save_weights_for_sampler("long").result()
    listed = server.rest().list_checkpoints(client.model_id).result().checkpoints
    ends = {checkpoint.checkpoint_id: checkpoint.expires_at for checkpoint in listed}
    assert ends["weights/short"] is not None
    assert ends["sampler_weights/long"] is None
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError, tinker.UnprocessableEntityError)):
        client.save_state("never", ttl_seconds=0).result()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "a\0b", "x" * 300])
def test_a_name_that_is_no_name_is_refused(create, name):
    client = create()
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError, tinker.UnprocessableEntityError)):
        client.save_state(name).result()
    client.save_state("good").result()


def test_an_exported_adapter_is_peft(create, server, tmp_path):
    folder = download(create(rank=3), server, tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 32)
    assert (folder / "adapter_model.safetensors").stat().st_size > 0


# The async API


def test_every_step_has_an_async_version(service, server):
    async def train() -> tuple[float, float]:
        client = await service.create_lora_training_client_async(server.name, rank=4, seed=1)
        passed = await client.forward_backward_async([DATUM], "cross_entropy")
        stepped = await client.optim_step_async(STEP)
        first = (await passed).metrics["loss:sum"]
        await stepped
        second = (await (await client.forward_async([DATUM], "cross_entropy"))).metrics["loss:sum"]
        assert (await client.get_info_async()).lora_rank == 4
        path = (await (await client.save_state_async("async"))).path
        again = await service.create_training_client_from_state_async(path)
        assert (await (await again.forward_async([DATUM], "cross_entropy"))).metrics["loss:sum"] == second
        sampler = await client.save_weights_and_get_sampling_client_async()
        scored = await sampler.compute_logprobs_async(types.ModelInput.from_ints([1, 2, 3]))
        assert len(scored) == 3
        saved = (await (await client.save_weights_for_sampler_async("async"))).path
        named = await service.create_sampling_client_async(model_path=saved)
        params = types.SamplingParams(max_tokens=3, seed=1)
        one, two = await asyncio.gather(
            *(s.sample_async(types.ModelInput.from_ints([1, 2, 3]), 1, params) for s in (sampler, named))
        )
        assert one.sequences[0].tokens == two.sequences[0].tokens
        return first, second

    first, second = asyncio.run(train())
    assert second < first


# The peer's three wrong results


def test_sampling_an_older_snapshot_does_not_reset_the_adapter_in_training(create):
    client, alone = create(), create()
    old = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=4, seed=1)
    for _ in range(3):
        step(client, DATUM)
        old.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params).result()
        step(alone, DATUM)
    assert np.array_equal(logprobs(client, DATUM)[0], logprobs(alone, DATUM)[0])


def test_a_snapshot_stays_frozen(create):
    client = create()
    prompt = types.ModelInput.from_ints([*DATUM.model_input.to_ints(), 7])
    samplers = [client.save_weights_and_get_sampling_client()]
    before = [samplers[0].compute_logprobs(prompt).result()]
    for _ in range(3):
        step(client, DATUM)
        samplers.append(client.save_weights_and_get_sampling_client())
        before.append(samplers[-1].compute_logprobs(prompt).result())
    after = [sampler.compute_logprobs(prompt).result() for sampler in samplers]
    assert after == before
    assert len({tuple(scores) for scores in before}) == 4


def test_weight_decay_on_one_tenant_does_not_change_others(create, server):
    mine = create()
    step(mine, DATUM)
    before = logprobs(mine, DATUM)[0]
    sampler = mine.save_weights_and_get_sampling_client()
    scores = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()
    with server.client() as other_service:
        other = other_service.create_lora_training_client(server.name, rank=4, seed=1)
        for _ in range(3):
            step(other, DATUM, adam=types.AdamParams(learning_rate=0.1, weight_decay=5.0))
    assert np.array_equal(logprobs(mine, DATUM)[0], before)
    assert sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result() == scores
