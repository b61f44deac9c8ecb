"""What a sampling request may ask for: how its sequences end, streams, aborts, and what is refused."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from palestra.model import DataError
from palestra.types import SampleResult, StopReason


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [s.tokens for s in result.sequences]


# How a sequence ends


def greedy_tokens(bench, prompt, n) -> list[int]:
    return bench.sampler().generate([bench.request(prompt, temperature=0.0, max_tokens=n)])[0].sequences[0].tokens


def test_max_tokens_ends_a_sequence(bench):
    for n in (1, 2, 17):
        sequence = bench.sampler().generate([bench.request([1, 2], max_tokens=n)])[0].sequences[0]
        assert (len(sequence.tokens), len(sequence.logprobs), sequence.stop_reason) == (n, n, StopReason.LENGTH)


def test_stop_token_ends_a_sequence_and_is_part_of_it(bench):
    prompt = bench.tokens(9)
    free = greedy_tokens(bench, prompt, 12)
    stop = free[5]
    end = free.index(stop) + 1
    wish = bench.request(prompt, temperature=0.0, stop_token_ids=(stop, 511))
    sequence = bench.sampler().generate([wish])[0].sequences[0]
    assert sequence.tokens == free[:end]
    assert len(sequence.logprobs) == end
    assert sequence.stop_reason == StopReason.STOP


def test_stop_token_at_the_last_position_is_a_stop(bench):
    prompt = bench.tokens(9)
    free = greedy_tokens(bench, prompt, 4)
    end = free.index(free[3]) + 1
    wish = bench.request(prompt, temperature=0.0, max_tokens=end, stop_token_ids=(free[3],))
    assert bench.sampler().generate([wish])[0].sequences[0].stop_reason == StopReason.STOP


def test_end_of_sequence_stops_by_default_and_empty_stop_means_nothing_does(bench):
    """The bias makes every draw an end token: with `stop=[]` even those go on."""
    eos = bench.model.spec.eos_token_ids
    assert len(eos) == 2  # generation_config.json adds one
    for token in eos:
        bias = {token: 1e4}
        default, none = bench.sampler().generate(
            [
                bench.request([1], logit_bias=bias, stop_token_ids=None),
                bench.request([1], logit_bias=bias, stop_token_ids=()),
            ]
        )
        assert default.sequences[0].tokens == [token]
        assert default.sequences[0].stop_reason == StopReason.STOP
        assert none.sequences[0].tokens == [token] * 12
        assert none.sequences[0].stop_reason == StopReason.LENGTH


def test_min_tokens_holds_stop_tokens_back(bench):
    eos = bench.model.spec.eos_token_ids
    wish = bench.request([1], logit_bias=dict.fromkeys(eos, 50.0), stop_token_ids=None, min_tokens=5)
    sequence = bench.sampler().generate([wish])[0].sequences[0]
    assert len(sequence.tokens) == 6
    assert sequence.tokens[-1] in eos
    assert not set(sequence.tokens[:-1]) & set(eos)


def text_tokens(bench, text: str) -> list[int]:
    return bench.model.tokenizer.encode(text).ids


class Script:
    """A mask that lets exactly these tokens come, one after the other."""

    def __init__(self, tokens: list[int], vocab: int) -> None:
        self.tokens, self.vocab = tokens, vocab

    def allowed(self, generated):
        allowed = torch.zeros(self.vocab, dtype=torch.bool)
        allowed[self.tokens[len(generated)]] = True
        return allowed


class Nothing:
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def allowed(self, generated):
        return torch.zeros(self.vocab, dtype=torch.bool)


def scripted(bench, tokens: list[int], **options) -> SampleResult:
    sampler = bench.sampler()
    wish = bench.request([1, 2], max_tokens=len(tokens), **options)
    number = sampler.submit(wish, mask=Script(tokens, bench.vocab))
    return bench.run_to_end(sampler)[number]


def test_mask_reaches_the_draw_through_the_sampler(bench):
    tokens = bench.tokens(15)
    assert scripted(bench, tokens).sequences[0].tokens == tokens
    assert scripted(bench, tokens, temperature=0.0).sequences[0].tokens == tokens


def test_mask_that_breaks_ends_its_own_request_only(bench):
    sampler, good = bench.sampler(), bench.request([1, 2, 3], n=3, max_tokens=10)
    alone = bench.sampler().generate([good])[0]
    survivor = sampler.submit(good)
    raises = sampler.submit(bench.request([4, 5], n=2, max_tokens=10), mask=Script([7, 8], bench.vocab))
    empty = sampler.submit(bench.request([6], max_tokens=10), mask=Nothing(bench.vocab))
    failed, done = {}, {}
    while sampler.has_work:
        output = sampler.step()
        failed.update((f.request_id, f.error) for f in output.failed)
        done.update((f.request_id, f.result) for f in output.finished)
    assert isinstance(failed[raises], IndexError)
    assert "allows none" in str(failed[empty])
    assert list(done) == [survivor]
    assert [q.tokens for q in done[survivor].sequences] == [q.tokens for q in alone.sequences]
    bench.check_nothing_left(sampler, adapters=True)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_grammars_and_stops_are_the_same_when_tokens_are_read_a_step_late(bench, runs_ahead):
    tokens = bench.tokens(15)
    sampler = bench.sampler(runs_ahead=runs_ahead)
    masked = sampler.submit(bench.request([1, 2], max_tokens=15), mask=Script(tokens, bench.vocab))
    stopped = sampler.submit(bench.request([1, 2], stop_token_ids=(tokens[4],)), mask=Script(tokens, bench.vocab))
    done = bench.run_to_end(sampler)
    assert done[masked].sequences[0].tokens == tokens
    assert done[stopped].sequences[0].tokens == tokens[: tokens.index(tokens[4]) + 1]
    bench.check_nothing_left(sampler)


def test_an_aborted_request_leaves_no_unread_tokens_behind(bench):
    sampler = bench.sampler(runs_ahead=True)
    number = sampler.submit(bench.request([1, 2, 3], max_tokens=50))
    sampler.step()
    sampler.step()
    sampler.abort(number)
    assert not sampler.has_work
    assert len(sampler.generate([bench.request([1, 2, 3], max_tokens=5)])[0].sequences[0].tokens) == 5


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_step_that_fails_with_tokens_unread_ends_those_in_it_only(bench, steps, monkeypatch):
    """The one whose last token was drawn already gets it."""
    sampler = bench.sampler(runs_ahead=True)
    short = sampler.submit(bench.request([1, 2, 3], max_tokens=steps))
    long = sampler.submit(bench.request([4, 5], max_tokens=50))
    for _ in range(steps):
        sampler.step()
    monkeypatch.setattr(sampler, "_input_tokens", lambda plan: 1 / 0)
    failed = sampler.step().failed
    assert [(f.request_id, type(f.error)) for f in failed] == [(long, ZeroDivisionError)]
    assert list(bench.run_to_end(sampler)) == [short]
    bench.check_nothing_left(sampler)


def test_generate_is_refused_beside_requests_in_flight(bench):
    sampler = bench.sampler()
    number = sampler.submit(bench.request([1, 2]))
    with pytest.raises(DataError, match=r"submit\(\) and step\(\)"):
        sampler.generate([bench.request([3])])
    assert list(bench.run_to_end(sampler)) == [number]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("Answer: 42\n\nQuestion: what", ("\n\nQuestion",)),
        ("one two three four", ("thr",)),
        ("one two three four", ("never", "e f")),
        ("x = 1 </tool_call> after", ("</tool_call>",)),
        ("the end <|im_end|> more", ("<|im_end|>",)),
        ("naïve café über — naïve", ("fé ü",)),
        ("日本語のテキスト", ("語の",)),
        ("emoji 🙂🙃 done", ("🙃",)),
        ("aaaaaaaaaaaaab and more", ("aab",)),
    ],
)
def test_stop_string_ends_a_sequence_at_the_token_that_completes_it(bench, text, stops):
    tokens = text_tokens(bench, text)
    decode = bench.model.tokenizer.decode
    ends = [
        i for i in range(1, len(tokens) + 1) if any(s in decode(tokens[:i], skip_special_tokens=False) for s in stops)
    ]
    assert 1 < ends[0] < len(tokens)
    sequence = scripted(bench, tokens, stop_strings=stops).sequences[0]
    assert sequence.tokens == tokens[: ends[0]]
    assert sequence.stop_reason == StopReason.STOP
    assert any(s in decode(sequence.tokens, skip_special_tokens=False) for s in stops), "its text is included"


def test_stop_string_spanning_many_tokens_is_found(bench):
    """One token per byte: as long a span as there can be."""
    text = "the STOPPING STRING is here and on"
    tokens = [bench.model.tokenizer.token_to_id("Ġ" if c == " " else c) for c in text]
    assert None not in tokens
    sequence = scripted(bench, tokens, stop_strings=("STOPPING STRING is",)).sequences[0]
    assert bench.model.tokenizer.decode(sequence.tokens) == "the STOPPING STRING is"


def byte_tokens(bench, text: str) -> list[int]:
    """One token per byte, in the alphabet of byte-level BPE: most of these decode to nothing on their own."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    ids = [bench.model.tokenizer.token_to_id(letters[b]) for b in text.encode()]
    assert None not in ids
    return ids


