"""What a request may ask about its own prompt, against a plain log_softmax over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model import DataError, encode
from palestra.model.draw_noise import uniform_grid
from palestra.model.sampling.token_draws import draw_many
from palestra.model.training import head
from palestra.types import SampleResult, TensorData


def truth(bench, prompt, adapter=None) -> np.ndarray:
    """[len - 1, vocabulary]: row i predicts token i + 1."""
    return torch.log_softmax(bench.logits([prompt], [adapter])[0][:-1].double(), -1).numpy()


def array(tensor: TensorData | None) -> np.ndarray:
    assert tensor is not None
    assert tensor.crow_indices is None
    return np.frombuffer(tensor.data, "<i8" if tensor.dtype == "int64" else "<f4").reshape(tensor.shape)


def sparse(ids: np.ndarray) -> TensorData:
    """CSR of the cells that are not -1, as the SDK's `from_torch_sparse(ids, pad_value=-1)` makes it."""
    counts, (rows, columns) = (ids != -1).sum(1), np.nonzero(ids != -1)
    return TensorData(
        data=ids[rows, columns].tobytes(),
        dtype="int64",
        shape=ids.shape,
        crow_indices=np.concatenate([[0], np.cumsum(counts)]).astype("<i8").tobytes(),
        col_indices=columns.astype("<i8").tobytes(),
    )


def targets(bench, rows: int, k: int, *, from_row: int = 0) -> np.ndarray:
    ids = bench.rng.integers(0, bench.vocab, (rows, k))
    ids[bench.rng.random((rows, k)) < 0.6] = -1
    ids[:from_row] = -1
    ids[from_row, 0] = 0  # an id like any other, whatever sparse tensors think of zeros
    return ids


def ask(bench, sampler, prompt, adapter=None, **options) -> SampleResult:
    return sampler.generate([bench.request(prompt, max_tokens=1, **options)], adapter)[0]


# Chosen tokens


@pytest.mark.parametrize("prefill_tokens", [7, 2048])
@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
def test_target_logprobs_are_those_of_the_named_tokens(bench, prefill_tokens, with_adapter):
    adapter = bench.adapter(noise=0.05) if with_adapter else None
    prompt = bench.tokens(30)
    ids, logp = targets(bench, 29, 4), truth(bench, prompt, adapter)
    expected = np.where(ids < 0, 0.0, np.take_along_axis(logp, ids.clip(0), 1))
    sampler = bench.sampler(prefill_tokens=prefill_tokens)
    dense = ask(bench, sampler, prompt, adapter, target_prompt_logprobs=encode(ids)).target_prompt_logprobs
    assert dense is not None
    assert (dense.dtype, dense.shape) == ("float32", (29, 4))
    assert np.abs(array(dense) - expected).max() < 1e-5
    request = sparse(ids)
    listed = ask(bench, sampler, prompt, adapter, target_prompt_logprobs=request).target_prompt_logprobs
    assert listed is not None
    assert (listed.dtype, listed.shape) == ("float32", (29, 4))
    assert (listed.crow_indices, listed.col_indices) == (request.crow_indices, request.col_indices)
    assert np.abs(np.frombuffer(listed.data, "<f4") - expected[ids != -1]).max() < 1e-5


def test_sparse_targets_may_be_very_wide_and_hold_skips(bench):
    """Nothing as large as the shape is ever made."""
    request = TensorData(
        data=np.array([5, -1, 7], "<i8").tobytes(),
        dtype="int64",
        shape=(3, 1 << 50),
        crow_indices=np.array([0, 0, 2, 3], "<i8").tobytes(),
        col_indices=np.array([3, 1 << 49, 0], "<i8").tobytes(),
    )
    prompt = bench.tokens(4)
    got = ask(bench, bench.sampler(), prompt, target_prompt_logprobs=request).target_prompt_logprobs
    assert got is not None
    logp = truth(bench, prompt)
    assert np.frombuffer(got.data, "<f4") == pytest.approx([logp[1, 5], 0.0, logp[2, 7]], abs=1e-5)


