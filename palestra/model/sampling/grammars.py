"""Constrained decoding: a grammar is compiled once, and every sequence that is drawn by it follows on its own.

Owns: llguidance, the vocabulary it sees, which tokens may come next. Never touches: logits, scheduling.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import Tokenizer
from torch import Tensor

from palestra.model.errors import DataError
from palestra.types import Grammar, GrammarKind

K = GrammarKind

WHITE_SPACE = r" |\n[ ]{0,32}"
"""In one place of a JSON text: none, a space, or a new line and its indent. Without a bound a model may write nothing
else until its tokens are used up."""
KEPT_CHARACTERS = 1 << 20  # of grammars that stay compiled; a large schema takes some 300 times its text in memory
MAX_SYMBOLS = 20_000  # of a compiled grammar; with 5,000 properties it has some 15,000
MAX_LEXER_STATES = 50_000  # of 2 kB: by default it is 500 MB a grammar
MAX_OPTIONAL = 600  # properties of an object; each that may be left out is 4 items in a row of the parser
WIDE_ROW, NARROW_ROW = 2500, 300
"""Items in a row. Schemas have delimiters everywhere, and a row costs the square of its items at most. A grammar may
allow the same text in many ways: then it is the cube, and 2,000 items take a second for each token."""
NAMES = {K.JSON_SCHEMA: "the JSON schema", K.REGEX: "the regular expression", K.LARK: "the grammar"}
END = "<|end of the grammar|>"
AMBIGUOUS = (
    "make it less ambiguous (a rule such as `s: s s` matches a text in many ways), or require more of an "
    "object's properties"
)
HINTS = {
    "Too many items": AMBIGUOUS,
    "items; max is": AMBIGUOUS,
    "grammar size": "split it, or make it smaller",
    "schema too large": "split it, or make it smaller",
    "too many expressions": "simplify its expressions and patterns",
}
"""By what llguidance says when one of its limits is reached."""


class Grammars:
    """Compiling takes a millisecond as a rule, and half a second for the largest: it is done by a thread beside the
    caller's, which leaves the interpreter to others meanwhile."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    def warm_up(self) -> None:
        """Reads the vocabulary, which takes seconds where it is large and cannot be done beside Python code."""
        self._thread.submit(lambda: self._vocabulary)

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compiles a grammar. Returns it, or a DataError that says what is wrong with it."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            self._let_go()
        self._compiled.move_to_end(grammar)
        return found

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._vocabulary
        try:
            limits = _limits(grammar, vocabulary.size)
            matcher = LLMatcher(vocabulary.tokens, _source(grammar), log_level=0, limits=limits)
            if problem := matcher.get_error():
                raise ValueError(problem)
            compiled = CompiledGrammar(grammar, matcher, vocabulary)
            compiled.fill_caches()
        except BaseException as error:  # its panics are no Exceptions
            detail = f"{NAMES[grammar.kind]} cannot be followed: {_problem(error)}"
            raise DataError(grammar.refusal(detail)) from None
        return compiled

    def _let_go(self) -> None:
        kept = sum(len(grammar.text) + len(grammar.around) for grammar in self._compiled)
        while kept > KEPT_CHARACTERS and len(self._compiled) > 1:
            gone, _ = self._compiled.popitem(last=False)
            kept -= len(gone.text) + len(gone.around)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        try:
            return Vocabulary(self._tokenizer, self._vocab_size)
        except BaseException as error:  # the same
            raise DataError(f"grammars cannot be followed with this model's tokenizer: {_problem(error)}") from None


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer, size: int):
        self.size = size
        words = _Words(tokenizer, size)
        self.tokens = LLTokenizer(TokenizerWrapper(words))
        self.is_real = np.array([bool(text) for text in words.tokens])
        """Models have room for more tokens than their tokenizers know."""
        self.is_text = self.is_real.copy()
        self.is_text[words.special_token_ids] = False


class _Words:
    """What llguidance asks of a tokenizer. To it, added tokens are no text, whether they are called special or not: a
    grammar has to name them. So text that has to come is encoded without them, or it would wait for a token that it
    does not allow."""

    eos_token_id = bos_token_id = None  # it takes an end of its own, behind the last token

    def __init__(self, tokenizer: Tokenizer, size: int):
        added = tokenizer.get_added_tokens_decoder()
        self._plain = _without_added(tokenizer)
        self.tokens = [added[token].content.encode() if token in added else self._text(token) for token in range(size)]
        self.special_token_ids = [token for token in added if token < size]

    def __call__(self, text: bytes) -> list[int]:
        return self._plain.tokenize_bytes(text)

    def _text(self, token: int) -> bytes:
        is_none = token >= self._plain.vocab_size or self._plain.is_special_token(token)
        return b"" if is_none else self._plain.decode_bytes([token])