@pytest.mark.parametrize("stop", ["é", "語", "🙃", "本語é", "🙂🙃", "→ 語"])
def test_stop_string_whose_characters_are_split_over_tokens_ends_at_its_last_byte(bench, stop):
    before = "日本é日本 🙂🙂 日"
    tokens = byte_tokens(bench, before.replace(stop, "") + stop + "é 語 after")
    end = len(before.replace(stop, "").encode()) + len(stop.encode())
    assert scripted(bench, tokens, stop_strings=("never", stop)).sequences[0].tokens == tokens[:end]


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Gemma have it: what is no word is bytes, and a run of bytes is text as a whole or not at all."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)} | {"word": 257, " ": 258}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


STOPS = ("é", "語", "🙃", "本é", "日é")
BEFORE = ("", "日", "本日", "日本日é日", "🙂🙂", "é🙂本", "日本日本日本日本")
EVERY_DAY = {(BEFORE[n], STOPS[n % len(STOPS)]) for n in range(len(BEFORE))}


@pytest.mark.parametrize(
    ("before", "stop"),
    [pytest.param(*one, marks=() if one in EVERY_DAY else pytest.mark.slow) for one in product(BEFORE, STOPS)],
)
def test_stop_string_is_found_behind_a_run_of_bytes(bench, before, stop):
    sampler = bench.sampler(tokenizer=byte_fallback_tokenizer())
    before = before.replace(stop, "")
    tokens = [257, 258, *(b + 1 for b in (before + stop + "日").encode())]
    end = len(tokens) - 3
    wish = bench.request([1, 2], max_tokens=len(tokens), stop_strings=(stop,))
    number = sampler.submit(wish, mask=Script(tokens, bench.vocab))
    sequence = bench.run_to_end(sampler)[number].sequences[0]
    assert (sequence.tokens, sequence.stop_reason) == (tokens[:end], StopReason.STOP)


