"""The families beside Qwen3 on a GPU: float32 agrees with the CPU, and in bfloat16 samples have the trainer's bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.model import Sampler, Trainer, TrainItem, encode
from palestra.testing.random_model import make_random_model
from palestra.types import Datum
from tests.model.test_cuda import Side, items, open_side, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = (
    "qwen2",
    "llama",
    "mistral",
    "ministral3",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "seed_oss",
    "gemma3",
    "gpt_oss",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "nemotron_h",
    "gemma4",
    "gemma4_moe",
)
PUBLISHED_ROWS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
WIDE = {
    "glm4_moe_lite, published rows": ("glm4_moe_lite", PUBLISHED_ROWS | {"num_attention_heads": 20}),
    "gemma4, published heads": ("gemma4", {"head_dim": 256, "global_head_dim": 512}),
    "deepseek_v3, published rows": ("deepseek_v3", PUBLISHED_ROWS | {"num_attention_heads": 128}),
}


@pytest.fixture(scope="module", params=[*FAMILIES, *WIDE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = WIDE.get(request.param, (request.param, {}))
    where = tmp_path_factory.mktemp("cuda") / family
    return make_random_model(where, family=family, shape="tiny", dtype="bfloat16", overrides=overrides)


def test_float32_on_the_gpu_agrees_with_the_cpu(folder: Path) -> None:
    cpu, gpu = open_side(folder, "cpu", "float32"), open_side(folder, "cuda", "float32")
    ours, truth = gpu.trainer.forward_backward(items(gpu)), cpu.trainer.forward_backward(items(cpu))
    most = max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(ours, truth, strict=True))
    alike = min(
        float(torch.cosine_similarity(a.row("grads").cpu(), b.row("grads"), 0))
        for a, b in zip(gpu.adapters, cpu.adapters, strict=True)
    )
    assert most < 2e-3, f"log-probabilities are off by {most:.6f} at most"
    assert alike > 0.9999, f"the least cosine of gradients is {alike:.6f}"


def test_samples_in_bfloat16_have_the_trainers_bits(folder: Path) -> None:
    """Through graphs where the family has them, chunked prefill and preemptions; and whoever shares the batch."""
    side = open_side(folder, "cuda", "bfloat16")
    requested = requests(12)
    adapters = [[*side.adapters, None][i % 4] for i in range(len(requested))]
    small = Sampler(side.trainer.decoder, side.trainer.pool, cache_tokens=2048, prefill_tokens=256)
    results = small.generate(requested, adapters)
    off, n_tokens = [], 0
    for request, adapter, result in zip(requested, adapters, results, strict=True):
        for sequence in result.sequences:
            tokens = [*request.prompt, *sequence.tokens]
            datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
            trained = side.trainer.forward([TrainItem(adapter, datum)])[0].logprobs[len(request.prompt) - 1 :]
            gap = np.abs(trained - np.array(sequence.logprobs))
            off += gap[gap > 0].tolist()
            n_tokens += len(gap)
    (alone,) = Sampler(side.trainer.decoder, side.trainer.pool, cache_tokens=65536).generate(requested[:1], adapters[0])
    assert alone.sequences == results[0].sequences
    assert not off, f"{len(off)} of {n_tokens} log-probabilities differ, by {max(off):.5f} at most"


def test_what_data_share_changes_no_bit_of_a_forward_pass(folder: Path) -> None:
    """Prompts that answers share, and answers that branch, around the splits of attention's keys."""
    side = open_side(folder, "cuda", "bfloat16")
    shared, alone = (
        Trainer(side.trainer.decoder, side.trainer.pool, share_prefixes=share, token_budget=4096)
        for share in (True, False)
    )
    data = sharing_items(side)
    computed = [
        sum(batch.rows for batch in trainer.plan(trainer.prepare(data, train=True))) for trainer in (shared, alone)
    ]
    assert computed[0] < computed[1] / 2
    found, truth = shared.forward(data), alone.forward(data)
    off = sum(int((a.logprobs != b.logprobs).sum()) for a, b in zip(found, truth, strict=True))
    assert off == 0, f"{off} of {sum(len(one.logprobs) for one in truth)} log-probabilities differ"
    gradients = []
    for trainer in (shared, shared, alone):
        results = trainer.forward_backward(data)
        assert all((a.logprobs == b.logprobs).all() for a, b in zip(results, truth, strict=True))
        gradients.append([adapter.row("grads").clone() for adapter in side.adapters])
        for adapter in side.adapters:
            side.trainer.pool.discard_gradient(adapter)
    for one, again, apart in zip(*gradients, strict=True):
        assert torch.equal(one, again)
        assert torch.cosine_similarity(one, apart, 0) > 0.999


def sharing_items(side: Side) -> list[TrainItem]:
    rng = np.random.default_rng(2)
    made = []
    for n, length in enumerate((40, 150, 511, 700)):
        prompt = rng.integers(0, 3000, length)
        answers = [rng.integers(0, 3000, size) for size in (64, 33, 70, 90)]
        answers += [np.concatenate([answers[-1][:50], rng.integers(0, 3000, size)]) for size in (20, 5)]
        for answer in answers:
            tokens = np.concatenate([prompt, answer])
            datum = Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]))
            made.append(TrainItem(side.adapters[n % 3], datum))
    return made
