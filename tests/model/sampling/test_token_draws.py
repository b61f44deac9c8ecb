"""From logits to tokens: each rule against a plain version of it, and a draw that only its own row decides."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model.draw_noise import log_exponentials, noise_keys
from palestra.model.sampling.logit_filters import DrawRow
from palestra.model.sampling.token_draws import DrawnTokens
from palestra.model.sampling.token_draws import draw as draw_on_device
from palestra.types import SamplingParams
from tests.properties import examples

VOCAB = 11


def row(seed=0, sample=0, prompt=(1, 2), generated=(), stop_ids=(), raw=False, allowed=None, **params) -> DrawRow:
    return DrawRow(SamplingParams(**params), seed, sample, prompt, list(generated), tuple(stop_ids), raw, allowed)


def draw(logits: torch.Tensor, rows: list[DrawRow], *, top: int = 0) -> DrawnTokens:
    return draw_on_device(logits, rows, top=top).read()


def random_logits(n: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def noise_of(drawn: DrawRow, vocabulary: int = VOCAB) -> torch.Tensor:
    return -log_exponentials(
        torch.from_numpy(noise_keys([(drawn.seed, drawn.sample, len(drawn.generated))])), vocabulary
    )[0]


def drawn_tokens(logits: torch.Tensor, n: int = 400, **params) -> set[int]:
    """What comes up in n draws of the one row of logits; enough for everything likelier than a percent or two."""
    rows = [row(seed=seed, **params) for seed in range(n)]
    return set(draw(logits.expand(n, -1), rows).tokens)


# The draw itself


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.25])
def test_only_draws_that_rounding_could_move_are_decided_by_the_row_alone(temperature: float):
    """Of two tokens the second is ahead by less than rounding in row 1; in row 0 nothing is close."""
    g = noise_of(row(), vocabulary=2) * temperature
    logits = torch.stack([torch.tensor([9.0, 0.0]), -g + torch.tensor([0.0, 1e-5])])
    asked = []

    def alone(number: int) -> torch.Tensor:
        asked.append(number)
        return torch.tensor([[-9.0, 9.0]])

    rows = [row(temperature=temperature)] * 2
    found = draw_on_device(logits, rows, logits_alone=alone).read()
    assert (found.tokens, asked) == ([0, 1], [1])
    assert found.logprobs[1] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("size", [16, 4096])
def test_few_draws_are_near_to_another_token_whatever_the_vocabulary(size: int):
    n = 1000
    asked = []

    def alone(number: int) -> torch.Tensor:
        asked.append(number)
        return torch.zeros(1, size)

    draw_on_device(torch.zeros(n, size), [row(seed=s) for s in range(n)], logits_alone=alone)
    assert len(asked) <= 2  # 0.1 expected


@examples(200)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e3)), min_size=1, max_size=200).filter(any),
    seed=st.integers(0, 2**63 - 1),
)
def test_tokens_without_probability_are_never_drawn(weights: list[float], seed: int):
    logits = torch.tensor([weights], dtype=torch.float64).log().float()
    assert logits[0, draw(logits, [row(seed=seed)]).tokens[0]] > -math.inf


def test_draws_follow_the_distribution():
    logits = random_logits(scale=1.0)
    n = 20_000
    tokens = draw(logits.expand(n, -1), [row(seed=s) for s in range(n)]).tokens
    expected = torch.softmax(logits[0].double(), -1).numpy() * n
    counts = np.bincount(tokens, minlength=VOCAB)
    assert ((counts - expected) ** 2 / expected).sum() < 35.6  # 10 degrees, p = 0.0001


def test_batch_mates_do_not_change_a_draw():
    logits = random_logits(40, vocab=300)
    rows = [row(seed=s, temperature=(1.0, 0.7, 0.0, 1.3)[s % 4], top_k=(-1, 20)[s % 2]) for s in range(40)]
    together = draw(logits, rows, top=3)
    for i, r in enumerate(rows):
        alone = draw(logits[i : i + 1], [r], top=3)
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)
        assert alone.top_ids[0] == together.top_ids[i]


# Temperature and what is reported


def test_temperature_zero_is_greedy():
    logits = random_logits(8)
    assert draw(logits, [row(seed=s, temperature=0.0) for s in range(8)]).tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 1.5, 10.0])
@pytest.mark.parametrize("raw", [False, True])
def test_reported_logprobs_are_those_of_the_scaled_distribution_and_raw_ones(temperature, raw):
    """Before top-k, top-p, min-p, penalties and bias, whatever those do to the draw."""
    logits = random_logits(6)
    rows = [
        row(seed=s, temperature=temperature, raw=raw, generated=[1, 2], **extra)
        for s, extra in enumerate(
            [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.5}, {"logit_bias": {3: 4.0}}]
        )
    ]
    result = draw(logits, rows, top=VOCAB)
    scaled = torch.log_softmax(logits.double() / temperature, -1)
    truth = torch.log_softmax(logits.double(), -1) if raw else scaled
    for i, token in enumerate(result.tokens):
        assert result.logprobs[i] == pytest.approx(scaled[i, token].item(), abs=1e-5)
        assert result.raw[i] == pytest.approx(truth[i, token].item(), abs=1e-5)
        assert result.top_logprobs[i] == pytest.approx(truth[i].sort(descending=True).values.tolist(), abs=1e-5)
        assert result.top_ids[i] == truth[i].argsort(descending=True).tolist()


def test_greedy_reports_the_models_own_distribution():
    logits = random_logits()
    result = draw(logits, [row(temperature=0.0)])
    assert result.logprobs[0] == pytest.approx(torch.log_softmax(logits[0], -1).max().item(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-40, 5e-324])
def test_temperature_next_to_zero_is_greedy_too(temperature):
    logits = random_logits(5)
    result = draw(logits, [row(seed=s, temperature=temperature) for s in range(5)])
    assert result.tokens == logits.argmax(-1).tolist()
    assert all(math.isfinite(x) for x in result.logprobs)


def test_temperature_changes_the_draw():
    logits = torch.tensor([[2.0, 0.0]])
    n = 2000
    shares = [
        np.mean(draw(logits.expand(n, -1), [row(seed=s, temperature=t) for s in range(n)]).tokens)
        for t in (0.5, 1.0, 4.0)
    ]
    expected = [1 / (1 + math.exp(2.0 / t)) for t in (0.5, 1.0, 4.0)]
    assert shares == pytest.approx(expected, abs=0.03)


# Filters, against plain versions


def plain_filter(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Top-k, then the smallest set of the rest that reaches top-p, then min-p of the likeliest. No ties in here."""
    scaled = [x / temperature for x in logits]
    kept = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if top_k > 0:
        kept = kept[:top_k]
    weights = {i: math.exp(scaled[i] - scaled[kept[0]]) for i in kept}
    total = sum(weights.values())
    nucleus, mass = [], 0.0
    for i in kept:
        if mass / total >= top_p and top_p < 1.0:
            break
        nucleus.append(i)
        mass += weights[i]
    return {i for i in nucleus if weights[i] >= min_p * weights[kept[0]]}


