"""Routing replay: training visits the experts that were visited while sampling."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from palestra.model import DataError, TrainItem, encode
from palestra.model.loading.layer_spec import ExpertsSpec
from palestra.model.mlp.routing import choose_experts
from palestra.model.training.prepared import decode_routing
from palestra.types import Datum, RoutedExperts, SampledSequence, SampleRequest

LAYERS, EXPERTS, PER_TOKEN = 2, 8, 2  # of the tiny model


@pytest.fixture
def bench(get_bench):
    return get_bench("qwen3_moe")


@pytest.fixture
def moved_router(bench):
    """The same weights but for the routers, which choose otherwise."""
    routers = [layer.mlp.router for layer in bench.model.decoder.weights.layers]
    kept = [router.clone() for router in routers]
    generator = torch.Generator().manual_seed(5)

    def move() -> None:
        for router in routers:
            router.add_(torch.randn(router.shape, generator=generator) * router.std())

    yield move
    for router, old in zip(routers, kept, strict=True):
        router.copy_(old)


def ids_of(bench, routing: RoutedExperts) -> np.ndarray:
    return decode_routing(routing, routing.shape[0], bench.model.spec)


def datum_of(request: SampleRequest, sequence: SampledSequence, routing: RoutedExperts | None) -> Datum:
    tokens = [*request.prompt, *sequence.tokens]
    datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
    return msgspec.structs.replace(datum, routing=routing)


def test_samples_say_which_experts_the_trainer_would_choose(bench):
    """Within a group, behind a prefix that was found in the cache, and after a preemption."""
    sampler = bench.sampler(page_size=4, cache_tokens=40, prefill_tokens=7)
    prompt = bench.tokens(18)
    requests = [bench.request(prompt, 3, record_routing=True), bench.request([*prompt, 5, 6], 2, record_routing=True)]
    for request in [*requests, requests[0]]:
        (result,) = sampler.generate([request])
        for sequence in result.sequences:
            assert sequence.routing.shape == (len(request.prompt) + 11, LAYERS, PER_TOKEN)
            visits = bench.trainer.forward([TrainItem(None, datum_of(request, sequence, None))])[0].visits
            ids = ids_of(bench, sequence.routing)
            counted = np.stack([np.bincount(ids[:, n].ravel(), minlength=EXPERTS) for n in range(LAYERS)])
            assert np.array_equal(counted, visits)
    assert result.cached_prompt_tokens == 16
    assert sampler.scheduler.preemptions > 0
    (silent,) = sampler.generate([bench.request(prompt)])
    assert silent.sequences[0].routing is None


def test_stopped_sequences_have_no_ids_of_what_was_computed_in_vain(bench):
    prompt = bench.tokens(9)
    free = bench.sampler().generate([bench.request(prompt, record_routing=True)])[0].sequences[0]
    stop = free.tokens[4]
    at = free.tokens.index(stop)
    ahead = bench.sampler(runs_ahead=True)
    request = bench.request(prompt, stop_token_ids=(stop,), record_routing=True)
    cut = ahead.generate([request])[0].sequences[0]
    assert cut.tokens == free.tokens[: at + 1]
    assert np.array_equal(ids_of(bench, cut.routing), ids_of(bench, free.routing)[: len(prompt) + at])


def test_replay_keeps_the_experts_when_the_router_has_moved(bench, moved_router):
    request = bench.request(bench.tokens(12), 2, record_routing=True)
    (result,) = bench.sampler().generate([request])
    adapter = bench.adapter()
    plain = [TrainItem(adapter, datum_of(request, s, None)) for s in result.sequences]
    replayed = [TrainItem(adapter, datum_of(request, s, s.routing)) for s in result.sequences]
    moved_router()
    own, theirs = bench.trainer.forward(plain), bench.trainer.forward_backward(replayed)
    for sequence, a, b in zip(result.sequences, own, theirs, strict=True):
        ids = ids_of(bench, sequence.routing)
        recorded = np.stack([np.bincount(ids[:, n].ravel(), minlength=EXPERTS) for n in range(LAYERS)])
        assert np.array_equal(b.visits, recorded)
        assert not np.array_equal(a.visits, recorded)
        assert b.metrics["routing_replayed:sum"] == len(b.logprobs)
        assert "routing_replayed:sum" not in a.metrics
    assert all(torch.linalg.norm(gradient) > 0 for gradient in bench.gradient(adapter).values())


def test_replay_of_what_the_router_chooses_anyway_changes_no_bit(bench):
    request = bench.request(bench.tokens(12), 2, record_routing=True)
    (result,) = bench.sampler().generate([request])
    gradients, logprobs = [], []
    for with_replay in (False, True):
        adapter = bench.adapter(noise=0.0)
        items = [TrainItem(adapter, datum_of(request, s, s.routing if with_replay else None)) for s in result.sequences]
        logprobs.append(np.concatenate([r.logprobs for r in bench.trainer.forward_backward(items)]))
        gradients.append(adapter.row("grads").clone())
    assert np.array_equal(*logprobs)
    assert torch.equal(*gradients)


def test_rows_that_were_not_recorded_choose_for_themselves():
    torch.manual_seed(0)
    x, router = torch.randn(3, 16, requires_grad=True), torch.randn(8, 16)
    spec = ExpertsSpec(8, 2, 4, normalises=True)
    weights, numbers = choose_experts(x, router, None, spec, torch.tensor([[7, 0], [-1, -1], [1, 2]]))
    logits = x @ router.T
    assert numbers.tolist() == [[7, 0], logits[1].topk(2).indices.tolist(), [1, 2]]
    assert torch.allclose(weights, torch.softmax(logits.gather(1, numbers), -1))
    weights[0, 0].backward()
    assert torch.linalg.norm(x.grad[0]) > 0


@pytest.mark.parametrize(
    ("family", "routing", "message"),
    [
        ("qwen3", RoutedExperts(data=bytes(12), shape=(3, 2, 2)), "Qwen3ForCausalLM has none"),
        ("qwen3_moe", RoutedExperts(data=bytes(8), shape=(2, 2, 2)), r"it must be \[3, 2, 2\], with 1 for each number"),
        ("qwen3_moe", RoutedExperts(data=bytes(11), shape=(3, 2, 2)), "in 11 bytes"),
        ("qwen3_moe", RoutedExperts(data=bytes([9] * 12), shape=(3, 2, 2)), "expert 9 does not exist"),
    ],
)
def test_routing_that_does_not_fit_the_model_is_refused(get_bench, family, routing, message):
    bench = get_bench(family)
    datum = msgspec.structs.replace(bench.datum(3), routing=routing)
    with pytest.raises(DataError, match=message):
        bench.trainer.forward([TrainItem(None, datum)])
