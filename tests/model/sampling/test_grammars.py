"""Whatever a model draws by a grammar follows it; nobody else notices."""

from __future__ import annotations

import json
import re
from functools import partial

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from palestra.model import DataError
from palestra.model.sampling.grammars import KEPT_CHARACTERS, Grammars
from palestra.types import Grammar, GrammarKind, StopReason

slow = partial(pytest.param, marks=pytest.mark.slow)
HOT = {"temperature": 1.5, "max_tokens": 300}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "<think>", "<|im_end|>"]}, "maxItems": 3},
        "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
    },
    "required": ["name", "age", "tags", "pet"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "weight": {"type": "number"}},
            "required": ["kind", "weight"],
            "additionalProperties": False,
        }
    },
}


AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z ]/"


def regex(text: str, **options) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text, **options)


def lark(text: str, **options) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, text=text, **options)


def json_schema(schema: dict, **options) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema), **options)


def wide(n: int, name: str = "p") -> dict:
    """An object of n properties, each of which may be left out."""
    return {"type": "object", "properties": {f"{name}{i}": {"type": "integer"} for i in range(n)}}


@pytest.fixture
def draw(bench):
    """`draw(grammar, n, …)`: sequences of the random model, and their texts without the end of the turn."""
    end = bench.model.tokenizer.token_to_id("<|im_end|>")

    def draw(grammar: Grammar, n: int = 1, **options):
        options = {"stop_token_ids": (end,), **HOT, **options}
        result = bench.sampler().generate([bench.request([1, 2, 3], n=n, grammar=grammar, **options)])[0]
        ended = [s.tokens[:-1] if s.tokens[-1] in options["stop_token_ids"] else s.tokens for s in result.sequences]
        return result.sequences, [bench.model.tokenizer.decode(t, skip_special_tokens=False) for t in ended]

    return draw


def test_what_is_drawn_satisfies_the_schema(draw):
    sequences, texts = draw(json_schema(PERSON), n=4)
    assert {s.stop_reason for s in sequences} == {StopReason.STOP}
    assert len({*texts}) == 4, "each goes its own way"
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_white_space_in_json_is_free_and_has_an_end(draw):
    sequences, texts = draw(
        json_schema({"type": "array", "items": {"const": 1}, "maxItems": 3}), n=32, temperature=50.0
    )
    assert {s.stop_reason for s in sequences} == {StopReason.STOP}
    assert all(json.loads(text) == [1] * len(json.loads(text)) for text in texts)
    assert any(re.search(r"\n +\S", text) for text in texts)
    assert any(", " in text for text in texts)


def test_regular_expression_and_grammar_are_followed(draw):
    assert all(re.fullmatch(r"(yes|no) [0-9]{2,4}", text) for text in draw(regex("(yes|no) [0-9]{2,4}"), n=8)[1])
    sums = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9]{1,3}/'
    sequences, texts = draw(lark(sums), n=8, max_tokens=2000)
    assert {s.stop_reason for s in sequences} == {StopReason.STOP}
    assert all(compile(text, "a sum", "eval") for text in texts)
    gbnf = 'root ::= "[" item ("," item)* "]"\nitem ::= "a" | "b"'
    assert all(re.fullmatch(r"\[[ab](,[ab])*\]", text) for text in draw(lark(gbnf), n=4, max_tokens=2000)[1])


def test_an_answer_has_its_place_in_what_is_around_it(draw):
    around = 'start: "<" @answer ">" <think> @answer'
    for answer in (regex("[ab]{2}"), lark('start: "a" | "b" "b"'), json_schema({"enum": [1, 22]})):
        (text,) = draw(Grammar(kind=answer.kind, text=answer.text, around=around))[1]
        assert re.fullmatch(r"<([ab]+|1|22)><think>([ab]+|1|22)", text)


def test_constrained_rows_do_not_disturb_the_others(bench):
    """Nor the other way round."""
    free = bench.request([4, 5, 6], n=2, max_tokens=40, temperature=1.5)
    bound = bench.request(
        [1, 2, 3], n=2, grammar=json_schema(PERSON), **HOT, stop_token_ids=bench.model.spec.eos_token_ids
    )
    alone = [bench.sampler().generate([request])[0] for request in (free, bound)]
    together = bench.sampler().generate([free, bound])
    for one, two in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]


def test_preempted_sequences_come_out_the_same(bench):
    request = bench.request([1, 2, 3], n=4, grammar=regex("([a-z]{3} [0-9]{3} ){40}"), temperature=1.5, max_tokens=50)
    calm = bench.sampler().generate([request])[0]
    sampler = bench.sampler(cache_tokens=96)
    tight = sampler.generate([request])[0]
    assert sampler.scheduler.preemptions > 0
    assert [s.tokens for s in tight.sequences] == [s.tokens for s in calm.sequences]