def near_an_edge(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Where rounding decides: either answer is right."""
    return any(
        plain_filter(logits, temperature, top_k, p, m) != plain_filter(logits, temperature, top_k, top_p, min_p)
        for p, m in (
            (top_p * (1 - 1e-5), min_p),
            (min(top_p * (1 + 1e-5), 1.0 if top_p == 1.0 else 1 - 1e-9), min_p),
            (top_p, min_p * (1 - 1e-5)),
            (top_p, min_p * (1 + 1e-5)),
        )
    )


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 10, 11, 100]),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    }
)


@examples(100, derandomize=True)
@given(filters=st.lists(FILTERS, min_size=1, max_size=4), seed=st.integers(0, 10_000))
def test_filters_keep_exactly_the_right_sets(filters, seed):
    """Rows of different settings in one batch, each drawn with many seeds: always the token that the plain set,
    renormalised, gives for the seed's u. A token too many or too few would move the others."""
    logits = random_logits(len(filters), seed=seed, scale=1.5)
    for i, wish in enumerate(filters):
        plain = logits[i].tolist()
        if near_an_edge(plain, **wish):
            continue
        kept = plain_filter(plain, **wish)
        crowd = [row(seed=s, **f) for s in range(60) for f in filters]
        drawn = draw(logits.repeat(60, 1), crowd).tokens[i :: len(filters)]
        assert set(drawn) <= kept
        for number, token in enumerate(drawn):
            g = noise_of(row(seed=number)).tolist()
            assert token == max(kept, key=lambda t: plain[t] / wish["temperature"] + g[t])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.49}, {0, 1}),
        ({"min_p": 0.51}, {0}),
        ({"min_p": 0.19}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of the two that are left, the first has two thirds
        ({"top_k": 2, "top_p": 0.7}, {0, 1}),
    ],
)
def test_filters_on_a_distribution_one_can_read(params, kept):
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert drawn_tokens(logits, **params) == kept


def test_top_p_reaches_beyond_the_first_candidates():
    """A flat vocabulary, where the nucleus is wider than what is looked at first."""
    vocab = 1000
    logits = torch.arange(vocab, 0, -1).float()[None] * 1e-4
    probabilities = torch.softmax(logits[0].double(), -1)
    edge = int((probabilities.cumsum(-1) < 0.9).sum())
    tokens = drawn_tokens(logits, n=3000, top_p=0.9)
    assert max(tokens) <= edge
    assert max(tokens) > edge - 20