def test_rows_before_the_first_named_token_come_from_the_cache(bench):
    sampler, prompt = bench.sampler(page_size=8), bench.tokens(50)
    ask(bench, sampler, prompt)
    ids = targets(bench, 49, 2, from_row=33)
    result = ask(bench, sampler, prompt, target_prompt_logprobs=encode(ids))
    assert result.cached_prompt_tokens == 32
    expected = np.where(ids < 0, 0.0, np.take_along_axis(truth(bench, prompt), ids.clip(0), 1))
    assert np.abs(array(result.target_prompt_logprobs) - expected).max() < 1e-5


# The last n


@pytest.mark.parametrize(("last_n", "cached"), [(1, 48), (9, 40), (10, 32), (49, 0)])
def test_only_the_last_n_are_scored_and_the_rest_is_cached(bench, last_n, cached):
    sampler, prompt = bench.sampler(page_size=8), bench.tokens(50)
    options = {"prompt_logprobs": True, "topk_prompt_logprobs": 3}
    whole = ask(bench, sampler, prompt, **options)
    part = ask(bench, sampler, prompt, prompt_logprobs_last_n=last_n, **options)
    assert part.cached_prompt_tokens == cached
    assert part.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert part.prompt_logprobs[:-last_n] == [None] * (50 - last_n)
    assert part.prompt_logprobs[-last_n:] == pytest.approx(whole.prompt_logprobs[-last_n:], abs=1e-5)
    assert part.topk_prompt_logprobs is not None
    assert whole.topk_prompt_logprobs is not None
    assert part.topk_prompt_logprobs[:-last_n] == [None] * (50 - last_n)
    for a, b in zip(part.topk_prompt_logprobs[-last_n:], whole.topk_prompt_logprobs[-last_n:], strict=True):
        assert a is not None
        assert b is not None
        assert a.token_ids == b.token_ids


def test_last_n_does_not_limit_targets_and_draws(bench):
    prompt = bench.tokens(20)
    ids = targets(bench, 19, 2)
    options = {"target_prompt_logprobs": encode(ids), "prompt_alt_tokens_k": 2}
    free = ask(bench, bench.sampler(), prompt, **options)
    result = ask(bench, bench.sampler(), prompt, prompt_logprobs=True, prompt_logprobs_last_n=4, **options)
    assert result.prompt_logprobs is not None
    assert [x is None for x in result.prompt_logprobs] == [True] * 16 + [False] * 4
    assert result.target_prompt_logprobs == free.target_prompt_logprobs
    assert (result.prompt_alt_tokens, result.prompt_alt_logprobs) == (free.prompt_alt_tokens, free.prompt_alt_logprobs)


# Draws


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_draws_in_place_of_prompt_tokens_have_the_model_s_logprobs(bench, temperature):
    adapter, prompt = bench.adapter(noise=0.05), bench.tokens(30)
    options = {"prompt_alt_tokens_k": 5, "temperature": temperature, "top_k": 1}  # filters are for what is generated
    result = ask(bench, bench.sampler(), prompt, adapter, **options)
    ids, logprobs = array(result.prompt_alt_tokens), array(result.prompt_alt_logprobs)
    assert (ids.dtype, ids.shape, logprobs.dtype, logprobs.shape) == (np.int64, (29, 5), np.float32, (29, 5))
    logp = truth(bench, prompt, adapter)
    assert np.abs(logprobs - np.take_along_axis(logp, ids, 1)).max() < 1e-5
    if temperature == 0.0:
        assert (ids == logp.argmax(1)[:, None]).all()
    else:
        assert len({tuple(row) for row in ids.tolist()}) > 20
    in_pieces = ask(bench, bench.sampler(prefill_tokens=4), prompt, adapter, **options)
    assert (array(in_pieces.prompt_alt_tokens) == ids).mean() > 0.99  # a draw may lie within rounding of a border
    other = ask(bench, bench.sampler(), prompt, adapter, **{**options, "seed": 1})
    assert (array(other.prompt_alt_tokens) != ids).any() == (temperature > 0)