class CompiledGrammar:
    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocabulary: Vocabulary):
        self._grammar, self._matcher, self._vocabulary = grammar, matcher, vocabulary

    def begin(self, stop_ids: Sequence[int]) -> GrammarMask:
        return GrammarMask(self._grammar, self._matcher.deep_copy(), self._vocabulary, stop_ids)

    def fill_caches(self) -> None:
        """Fills the caches that all its sequences share."""
        matcher = self._matcher.deep_copy()
        fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self._vocabulary.size + 1))
        if problem := matcher.get_error():
            raise ValueError(problem)


class GrammarMask:
    """What one sequence may draw next. Its stop tokens are allowed where the grammar is complete."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocabulary: Vocabulary, stop_ids: Sequence[int]):
        self._grammar, self._matcher, self._vocabulary = grammar, matcher, vocabulary
        self._stop_ids = np.array(stop_ids, np.int64)
        self._text_stops = self._stop_ids[vocabulary.is_text[self._stop_ids]]
        self._bits = allocate_token_bitmask(1, vocabulary.size + 1)
        self._taken = 0

    def allowed(self, generated: Sequence[int]) -> Tensor:
        """Empty: the grammar is complete, nothing can follow, and no token stops it."""
        self._matcher.consume_tokens(list(generated[self._taken :]))
        self._taken = len(generated)
        fill_next_token_bitmask(self._matcher, self._bits)
        if problem := self._matcher.get_error():
            detail = f"{NAMES[self._grammar.kind]} cannot be followed any further: {_error_text(problem)}"
            raise DataError(self._grammar.refusal(detail))
        size = self._vocabulary.size
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=size + 1).view(np.bool_)
        is_complete, allowed = bits[size], bits[:size]
        allowed &= self._vocabulary.is_real
        if is_complete:
            allowed[self._stop_ids] = True
        elif self._text_stops.size:
            self._put_off_stops(allowed)
        return torch.from_numpy(allowed)

    def _put_off_stops(self, allowed: np.ndarray) -> None:
        """A stop token that is text would end it in the middle: only where the grammar leaves nothing else."""
        wanted = allowed[self._text_stops]
        allowed[self._text_stops] = False
        if not allowed.any():
            allowed[self._text_stops] = wanted


def _limits(grammar: Grammar, vocab_size: int) -> LLParserLimits:
    """Returns the limits for one mask, which is computed on the thread that draws for all requests. A larger vocabulary
    has more ways to go on. Of the lexer's own work there is little: its default is some 4 ms."""
    is_narrow = grammar.kind is K.LARK and not grammar.is_wide
    return LLParserLimits(
        max_items_in_row=NARROW_ROW if is_narrow else WIDE_ROW,
        step_max_items=5_000 + vocab_size // 8 if is_narrow else 50_000 + vocab_size,
        max_grammar_size=MAX_SYMBOLS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def _source(grammar: Grammar) -> str:
    """Returns the grammar's text as llguidance reads it."""
    match grammar.kind:
        case K.JSON_SCHEMA:
            _check_width(json.loads(grammar.text))
            text = LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": WHITE_SPACE})
        case K.REGEX:
            text = LLMatcher.grammar_from_regex(grammar.text)
        case K.LARK:
            text = json.dumps({"grammars": [{"lark_grammar": grammar_from("grammar", grammar.text)}]})
    if not grammar.around:
        return text
    (answer,) = json.loads(text)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": grammar.around}, answer | {"name": "answer"}]})


def _without_added(tokenizer: Tokenizer) -> LLTokenizer:
    spec = json.loads(tokenizer.to_str())
    end = len(spec["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec |= {"added_tokens": [{"id": end, "content": END, "special": True, **flags}]}
    spec |= {"truncation": None, "padding": None, "post_processor": None}
    return LLTokenizer(json.dumps(spec), eos_token=end, slices=[])


def _check_width(schema: Any) -> None:
    """Checks the width, also of what would be reached late in an answer."""
    for one in _objects(schema):
        properties, required = one.get("properties"), one.get("required")
        if isinstance(properties, dict):
            optional = len(properties) - len({*required} & properties.keys() if _is_names(required) else ())
            if optional > MAX_OPTIONAL:
                raise ValueError(
                    f"an object of it has {optional} properties that may be left out, and at most {MAX_OPTIONAL} can "
                    "be followed; name more of them as required, or split the object"
                )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    values = [value]
    while values:
        one = values.pop()
        if isinstance(one, dict):
            yield one
            values += one.values()
        elif isinstance(one, list):
            values += one


def _is_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _problem(error: BaseException) -> str:
    return _error_text(str(error)) or type(error).__name__


def _error_text(problem: str) -> str:
    """Returns the error's text without llguidance's own notes; at its limits, with what to do."""
    problem = problem.replace("<non-verbose/>", "").strip()
    hint = next((hint for mark, hint in HINTS.items() if mark in problem), None)
    return problem if hint is None else f"{problem}; {hint}"
