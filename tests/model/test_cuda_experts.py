"""Experts at published widths on a GPU: samples have the trainer's bits, whoever shares their batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from palestra.model import Adapter, AdapterPool, Sampler, Trainer, TrainItem, encode
from palestra.model.loading.weights import AttentionWeights
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mlp.experts import ExpertsMlp
from palestra.model.quantised.packed import FrozenWeight, dense
from palestra.model.training.head import logits_of
from palestra.testing.drawn_model import draw_model
from palestra.types import Datum, LoraConfig
from tests.model.test_cuda import Side, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LAYERS = {"num_hidden_layers": 4}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": ("qwen3_moe", LAYERS),
    "gpt-oss-20b": ("gpt_oss", LAYERS),
}
ADAPTERS = tuple(
    LoraConfig(rank=rank, seed=rank, train_unembed=False, per_expert=rank == 16) for rank in (8, 32, 64, 16)
)


@pytest.fixture(scope="module", params=SHAPES)
def side(request: pytest.FixtureRequest) -> Side:
    family, overrides = SHAPES[request.param]
    model = draw_model(family, request.param, "bfloat16", "cuda", overrides)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device="cuda")
    adapters = [pool.create(config) for config in ADAPTERS]
    for adapter in adapters:
        pool.before_change(adapter)
        adapter.row("weights").normal_(0, 0.01, generator=torch.Generator("cuda").manual_seed(adapter.uid))
        pool.after_change(adapter)
    return Side(Trainer(model.decoder, pool), adapters, Sampler(model.decoder, pool, cache_tokens=8192))


@pytest.mark.parametrize("options", [{"cache_tokens": 65536}, {"cache_tokens": 4096, "prefill_tokens": 256}])
def test_samples_have_the_trainers_bits_and_do_not_notice_their_batch(side: Side, options: dict[str, Any]) -> None:
    """Mixed adapters and the base model, through graphs, chunked prefill and preemption."""
    decoder, pool = side.trainer.decoder, side.trainer.pool
    sampler = Sampler(decoder, pool, **options)
    requested = requests(30)
    adapters = [[*side.adapters, None][i % 5] for i in range(len(requested))]
    results = sampler.generate(requested, adapters)
    assert sampler.graphs is not None
    off, n_tokens = [], 0
    for request, adapter, result in zip(requested, adapters, results, strict=True):
        for sequence in result.sequences:
            tokens = [*request.prompt, *sequence.tokens]
            datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
            trained = side.trainer.forward([TrainItem(adapter, datum)])[0].logprobs[len(request.prompt) - 1 :]
            gap = np.abs(trained - np.array(sequence.logprobs))
            off += gap[gap > 0].tolist()
            n_tokens += len(gap)
    assert not off, f"{len(off)} of {n_tokens} log-probabilities differ, by {max(off):.5f} at most"
    for n in range(5):
        (alone,) = Sampler(decoder, pool, cache_tokens=65536).generate(requested[n : n + 1], adapters[n])
        assert alone.sequences == results[n].sequences


ROWS = (1, 2, 3, 8, 16, 31, 32, 33, 64, 65, 100, 128, 129, 200, 256, 300, 1000, 1025)


def test_every_product_of_a_row_has_the_bits_that_it_has_among_others(side: Side) -> None:
    """Those of attention, the head, the router and the experts, with adapters inside."""
    decoder, layer = side.trainer.decoder, side.trainer.decoder.weights.layers[0]
    assert isinstance(layer.mixer, AttentionWeights)
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(width: int) -> torch.Tensor:
        return torch.randn(1100, width, device="cuda", generator=generator).to(torch.bfloat16)

    def linear(name: str, weight: FrozenWeight, adapter: Adapter | None) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            return lora_linear(x, weight, None, (0, name), LoraPlan.of([(adapter, len(x))], device="cuda"))

        return run

    def visit(adapter: Adapter | None) -> Callable[[torch.Tensor], torch.Tensor]:
        mlp = decoder.mlps[0]
        assert isinstance(mlp, ExpertsMlp)
        return lambda x: mlp(x, LoraPlan.of([(adapter, len(x))], device="cuda"))

    products: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
        "head": (decoder.spec.hidden_size, lambda x: logits_of(decoder, x, LoraPlan()))
    }
    for n, adapter in enumerate([None, *side.adapters]):
        products[f"qkv {n}"] = decoder.spec.hidden_size, linear("qkv", layer.mixer.qkv, adapter)
        products[f"o {n}"] = dense(layer.mixer.o).shape[1], linear("o", layer.mixer.o, adapter)
        products[f"experts {n}"] = decoder.spec.hidden_size, visit(adapter)
    differ = []
    with torch.inference_mode():
        for name, (width, product) in products.items():
            x = drawn(width)
            whole = product(x)
            differ += [(name, rows) for rows in ROWS if not torch.equal(product(x[:rows]), whole[:rows])]
    assert not differ


def test_layers_that_are_computed_again_give_the_same_gradients(side: Side) -> None:
    """Memory that nothing has written is not a number here; the first sequence is summed over its rows in parts."""
    rng, pool = np.random.default_rng(7), side.trainer.pool
    items = []
    for adapter, length in zip(side.adapters, (1300, 40, 200, 9), strict=True):
        tokens = rng.integers(0, side.trainer.decoder.spec.vocab_size, length + 1)
        loss_inputs = {"target_tokens": encode(tokens[1:]), "weights": encode(np.ones(length, np.float32))}
        items.append(TrainItem(adapter, Datum.of_tokens(tokens[:-1].tolist(), **loss_inputs), "cross_entropy"))
    gradients = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for checkpointing in (False, True):
            Trainer(side.trainer.decoder, pool, checkpointing=checkpointing).forward_backward(items)
            gradients.append([adapter.row("grads").clone() for adapter in side.adapters])
            for adapter in side.adapters:
                pool.discard_gradient(adapter)
    finally:
        torch.use_deterministic_algorithms(False)
    for kept, again in zip(*gradients, strict=True):
        assert kept.norm() > 0
        assert (kept - again).norm() <= 1e-6 * kept.norm()