def test_logprobs_are_the_models_own(bench):
    sequence = (
        bench.sampler().generate([bench.request([1, 2], grammar=regex("[0-9]{12}"), max_tokens=12)])[0].sequences[0]
    )
    expected = bench.logprobs(None, [1, 2, *sequence.tokens])[1:]
    assert sequence.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_stop_tokens_come_when_the_grammar_is_complete_and_not_before(bench, draw):
    end = bench.model.tokenizer.token_to_id("<|im_end|>")
    bias = {"logit_bias": {end: 100.0}}
    sequences, texts = draw(regex("[a-z]{4,}"), n=8, **bias)
    assert {len(text) for text in texts} <= {4, 5, 6, 7, 8, 9}
    assert {s.tokens[-1] for s in sequences} == {end}
    assert len(draw(regex("[a-z]{4,}"), **bias, min_tokens=30, max_tokens=40)[0][0].tokens) == 31


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": ()},
        {"stop_token_ids": (), "min_tokens": 50},
        {"min_tokens": 50},
        {"min_tokens": 50, "top_k": 1, "temperature": 0.0},
        {"stop_strings": ("never",), "stop_token_ids": ()},
        {"top_p": 0.01, "min_p": 1.0},
    ],
)
def test_sequence_ends_where_nothing_can_follow(draw, options):
    sequences, texts = draw(regex("ab{3}c"), n=2, **options)
    assert texts == ["abbbc"] * 2
    assert {s.stop_reason for s in sequences} == {StopReason.STOP}


def test_stop_string_ends_it_in_the_middle(bench, draw):
    (sequence,), (text,) = draw(regex("(ab|cd){20}xyz"), stop_strings=("c",))
    assert sequence.stop_reason is StopReason.STOP
    assert "c" in bench.model.tokenizer.decode(sequence.tokens[-1:])
    assert "xyz" not in text


