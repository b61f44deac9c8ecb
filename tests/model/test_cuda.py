"""The same numbers on a GPU: bfloat16 there agrees with float32 on the CPU to bfloat16's accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.model import Adapter, AdapterPool, Sampler, Trainer, TrainItem, encode, load_model
from palestra.model.training.activation_offload import ActivationOffload
from palestra.types import AdamParams, Datum, LoraConfig, SampleRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LENGTHS = (40, 7, 130, 64, 64, 33, 200, 12)


@dataclass
class Side:
    trainer: Trainer
    adapters: list[Adapter]
    sampler: Sampler


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from palestra.testing.random_model import make_random_model

    return make_random_model(tmp_path_factory.mktemp("cuda") / "tiny", shape="tiny", dtype="bfloat16")


def open_side(folder: Path, device: str, dtype: str) -> Side:
    model = load_model(folder, device=device, dtype=dtype)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=device)
    adapters = [pool.create(LoraConfig(rank=r, seed=i)) for i, r in enumerate((8, 8, 16))]
    for i, adapter in enumerate(adapters):
        noise = torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(i)) * 0.02
        pool.before_change(adapter)
        adapter.row("weights").copy_(noise)
        pool.after_change(adapter)
    return Side(Trainer(model.decoder, pool), adapters, Sampler(model.decoder, pool, cache_tokens=8192))


def items(side: Side) -> list[TrainItem]:
    rng = np.random.default_rng(0)
    found = []
    for i, n in enumerate(LENGTHS):
        tokens = rng.integers(0, 3000, n + 1)
        datum = Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]))
        found.append(TrainItem(side.adapters[i % 3], datum))
    return found


def test_bfloat16_on_the_gpu_agrees_with_float32_on_the_cpu(model_folder: Path) -> None:
    cpu, gpu = open_side(model_folder, "cpu", "float32"), open_side(model_folder, "cuda", "bfloat16")
    ours, truth = gpu.trainer.forward_backward(items(gpu)), cpu.trainer.forward_backward(items(cpu))
    difference = np.concatenate([a.logprobs - b.logprobs for a, b in zip(ours, truth, strict=True)])
    assert np.abs(difference).mean() < 0.04
    for a, b in zip(gpu.adapters, cpu.adapters, strict=True):
        assert torch.cosine_similarity(a.row("grads").cpu(), b.row("grads"), 0) > 0.999
    params = AdamParams(learning_rate=1e-3)
    results = gpu.trainer.optim_step(dict.fromkeys(gpu.adapters, params))
    assert all(r.error is None for r in results.values())


def test_float32_on_the_gpu_agrees_closely(model_folder: Path) -> None:
    cpu, gpu = open_side(model_folder, "cpu", "float32"), open_side(model_folder, "cuda", "float32")
    ours, truth = gpu.trainer.forward_backward(items(gpu)), cpu.trainer.forward_backward(items(cpu))
    assert max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(ours, truth, strict=True)) < 1e-3
    for a, b in zip(gpu.adapters, cpu.adapters, strict=True):
        assert torch.allclose(a.row("grads").cpu(), b.row("grads"), rtol=1e-3, atol=1e-3 * b.row("grads").abs().max())


def test_sampled_logprobs_equal_the_training_forward_on_the_gpu(model_folder: Path) -> None:
    gpu = open_side(model_folder, "cuda", "float32")
    prompt = tuple(range(100, 400))
    params = SamplingParams(max_tokens=40, seed=3, stop_token_ids=())
    requests = [SampleRequest(prompt=prompt[: 20 + 50 * i], num_samples=4, params=params) for i in range(5)]
    adapters = [None, *gpu.adapters, gpu.adapters[0]]
    for request, adapter, result in zip(requests, adapters, gpu.sampler.generate(requests, adapters), strict=True):
        for sequence in result.sequences:
            tokens = [*request.prompt, *sequence.tokens]
            datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
            forward = gpu.trainer.forward([TrainItem(adapter, datum)])[0].logprobs[len(request.prompt) - 1 :]
            assert np.abs(forward - np.array(sequence.logprobs)).max() < 1e-3


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def half_side(model_folder: Path, request: pytest.FixtureRequest) -> Side:
    return open_side(model_folder, "cuda", request.param)


def requests(n: int, longest: int = 700) -> list[SampleRequest]:
    rng = np.random.default_rng(3)
    return [
        SampleRequest(
            prompt=tuple(rng.integers(0, 3000, length).tolist()),
            num_samples=2,
            params=SamplingParams(max_tokens=64, seed=i, stop_token_ids=()),
        )
        for i, length in enumerate(rng.integers(5, longest, n))
    ]


@pytest.mark.parametrize("cache_tokens", [65536, 2048], ids=["room", "preempted"])
def test_samples_in_half_precision_have_the_trainers_bits(half_side: Side, cache_tokens: int) -> None:
    """Adapters of two ranks and the base model in one batch, through graphs, chunked prefill and shared prompts."""
    side = half_side
    sampler = Sampler(side.trainer.decoder, side.trainer.pool, cache_tokens=cache_tokens, prefill_tokens=256)
    requested = requests(20)
    adapters = [[*side.adapters, None][i % 4] for i in range(20)]
    for request, adapter, result in zip(requested, adapters, sampler.generate(requested, adapters), strict=True):
        for sequence in result.sequences:
            tokens = [*request.prompt, *sequence.tokens]
            datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
            trained = side.trainer.forward([TrainItem(adapter, datum)])[0].logprobs
            assert trained[len(request.prompt) - 1 :].tolist() == sequence.logprobs
    assert (sampler.scheduler.preemptions > 0) == (cache_tokens == 2048)


def test_a_seeded_request_in_half_precision_does_not_notice_its_batch(half_side: Side) -> None:
    decoder, pool = half_side.trainer.decoder, half_side.trainer.pool
    requested = requests(20)
    together = Sampler(decoder, pool, cache_tokens=65536).generate(requested, half_side.adapters[0])
    for request, result in zip(requested[:4], together, strict=False):
        (alone,) = Sampler(decoder, pool, cache_tokens=65536).generate([request], half_side.adapters[0])
        assert alone.sequences == result.sequences


def test_a_request_that_is_aborted_while_a_step_is_in_flight_leaves_nothing_behind(half_side: Side) -> None:
    sampler = Sampler(half_side.trainer.decoder, half_side.trainer.pool, cache_tokens=65536)
    kept, aborted = requests(2)
    (alone,) = sampler.generate([kept], half_side.adapters[0])
    ids = [sampler.submit(request, half_side.adapters[0]) for request in (kept, aborted)]
    for _ in range(8):
        sampler.step()
    sampler.abort(ids[1])
    finished = []
    while sampler.has_work:
        finished += sampler.step().finished
    assert [(f.request_id, f.result.sequences) for f in finished] == [(ids[0], alone.sequences)]
    assert sampler.pages.available == sampler.pages.n_pages
    sampler.pages.check()


def test_a_recorded_step_writes_to_nothing_but_its_own_memory(half_side: Side) -> None:
    """Prompts that several rows share are read once, by way of buffers that must not be given to others."""
    sampler = Sampler(half_side.trainer.decoder, half_side.trainer.pool, cache_tokens=65536)
    prompt = tuple(np.random.default_rng(1).integers(0, 3000, 1100).tolist())
    params = SamplingParams(max_tokens=64, seed=1, stop_token_ids=())
    sampler.submit(SampleRequest(prompt=prompt, num_samples=8, params=params), half_side.adapters[0])
    for _ in range(8):
        sampler.step()
    torch.cuda.synchronize()
    others = [torch.full((size,), 7.0, device="cuda") for size in (256, 4096, 1 << 16, 1 << 20) for _ in range(32)]
    while sampler.has_work:
        sampler.step()
    assert all(bool((other == 7.0).all()) for other in others)


def test_a_batch_of_tenants_has_each_ones_own_gradient_bits(half_side: Side) -> None:
    side = half_side
    everything = items(side)
    side.trainer.forward_backward(everything)
    together = [a.row("grads").clone() for a in side.adapters]
    for adapter in side.adapters:
        side.trainer.pool.discard_gradient(adapter)
        side.trainer.forward_backward([item for item in everything if item.adapter is adapter])
    assert all(torch.equal(a.row("grads"), b) for a, b in zip(side.adapters, together, strict=True))


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from palestra.testing.random_model import make_random_model

    folder = tmp_path_factory.mktemp("cuda") / "experts"
    return make_random_model(folder, family="qwen3_moe", shape="tiny", dtype="bfloat16")


def test_experts_in_float32_on_the_gpu_agree_closely(experts_folder: Path) -> None:
    cpu, gpu = open_side(experts_folder, "cpu", "float32"), open_side(experts_folder, "cuda", "float32")
    ours, truth = gpu.trainer.forward_backward(items(gpu)), cpu.trainer.forward_backward(items(cpu))
    assert max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(ours, truth, strict=True)) < 1e-3
    for a, b in zip(gpu.adapters, cpu.adapters, strict=True):
        assert torch.cosine_similarity(a.row("grads").cpu(), b.row("grads"), 0) > 0.9999


def test_gradients_of_experts_in_bfloat16_are_those_of_float32(experts_folder: Path) -> None:
    """Some tokens visit other experts in bfloat16, so directions agree less than in a dense model."""
    narrow, wide = (open_side(experts_folder, "cuda", dtype) for dtype in ("bfloat16", "float32"))
    for side in (narrow, wide):
        side.trainer.forward_backward(items(side))
    for a, b in zip(narrow.adapters, wide.adapters, strict=True):
        assert torch.cosine_similarity(a.row("grads"), b.row("grads"), 0) > 0.97


def test_a_row_of_experts_has_the_same_bits_whatever_the_batch(experts_folder: Path) -> None:
    from palestra.model.lora.linear import LoraPlan

    side = open_side(experts_folder, "cuda", "bfloat16")
    mlp, adapter = side.trainer.decoder.mlps[0], side.adapters[0]
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        whole = mlp(x, LoraPlan.of([(adapter, 300)], device="cuda"))
        for rows in (slice(0, 1), slice(5, 13), slice(40, 170)):
            part = mlp(x[rows], LoraPlan.of([(adapter, rows.stop - rows.start)], device="cuda"))
            assert torch.equal(part, whole[rows])


def test_sampled_logprobs_of_experts_are_the_trainers_bits(experts_folder: Path) -> None:
    side = open_side(experts_folder, "cuda", "bfloat16")
    prompt = tuple(range(3, 40))
    request = SampleRequest(
        prompt=prompt, num_samples=3, params=SamplingParams(max_tokens=16, seed=1, stop_token_ids=())
    )
    adapters = [*side.adapters, None]
    for adapter, result in zip(adapters, side.sampler.generate([request] * 4, adapters), strict=True):
        for sequence in result.sequences:
            tokens = [*prompt, *sequence.tokens]
            datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
            trained = side.trainer.forward([TrainItem(adapter, datum)])[0].logprobs
            assert trained[len(prompt) - 1 :].tolist() == sequence.logprobs


def test_copies_of_a_pass_that_broke_off_are_not_written_into_memory_of_others() -> None:
    offload, size = ActivationOffload(torch.device("cuda:0")), 1 << 22
    x = torch.zeros(size, device="cuda:0", requires_grad=True)
    with offload.keeping():
        hidden = [x]
        for _ in range(3):
            hidden.append(hidden[-1].sigmoid())

    def fail(_: object) -> None:
        raise RuntimeError("no memory")

    assert hidden[2].grad_fn is not None
    hidden[2].grad_fn.register_prehook(fail)
    with torch.cuda.stream(offload._stream):
        torch.cuda._sleep(1 << 30)  # the copy that comes back ahead takes long
    with pytest.raises(RuntimeError, match="no memory"):
        hidden[3].sum().backward()
    hidden.clear()
    offload.close()
    others = [torch.full((size,), 5.0, device="cuda:0") for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((other == 5.0).all()) for other in others)