def test_filtered_rows_leave_others_alone():
    logits = random_logits(2, vocab=50, scale=0.5).expand(2, -1)
    n = 300
    rows = [r for s in range(n) for r in (row(seed=s, top_k=1), row(seed=s))]
    tokens = draw(logits.repeat(n, 1), rows).tokens
    assert set(tokens[::2]) == {logits[0].argmax().item()}
    assert len(set(tokens[1::2])) > 30
    assert tokens[1::2] == draw(logits[1:2].expand(n, -1), [row(seed=s) for s in range(n)]).tokens


# Penalties, bias, minimum length, masks


def plain_penalties(logits, prompt, generated, repetition, presence, frequency):
    out = [float(x) for x in logits]
    for token in {*prompt, *generated}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, count in Counter(generated).items():
        out[token] -= presence + frequency * count
    return out


@examples(100, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    generated=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    repetition=st.sampled_from([1.0, 0.5, 1.7]),
    presence=st.sampled_from([0.0, 0.9, -0.6]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
)
def test_penalties_and_bias_equal_a_plain_version(seed, prompt, generated, repetition, presence, frequency, bias):
    logits = random_logits(seed=seed)
    requested = plain_penalties(logits[0], prompt, generated, repetition, presence, frequency)
    for token, value in bias.items():
        requested[token] += value
    params = {
        "prompt": prompt,
        "generated": generated,
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "logit_bias": bias,
    }
    greedy = draw(logits, [row(temperature=0.0, **params)]).tokens[0]
    assert requested[greedy] == pytest.approx(max(requested), abs=1e-5)
    n = 40
    drawn = draw(logits.expand(n, -1), [row(seed=s, temperature=0.8, **params) for s in range(n)]).tokens
    for number, token in enumerate(drawn):
        scores = torch.tensor(requested) / 0.8 + noise_of(row(seed=number, generated=generated))
        assert scores[token] == pytest.approx(scores.max().item(), abs=1e-5)


def test_penalties_come_before_filters():
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    assert drawn_tokens(logits, top_k=1) == {0}
    assert drawn_tokens(logits, top_k=1, generated=[0], presence_penalty=0.5) == {1}


def test_strong_bias_forces_or_forbids_a_token():
    logits = random_logits(scale=0.3)
    assert drawn_tokens(logits, logit_bias={4: 100.0}) == {4}
    assert drawn_tokens(logits, n=1500, logit_bias={4: -100.0}) == set(range(VOCAB)) - {4}


def test_logits_given_in_are_not_changed():
    logits = random_logits()
    before = logits.clone()
    draw(logits, [row(logit_bias={1: 5.0}, generated=[2], repetition_penalty=2.0, top_k=2, temperature=0.5)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_not_drawn_before_min_tokens(temperature):
    logits = torch.tensor([[5.0, 0.0, 4.0, 0.1]])
    params = {"temperature": temperature, "min_tokens": 3, "stop_ids": (0, 2)}
    assert drawn_tokens(logits, generated=[1, 1], **params) <= {1, 3}
    assert 0 in drawn_tokens(logits, generated=[1, 1, 1], **params)


def only(*tokens: int) -> torch.Tensor:
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[list(tokens)] = True
    return allowed


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.01}])
def test_mask_decides_what_may_come_next(params):
    logits = random_logits(scale=1.0)
    worst = logits[0].argsort()[:2].tolist()
    assert drawn_tokens(logits, allowed=only(*worst), **params) <= set(worst)


def test_mask_of_one_row_leaves_others_alone():
    logits = random_logits(vocab=VOCAB, scale=0.2).expand(300, -1)
    tokens = draw(logits, [row(seed=s, allowed=(only(3), None)[s % 2]) for s in range(300)]).tokens
    assert set(tokens[::2]) == {3}
    assert len(set(tokens[1::2])) == VOCAB


def test_mask_does_not_change_the_reported_logprobs():
    logits = random_logits()
    result = draw(logits, [row(allowed=only(3))])
    assert result.logprobs[0] == pytest.approx(torch.log_softmax(logits[0], -1)[3].item(), abs=1e-6)


def test_mask_that_insists_on_a_stop_token_wins_over_min_tokens():
    logits = random_logits()
    assert drawn_tokens(logits, allowed=only(3), stop_ids=(3,), min_tokens=9) == {3}
    assert drawn_tokens(logits, allowed=only(3, 4), stop_ids=(3,), min_tokens=9) == {4}