def test_stop_token_that_is_text_waits_for_the_end(bench, draw):
    digit = bench.model.tokenizer.token_to_id("7")
    sequences, _ = draw(regex("[0-9]{30}[0-9]*"), n=4, stop_token_ids=(digit,))
    for sequence in sequences:
        assert sequence.tokens.index(digit) >= 15, "a token has two digits at most"
    assert draw(regex("77"), stop_token_ids=(digit,))[0][0].stop_reason is StopReason.STOP, "where it must come, it may"


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn(get_bench):
    bench, tokenizer = get_bench(overrides={"vocab_size": 640}), get_bench().model.tokenizer
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    assert known < bench.vocab
    bias = dict.fromkeys(range(known, bench.vocab), 100.0)
    for grammar in (regex("(?s:.){20}"), lark("start: <[*]>{20}")):
        request = bench.request([1, 2], grammar=grammar, max_tokens=20, logit_bias=bias)
        sampler = bench.sampler(tokenizer=tokenizer)
        assert max(sampler.generate([request])[0].sequences[0].tokens) < known


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("[a-"), "the regular expression cannot be followed.*unclosed"),
        (regex("(?=a)b"), "look-around"),
        (lark("start: nothing"), 'unknown name: "nothing"'),
        (lark("start: <nothing>"), "unknown special token"),
        (lark("hello"), "the grammar cannot be followed"),
        (json_schema({"type": "string", "format": "no-such"}), "the JSON schema cannot be followed: Unknown format"),
        (json_schema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), "the JSON schema cannot be followed"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="[]"), "object"),
        (regex("a" * 300_000), "300000 characters"),
        (regex("\ud800"), "not valid Unicode"),
        (regex(""), "allows none"),
        (json_schema(wide(7000)), "7000 properties that may be left out, and at most 600"),
        (json_schema({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": wide(601)}}), "name more of them as required"),
        (json_schema({"anyOf": [wide(500, f"o{i}") for i in range(10)]}), "grammar size.*split it"),
        (regex("(a?){5000}a{5000}"), "simplify its expressions"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_leaves_nothing(bench, grammar, message):
    sampler = bench.sampler()
    with pytest.raises(DataError, match=f"(?s){message}"):
        sampler.generate([bench.request([1, 2], grammar=grammar)])
    bench.check_nothing_left(sampler)


def test_message_names_the_field_that_asked_for_it(bench):
    for grammar, options in (
        (regex("[a-", asked_by="guided_regex"), {}),
        (regex("a" * 300_000, asked_by="guided_regex"), {}),
        (regex("", asked_by="guided_regex"), {}),
        (lark(AMBIGUOUS, asked_by="guided_regex"), {"max_tokens": 512, "stop_token_ids": ()}),
    ):
        with pytest.raises(DataError, match=r"^guided_regex: "):
            bench.sampler().generate([bench.request([1, 2], grammar=grammar, **options)])


def nested(depth: int) -> dict:
    inside = {"type": "string"} if depth == 0 else nested(depth - 1)
    return {"type": "object", "properties": {"a": inside, "b": {"type": "number"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema(wide(500)),
        slow(json_schema({"type": "object", "properties": {"a": wide(500)}, "required": ["a"]})),
        slow(json_schema({"type": "object", "properties": {f"o{i}": wide(100) for i in range(20)}})),
        json_schema(wide(3000) | {"required": [f"p{i}" for i in range(3000)]}),
        json_schema(nested(40)),
        json_schema({"type": "array", "items": {"enum": [f"a long value, the {i}th" for i in range(5000)]}}),
        slow(lark(f"start: %json {json.dumps(wide(500))}", is_wide=True)),
        lark("start: WORD\nWORD: " + " | ".join(f'"w{i}"' for i in range(10_000))),
    ],
    ids=["500 optional", "inside", "2000 optional", "3000 required", "deep", "enum", "of a tool", "choice"],
)
def test_large_grammars_are_followed(draw, grammar):
    draw(grammar, n=2, max_tokens=60)


def test_grammar_that_takes_too_much_work_ends_its_own_request_only(bench):
    """A text of n letters can be read in many ways, and each token costs more than the one before it."""
    sampler = bench.sampler()
    bad = sampler.submit(bench.request([1], grammar=lark(AMBIGUOUS), max_tokens=512, stop_token_ids=()))
    good = sampler.submit(bench.request([2], grammar=regex("[0-9]{300}"), max_tokens=512))
    failed, done = {}, {}
    while sampler.has_work:
        output = sampler.step()
        failed |= {f.request_id: str(f.error) for f in output.failed}
        done |= {f.request_id: f.result for f in output.finished}
    assert (list(failed), list(done)) == ([bad], [good])
    assert "cannot be followed any further" in failed[bad]
    assert "make it less ambiguous" in failed[bad]
    bench.check_nothing_left(sampler)


def test_refused_grammar_ends_its_own_request_only(bench):
    sampler = bench.sampler()
    bad = sampler.submit(bench.request([1], n=3, grammar=regex("[a-")))
    good = sampler.submit(bench.request([2], grammar=regex("[0-9]{3}"), max_tokens=20))
    failed, done = {}, {}
    while sampler.has_work:
        output = sampler.step()
        failed |= {f.request_id: f.error for f in output.failed}
        done |= {f.request_id: f.result for f in output.finished}
    assert (list(failed), list(done)) == ([bad], [good])
    assert len(bench.model.tokenizer.decode(done[good].sequences[0].tokens)) == 3
    bench.check_nothing_left(sampler)


def test_request_is_aborted_while_its_grammar_is_compiled(bench):
    sampler = bench.sampler()
    number = sampler.submit(bench.request([1], n=2, grammar=json_schema(PERSON)))
    result = sampler.abort(number)
    assert result is not None
    assert [(s.tokens, s.stop_reason) for s in result.sequences] == [([], StopReason.ABORT)] * 2
    bench.check_nothing_left(sampler)


def test_other_limits_hold_beside_a_grammar(bench):
    with pytest.raises(DataError, match="key/value cache holds"):
        bench.sampler(cache_tokens=64).generate([bench.request([1], grammar=regex("a+"), max_tokens=100)])
    with pytest.raises(DataError, match="needs a tokenizer"):
        bench.sampler(tokenizer=None).generate([bench.request([1], grammar=regex("a+"))])
    with pytest.raises(DataError, match="send -100"):
        bench.sampler().generate([bench.request([1], grammar=regex("a+"), logit_bias={5: -torch.inf})])


def test_grammars_are_compiled_once_and_the_oldest_are_let_go(bench):
    grammars = Grammars(bench.model.tokenizer, bench.vocab)
    first = grammars.compile(regex("a"))
    assert grammars.compile(regex("a")) is first
    large = [regex(f"{i}" + "b" * (KEPT_CHARACTERS // 4)) for i in range(5)]
    for grammar in large:
        grammars.compile(grammar)
        assert grammars.compile(large[0]) is grammars.compile(large[0]), "what is used stays"
    assert grammars.compile(regex("a")) is not first


def byte_fallback_tokenizer() -> Tokenizer:
    """In the shape of Llama 2: spaces are a character of their own, what is no word is bytes."""
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "c", "▁a", "▁ab", "ab", "1", "2"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<tag>", normalized=False)])
    return tokenizer


def test_tokenizers_that_fall_back_to_bytes_can_follow(bench):
    tokenizer = byte_fallback_tokenizer()
    sampler = bench.sampler(tokenizer=tokenizer)
    grammar = lark('start: "é ab" /[12]{2} b/ "<tag>" <tag> "語"')
    sequence = sampler.generate([bench.request([1], grammar=grammar, max_tokens=60)])[0].sequences[0]
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=False)
    assert re.fullmatch("é ab[12]{2} b<tag><tag>語", text)
    assert sequence.tokens.count(tokenizer.token_to_id("<tag>")) == 1


def test_tokenizer_that_llguidance_cannot_read_is_refused(bench):
    sampler = bench.sampler(tokenizer=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(DataError, match="cannot be followed with this model's tokenizer"):
        sampler.generate([bench.request([1], grammar=regex("a+"))])