def test_stop_string_in_the_prompt_does_not_count(bench):
    prompt = text_tokens(bench, "stop here: one")
    tokens = text_tokens(bench, " two three")
    sampler = bench.sampler()
    wish = bench.request(prompt, max_tokens=len(tokens), stop_strings=("one", "stop here"))
    number = sampler.submit(wish, mask=Script(tokens, bench.vocab))
    assert bench.run_to_end(sampler)[number].sequences[0].tokens == tokens


def test_context_end_is_length(get_bench):
    bench = get_bench(overrides={"max_position_embeddings": 32})
    prompt = bench.tokens(20)
    for max_tokens in (None, 500):
        sequence = bench.sampler().generate([bench.request(prompt, max_tokens=max_tokens)])[0].sequences[0]
        assert (len(sequence.tokens), sequence.stop_reason) == (12, StopReason.LENGTH)
    sequence = bench.sampler().generate([bench.request(bench.tokens(31), max_tokens=None)])[0].sequences[0]
    assert (len(sequence.tokens), sequence.stop_reason) == (1, StopReason.LENGTH)


def test_open_end_is_bounded_by_the_cache(bench):
    sampler = bench.sampler(cache_tokens=64)
    sequence = sampler.generate([bench.request(bench.tokens(20), max_tokens=None)])[0].sequences[0]
    assert (len(sequence.tokens), sequence.stop_reason) == (44, StopReason.LENGTH)
    bench.check_nothing_left(sampler)