@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.3, 1.0, 2.5]), size=st.integers(2, 300))
def test_draws_follow_the_distribution(seed, temperature, size):
    n = 20_000
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * 3
    u = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).expand(2, n).contiguous()
    ids = draw_many(logits, temperature, u)
    shares = torch.stack([torch.bincount(row, minlength=size) for row in ids]) / n
    assert (shares - torch.softmax(logits.double() / temperature, -1)).abs().max() < 2 / n


def test_numbers_behind_the_draws_are_uniform_and_their_own():
    u = uniform_grid(7, 0, 400, 50)
    assert u.shape == (400, 50)
    assert len(u.unique()) == u.numel()
    assert abs(u.mean().item() - 0.5) < 0.01
    assert torch.histc(u.float(), 10, 0, 1).sub(2000).abs().max() < 200
    assert torch.equal(uniform_grid(7, 100, 110, 3), u[100:110, :3])


# Together


def test_scores_survive_preemption_and_company(bench):
    """A cache too small for the crowd: prompts are computed again, and say the same."""
    prompts = [bench.tokens(n) for n in (40, 25, 60, 33)]
    extra = [
        {"prompt_logprobs": True},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 5},
        {"target_prompt_logprobs": encode(targets(bench, 59, 3, from_row=20))},
        {"prompt_alt_tokens_k": 2, "temperature": 0.0},
    ]
    wishes = [bench.request(p, n=2, max_tokens=20, **e) for p, e in zip(prompts, extra, strict=True)]
    alone = [bench.sampler().generate([w])[0] for w in wishes]
    sampler = bench.sampler(page_size=4, cache_tokens=96, prefill_tokens=11)
    for a, b in zip(alone, sampler.generate(wishes), strict=True):
        assert [s.tokens for s in a.sequences] == [s.tokens for s in b.sequences]
        assert [x is None for x in a.prompt_logprobs or []] == [x is None for x in b.prompt_logprobs or []]
        numbers = [[x or 0.0 for x in r.prompt_logprobs or []] for r in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)
        if a.target_prompt_logprobs is not None:
            difference = array(a.target_prompt_logprobs) - array(b.target_prompt_logprobs)
            assert np.abs(difference).max() < 1e-5
        assert a.prompt_alt_tokens == b.prompt_alt_tokens
    assert sampler.scheduler.preemptions > 0
    bench.check_nothing_left(sampler)


def test_nothing_is_said_that_was_not_asked(bench):
    plain = ask(bench, bench.sampler(), [1, 2, 3])
    assert (plain.prompt_logprobs, plain.topk_prompt_logprobs) == (None, None)
    assert (plain.target_prompt_logprobs, plain.prompt_alt_tokens, plain.prompt_alt_logprobs) == (None, None, None)


def test_prompt_of_one_token_has_nothing_to_draw(bench):
    result = ask(bench, bench.sampler(), [1], prompt_alt_tokens_k=3, prompt_logprobs=True)
    assert (array(result.prompt_alt_tokens).shape, array(result.prompt_alt_logprobs).shape) == ((0, 3), (0, 3))
    assert result.prompt_logprobs == [None]


def test_aborted_request_says_what_it_knows(bench):
    sampler, prompt = bench.sampler(prefill_tokens=8), bench.tokens(20)
    ids = np.full((19, 1), 3)
    wish = bench.request(prompt, prompt_logprobs=True, target_prompt_logprobs=encode(ids), prompt_alt_tokens_k=1)
    number = sampler.submit(wish)
    sampler.step()
    result = sampler.abort(number)
    assert result is not None
    assert [x is None for x in result.prompt_logprobs or []] == [True] + [False] * 8 + [True] * 11
    assert np.isnan(array(result.target_prompt_logprobs)).ravel().tolist() == [False] * 8 + [True] * 11
    assert (array(result.prompt_alt_tokens) == -1).ravel().tolist() == [False] * 8 + [True] * 11


# Refusals


