"""What happens between a forward and its backward, and inside a sampler's step, stays where it belongs."""

from __future__ import annotations

import pytest
import torch

from palestra.model import AdapterError, DataError, save_adapter
from palestra.model.attention.kv_cache import PagedAttention
from palestra.types import AdamParams, LoraConfig


def halfway(bench, adapters, lengths=(20, 9)):
    data = bench.trainer.prepare(bench.items(adapters, lengths), train=True)
    return bench.trainer.forward_micro(data, train=True)


def test_request_that_ends_in_a_step_leaves_the_training_rows_writable(bench):
    gone, stays = bench.adapter(seed=1), bench.adapter(seed=2)
    bench.trainer.forward_backward(bench.items([stays], (8,)))
    bench.trainer.optim_step({stays: AdamParams()})
    sampler = bench.sampler()
    sampler.submit(bench.request([1, 2, 3]), gone)
    bench.pool.free(gone)
    bench.run_to_end(sampler)
    bench.trainer.forward_backward(bench.items([stays], (8,)))
    assert bench.trainer.optim_step({stays: AdamParams()})[stays].error is None


def test_gradient_of_a_tenant_freed_halfway_reaches_nobody_else(bench):
    gone, stays = bench.adapter(seed=1), bench.adapter(seed=2)
    passing = halfway(bench, [gone])
    bench.pool.free(gone)
    newcomer = bench.adapter(seed=3)
    bench.trainer.backward(passing)
    for adapter in (newcomer, stays):
        assert not adapter.stack.has("grads") or not adapter.row("grads").any()
    bench.pool.free(stays)
    bench.pool.free(newcomer)
    assert bench.pool.size_bytes == 0


def test_step_in_the_middle_of_a_pass_is_refused_and_the_next_good_one_works(bench):
    adapter, twin = bench.adapter(seed=1), bench.adapter(seed=1)
    passing = halfway(bench, [adapter])
    assert "did not finish" in str(bench.trainer.optim_step({adapter: AdamParams()})[adapter].error)
    items = bench.items([adapter], (12, 5))
    bench.trainer.forward_backward(items)
    bench.trainer.backward(passing)  # outdated: it must add nothing, and take nothing away
    bench.trainer.forward_backward([type(i)(twin, i.datum) for i in items])
    assert torch.equal(adapter.row("grads"), twin.row("grads"))
    assert bench.trainer.optim_step({adapter: AdamParams()})[adapter].error is None
    assert adapter.unfinished == 0


@pytest.mark.parametrize(
    "bad", [{"beta1": 1.0}, {"learning_rate": float("nan")}, {"weight_decay": float("inf")}, {"eps": -1.0}]
)
def test_impossible_adam_settings_are_refused_and_keep_the_gradient(bench, bad):
    adapter = bench.adapter()
    bench.trainer.forward_backward(bench.items([adapter], (8,)))
    before, gradient = bench.weights(adapter), adapter.row("grads").clone()
    error = bench.trainer.optim_step({adapter: AdamParams(**bad)})[adapter].error
    assert isinstance(error, DataError)
    assert next(iter(bad)) in str(error)
    assert all(torch.equal(t, before[name]) for name, t in bench.weights(adapter).items())
    assert torch.equal(adapter.row("grads"), gradient)


@pytest.mark.parametrize("config", [{"seed": 1 << 64}, {"alpha": float("nan")}, {"alpha": 0.0}])
def test_impossible_lora_settings_are_refused_and_leak_nothing(bench, config):
    with pytest.raises(AdapterError):
        bench.pool.create(LoraConfig(rank=2, **config))
    assert bench.pool.size_bytes == 0


def test_files_are_not_written_from_freed_or_frozen_handles(bench, tmp_path):
    adapter = bench.adapter()
    snapshot = bench.pool.snapshot(adapter)
    with pytest.raises(AdapterError, match="no optimizer state"):
        save_adapter(snapshot, tmp_path / "a", optimizer=True)
    bench.pool.free(snapshot)
    bench.pool.free(adapter)
    with pytest.raises(AdapterError, match="was freed"):
        save_adapter(adapter, tmp_path / "b")
    assert not list(tmp_path.iterdir())


class Mask:
    def __init__(self, answer):
        self.answer = answer

    def allowed(self, generated):
        return self.answer


@pytest.mark.parametrize("answer", [torch.ones(7, dtype=torch.bool), torch.ones(512), [True]])
def test_mask_of_the_wrong_kind_ends_its_own_request_only(bench, answer):
    sampler = bench.sampler()
    good, bad = sampler.submit(bench.request([1, 2])), sampler.submit(bench.request([3]), mask=Mask(answer))
    output = sampler.step()
    assert [f.request_id for f in output.failed] == [bad]
    assert "bool tensor of 512" in str(output.failed[0].error)
    assert list(bench.run_to_end(sampler)) == [good]


def test_prompts_of_a_group_are_shared_under_a_common_beginning(bench):
    """A system prompt in front of every prompt must not hide what the samples of each prompt share."""
    head, prompts = bench.tokens(40), [bench.tokens(200) for _ in range(3)]
    requests = [bench.request(head + p, n=8, max_tokens=6) for p in prompts]
    sampler = bench.sampler(cache_tokens=8192)
    for request in requests:
        sampler.submit(request)
    while sampler.scheduler.waiting or sampler.scheduler.running < 24:
        sampler.step()
    plan = sampler.scheduler.plan()
    (blocks,) = PagedAttention(sampler.cache, plan).blocks.values()
    assert sum(b.groups for b in blocks if b.prefix is not None) == 3