def test_samples_of_a_group_end_each_on_its_own(bench):
    prompt = bench.tokens(6)
    free = tokens_of(bench.sampler().generate([bench.request(prompt, n=6, max_tokens=20)])[0])
    stop = free[0][3]
    result = bench.sampler().generate([bench.request(prompt, n=6, max_tokens=20, stop_token_ids=(stop,))])[0]
    for unbound, sequence in zip(free, result.sequences, strict=True):
        end = unbound.index(stop) + 1 if stop in unbound else 20
        assert sequence.tokens == unbound[:end]
        assert sequence.stop_reason == (StopReason.STOP if stop in unbound else StopReason.LENGTH)


# Streams and aborts


def test_every_token_is_told_as_it_is_drawn(bench):
    sampler = bench.sampler()
    numbers = [sampler.submit(bench.request(bench.tokens(n), n=2, seed=n)) for n in (4, 40)]
    response: dict[tuple[int, int], list[tuple[int, float]]] = {}
    done = {}
    while sampler.has_work:
        output = sampler.step()
        for event in output.tokens:
            response.setdefault((event.request_id, event.sample), []).append((event.token, event.logprob))
        done.update((f.request_id, f.result) for f in output.finished)
    for number in numbers:
        for i, sequence in enumerate(done[number].sequences):
            assert response[number, i] == list(zip(sequence.tokens, sequence.logprobs, strict=True))


def test_step_with_nothing_to_do_does_nothing(bench):
    output = bench.sampler().step()
    assert (output.tokens, output.finished) == ([], [])


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_abort_returns_what_there_is_and_frees_the_pages(bench, steps):
    adapter = bench.adapter()
    sampler = bench.sampler(prefill_tokens=16)
    wish, other = bench.request(bench.tokens(30), n=3, max_tokens=30), bench.request(bench.tokens(30), seed=8)
    whole = bench.sampler().generate([wish, other], [adapter, None])
    number, bystander = sampler.submit(wish, adapter), sampler.submit(other)
    for _ in range(steps):
        sampler.step()
    result = sampler.abort(number)
    assert result is not None
    for got, full in zip(result.sequences, whole[0].sequences, strict=True):
        assert got.stop_reason == StopReason.ABORT
        assert got.tokens == full.tokens[: len(got.tokens)]
        assert len(got.logprobs) == len(got.tokens) == max(0, steps - 1)
    assert tokens_of(bench.run_to_end(sampler)[bystander]) == tokens_of(whole[1])
    bench.pool.free(adapter)
    bench.check_nothing_left(sampler, adapters=True)


def test_abort_keeps_what_already_ended(bench):
    prompt = bench.tokens(6)
    free = tokens_of(bench.sampler().generate([bench.request(prompt, n=2, max_tokens=20)])[0])
    stop = next(t for t in free[0] if t not in free[1])
    sampler = bench.sampler()
    number = sampler.submit(bench.request(prompt, n=2, max_tokens=20, stop_token_ids=(stop,)))
    for _ in range(free[0].index(stop) + 2):
        sampler.step()
    result = sampler.abort(number)
    assert result is not None
    assert [s.stop_reason for s in result.sequences] == [StopReason.STOP, StopReason.ABORT]
    bench.check_nothing_left(sampler)


