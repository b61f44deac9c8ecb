"""What one client sends, however long, costs others nothing: work grows with the text alone, nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest

from palestra.chat import ChatTokenizer
from palestra.chat.canonical import chain, reasoning_of
from palestra.chat.conversation_cache import (
    ConversationCache,
    HistoryMatch,
    PromptRequest,
    SampledReply,
    SampleLocation,
)
from palestra.chat.errors import TooLongError
from palestra.chat.tool_calls import MAX_DEPTH, is_too_deep, read_json, without_thinking

TokenizerOf = Callable[[str], ChatTokenizer]
USER = {"role": "user", "content": "Hi"}
BLOCKS = 150_000  # 2.4 MB of them: a second for as long as each is looked at once, ten minutes otherwise


def test_any_number_of_think_blocks_is_read_in_one_pass() -> None:
    assert without_thinking("a<think>b</think>" * BLOCKS) == "a" * BLOCKS
    assert without_thinking("<think>" * BLOCKS) == "<think>" * BLOCKS
    content = "<think>b</think> " * BLOCKS + "c"
    assert reasoning_of({"content": content}) == "\n".join("b" * BLOCKS)
    said = {"role": "assistant", "content": "c"}
    assert chain(None, [said]) == chain(None, [{**said, "content": content}])


def nested(depth: int) -> str:
    return '{"a":[' * (depth // 2) + '{"a":1}' * (depth % 2) + "]}" * (depth // 2)


def test_json_is_read_as_deep_as_anybody_means_it() -> None:
    assert read_json(nested(MAX_DEPTH)) is not None
    assert [read_json(nested(depth)) for depth in (MAX_DEPTH + 1, 400, 900, 100_000)] == [None] * 4
    assert not is_too_deep({"a": [{}] * 1000, "b": None})


@pytest.mark.parametrize("arguments", [nested(150), nested(490), nested(900), nested(50_000), '{"a": "\\ud800"}'])
def test_arguments_that_nobody_can_follow_are_compared_as_text(arguments: str) -> None:
    names = [
        chain(None, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}])[-1]
        for given in (arguments, arguments, arguments + " ", "{}")
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3


class _Message(UserDict[str, Any]):
    """One that somebody else's call is kept in the middle of, whenever it is looked at."""

    def __init__(self, meanwhile: Callable[[], None], content: str):
        super().__init__(role="assistant", content=content)
        self.meanwhile = meanwhile

    def get(self, key: str, default: Any = None) -> Any:
        other = threading.Thread(target=self.meanwhile, daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive(), "others have to wait"
        return super().get(key, default)


def test_others_are_kept_while_a_history_is_read(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("chatml")
    held = ConversationCache(max_conversations=100, max_tokens=10**6, max_age_s=1e9)
    said = {"role": "assistant", "content": "yes"}
    first = held.prompt(tokenizer, PromptRequest(("me",), [USER]))
    other = held.prompt(tokenizer, PromptRequest(("other",), [USER]))
    kept: list[int] = []

    def keep_another() -> None:
        kept.append(len(kept))
        held.keep(other, [SampledReply(said, [65], SampleLocation(f"other{len(kept)}", 0, 0))])

    held.keep(
        first, [SampledReply(_Message(keep_another, "yes"), [65], SampleLocation("mine", 0, 0))]
    )  # its name takes time, too
    prompt = held.prompt(tokenizer, PromptRequest(("me",), [USER, _Message(keep_another, "<think>a</think>yes"), USER]))
    assert prompt.match is HistoryMatch.UNMATCHED  # it never thought so
    prompt = held.prompt(tokenizer, PromptRequest(("me",), [USER, _Message(keep_another, "yes"), USER]))
    assert prompt.match is HistoryMatch.CONTINUED
    assert len(kept) > 3


def test_other_threads_go_on_while_a_text_is_encoded(tokenizer_of: TokenizerOf) -> None:
    tokenizer, begun, ended, steps = tokenizer_of("chatml"), threading.Event(), threading.Event(), 0

    def encode() -> None:
        begun.set()
        tokenizer.encode_text("ab " * 200_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    while not ended.is_set():
        time.sleep(0.001)
        steps += 1
    thread.join()
    assert steps > 5  # one or two, if encoding kept the others waiting


@pytest.mark.parametrize("text", ["ab " * 10_000, "<|im_end|>" * 3_000])
def test_what_is_certainly_too_long_is_not_encoded(text: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("chatml")
    message = {"role": "user", "content": text}
    whole = len(tokenizer.encode_text(text))
    calls: list[Callable[[int], Any]] = [
        lambda most: tokenizer.encode_text(text, most),
        lambda most: tokenizer.encode_chat([message], max_tokens=most),
        lambda most: tokenizer.following(USER, [message], max_tokens=most),
    ]
    for call in calls:
        with pytest.raises(TooLongError) as error:
            call(100)
        assert 100 < error.value.least_tokens <= whole + 20
        assert call(whole)