def csr(values: list[int], crow: list[int], columns: list[int], shape: tuple[int, ...]) -> TensorData:
    data, crow_indices, col_indices = (np.array(x, "<i8").tobytes() for x in (values, crow, columns))
    return TensorData(data=data, dtype="int64", shape=shape, crow_indices=crow_indices, col_indices=col_indices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "last_n is 0; .*from 1 to 3"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "last_n is 4; .*from 1 to 3"),
        ({"prompt_logprobs_last_n": 2}, "request those too"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k.*at most 512"),
        ({"prompt_alt_tokens_k": 513}, "prompt_alt_tokens_k.*at most 512"),
        ({"target_prompt_logprobs": encode(np.ones((3, 1), np.float32))}, "dtype must be int64"),
        ({"target_prompt_logprobs": encode(np.ones((4, 1), np.int64))}, r"shape \[4, 1\]; it must be \[3, K\]"),
        ({"target_prompt_logprobs": encode(np.ones(3, np.int64))}, r"shape \[3\]; it must be \[3, K\]"),
        ({"target_prompt_logprobs": encode(np.full((3, 2), -1))}, "names no token"),
        ({"target_prompt_logprobs": encode(np.full((3, 0), -1))}, "names no token"),
        ({"target_prompt_logprobs": encode(np.full((3, 1), 512))}, "in the vocabulary of 512"),
        ({"target_prompt_logprobs": encode(np.array([[1], [-2], [1]]))}, "in the vocabulary of 512"),
        ({"target_prompt_logprobs": TensorData(data=b"1234567", dtype="int64", shape=(3, 1))}, "do not fill"),
        ({"target_prompt_logprobs": TensorData(data=bytes(16), dtype="int64", shape=(3, 1))}, "do not fill"),
        ({"target_prompt_logprobs": csr([1], [0, 0, 1], [0], (3, 1))}, "do not fill"),
        ({"target_prompt_logprobs": csr([1], [0, 2, 1, 1], [0], (3, 1))}, "do not fill"),
        ({"target_prompt_logprobs": csr([1, 1], [0, 0, 0, 1], [0], (3, 1))}, "do not fill"),
        ({"target_prompt_logprobs": csr([1], [0, 0, 0, 1], [1], (3, 1))}, "do not fill"),
        ({"target_prompt_logprobs": csr([1], [0, 0, 0, 1], [-1], (3, 1))}, "do not fill"),
        ({"target_prompt_logprobs": csr([], [], [], (3, 1))}, "do not fill"),
    ],
)
def test_bad_question_is_refused_in_one_sentence(bench, options, message):
    sampler = bench.sampler()
    with pytest.raises(DataError, match=message):
        sampler.submit(bench.request([1, 2, 3, 4], **options))
    bench.check_nothing_left(sampler, adapters=True)


def test_large_vocabulary_is_never_held_for_a_whole_prompt(bench, monkeypatch):
    """Chunks of a few rows say what one chunk says."""
    prompt, ids = bench.tokens(40), targets(bench, 39, 3)
    options = {"target_prompt_logprobs": encode(ids), "prompt_logprobs": True, "topk_prompt_logprobs": 2}
    whole = ask(bench, bench.sampler(), prompt, prompt_alt_tokens_k=2, temperature=0.0, **options)
    monkeypatch.setattr(head, "CHUNK_CELLS", {"cpu": 1})
    monkeypatch.setattr(head, "MIN_CHUNK_ROWS", 5)
    sizes = []
    plain = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, dim: sizes.append(len(x)) or plain(x, dim))
    pieces = ask(bench, bench.sampler(), prompt, prompt_alt_tokens_k=2, temperature=0.0, **options)
    assert max(sizes) <= 5
    assert np.abs(array(pieces.target_prompt_logprobs) - array(whole.target_prompt_logprobs)).max() < 1e-5
    assert pieces.prompt_alt_tokens == whole.prompt_alt_tokens
    assert pieces.prompt_logprobs is not None
    assert pieces.prompt_logprobs[1:] == pytest.approx((whole.prompt_logprobs or [])[1:], abs=1e-5)