def test_abort_of_a_request_that_is_not_here_is_none(bench):
    sampler = bench.sampler()
    number = sampler.submit(bench.request([1]))
    bench.run_to_end(sampler)
    assert sampler.abort(number) is None
    assert sampler.abort(12345) is None


# What an engine watches


def test_sampler_tells_how_busy_it_is(bench):
    sampler = bench.sampler(page_size=8, cache_tokens=160, max_rows=2, prefill_tokens=32)
    assert (sampler.running, sampler.waiting, sampler.kv_used) == (0, 0, 0.0)
    first = sampler.submit(bench.request(bench.tokens(16), n=2, max_tokens=8))
    sampler.submit(bench.request(bench.tokens(16), max_tokens=8))
    assert (sampler.running, sampler.waiting, sampler.kv_used) == (0, 3, 0.0)
    sampler.step()
    assert (sampler.running, sampler.waiting) == (2, 1)
    assert sampler.kv_used == pytest.approx(2 / 20)
    sampler.step()
    assert sampler.kv_used == pytest.approx(4 / 20), "two shared pages, and one each"
    sampler.abort(first)
    assert (sampler.running, sampler.waiting, sampler.kv_used) == (0, 1, 0.0)
    bench.run_to_end(sampler)
    assert (sampler.running, sampler.waiting, sampler.kv_used) == (0, 0, 0.0)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": [512]}, "token id.* outside the vocabulary of 512"),
        ({"prompt": [-1]}, "outside the vocabulary"),
        ({"prompt": [1, 2.0]}, "whole number"),
        ({"prompt": [1] * 4096}, "4096 tokens, which leaves no room in a context of 4096"),
        ({"prompt": [1] * 3000}, "3012 tokens.*cache holds 2048"),
        ({"n": 0}, "num_samples is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e308}, "temperature is 1e.308; it must be from 0 to 100"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"logit_bias": {512: 1.0}}, "logit_bias names a token outside the vocabulary"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"logit_bias": {5: math.inf}}, "logit_bias"),
        ({"stop_strings": ("",)}, "a stop string is empty"),
        ({"topk_logprobs": 513}, "at most 512"),
        ({"topk_prompt_logprobs": 513}, "at most 512"),
        ({"topk_logprobs": -1}, "topk_logprobs|top-k logprobs"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs|top-k logprobs"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_request_is_refused_before_it_costs_anything(bench, options, message):
    sampler, adapter = bench.sampler(), bench.adapter()
    with pytest.raises(DataError, match=message):
        sampler.submit(bench.request(**{"prompt": [1], **options}), adapter)
    bench.pool.free(adapter)
    bench.check_nothing_left(sampler, adapters=True)


def test_stop_strings_need_a_tokenizer(bench):
    with pytest.raises(DataError, match="stop strings need a tokenizer"):
        bench.sampler(tokenizer=None).submit(bench.request([1], stop_strings=("x",)))


def test_bad_request_among_good_ones_leaves_nothing_behind(bench):
    sampler = bench.sampler()
    with pytest.raises(DataError):
        sampler.generate([bench.request([1, 2]), bench.request([])])
    assert not sampler.has_work


def test_everything_is_freed_in_the_end(bench):
    adapters = [bench.adapter(seed=i) for i in range(3)]
    sampler = bench.sampler(page_size=8, cache_tokens=256)
    sampler.generate(
        [bench.request(bench.tokens(n), n=1 + n % 3, seed=n) for n in (3, 30, 7, 60, 12)], [*adapters, None, None]
    )
    for adapter in adapters:
        bench.pool.free(adapter)
    bench.check_nothing_left(sampler, adapters=True)
