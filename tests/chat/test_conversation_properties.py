"""Whatever is said, and whatever an agent does to it before it sends it back: the ids that were sampled stay, and where
the template would have written the same, the whole is what it writes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ChatTokenizer
from palestra.chat.answer_formats import answer_start, output_parser
from palestra.chat.conversation_cache import (
    ConversationCache,
    HistoryMatch,
    Prompt,
    PromptRequest,
    SampledReply,
    SampleLocation,
)
from palestra.chat.detokenizer import IncrementalDecoder
from palestra.chat.output_pieces import put_together
from tests.properties import examples

TokenizerOf = Callable[[str], ChatTokenizer]
FAMILIES = ["thinking", "headers", "brackets", "turns", "bars", "qwen35", "qwen38", "harmony"]
PROMPTED = ("bars", "qwen35", "qwen38")
"""Their prompts open a think block."""
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
WORDS = ["hello", "né", "🙂", "漢字", "<|im_end|>", "<think>", "</think>", "<tool_call>", "{", "1.0", "\n", " "]


def as_written(style: str, calls: list[dict[str, Any]]) -> str:
    """Calls as the families write them."""
    if style == "headers":
        renamed = [{"name": call["name"], "parameters": call["arguments"]} for call in calls]
        return "; ".join(json.dumps(call, ensure_ascii=False) for call in renamed)
    if style == "brackets":
        return f"[TOOL_CALLS] {json.dumps(calls, ensure_ascii=False)}" if calls else ""
    if style in ("qwen35", "qwen38", "nemotron", "glm"):
        return "\n".join(_tagged(style, call) for call in calls)
    return "\n".join(f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls)


def _tagged(style: str, call: dict[str, Any]) -> str:
    write = str if style == "qwen35" else lambda value: json.dumps(value, ensure_ascii=False)
    values = {
        key: value if isinstance(value, str) else json.dumps(value) if isinstance(value, list | dict) else write(value)
        for key, value in call["arguments"].items()
    }
    if style == "glm":
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()]
        return f"<tool_call>{call['name']}\n{''.join(pairs)}</tool_call>"
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={call['name']}>\n{''.join(pairs)}</function>\n</tool_call>"


def in_channels(thought: str | None, content: str, calls: list[dict[str, Any]]) -> str:
    """An answer as gpt-oss writes it."""
    text = "" if thought is None else f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    if not calls:
        return f"{text}<|channel|>final<|message|>{content}"
    text += f"<|channel|>commentary<|message|>{content}<|end|><|start|>assistant" if content else ""
    arguments = json.dumps(calls[0]["arguments"], ensure_ascii=False)
    return f"{text} to=functions.{calls[0]['name']}<|channel|>commentary json<|message|>{arguments}"


def in_gemma4(thought: str | None, content: str, calls: list[dict[str, Any]]) -> str:
    """An answer as Gemma 4 writes it."""

    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in sorted(value.items())) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)

    text = "" if thought is None else f"<|channel>thought\n{thought}\n<channel|>"
    made = [f"<|tool_call>call:{call['name']}{written(call['arguments'])}<tool_call|>" for call in calls]
    return text + content + "".join(made)


WRITTEN_BY_MODELS = re.compile(
    r"(\[TOOL_CALLS\]|<\|(?:start|channel|message|end)\|>|<\|(?:channel|tool_call)>|<(?:channel|tool_call)\|>|<\|\"\|>)"
)
"""Special tokens that are part of an answer."""


def encoded(tokenizer: ChatTokenizer, text: str, cut: Callable[[str], list[str]] = lambda part: [part]) -> list[int]:
    """As a model writes it: what its format is written with are tokens. `cut`: where else tokens end."""
    names = {tokenizer.token_name(token): token for token in tokenizer.special_ids()}
    tokens: list[int] = []
    for part in WRITTEN_BY_MODELS.split(text):
        is_token = part in names and part in tokenizer.spoken_tags
        tokens += [names[part]] if is_token else [t for piece in cut(part) for t in tokenizer.encode_text(piece)]
    return tokens


class Agent:
    """Talks for some turns, and sends the history back as frameworks do: not quite as it got it."""

    def __init__(self, style: str, tokenizer: ChatTokenizer, seed: int):
        self.style, self.tokenizer, self.rng = style, tokenizer, random.Random(seed)
        self.held = ConversationCache(max_conversations=9, max_tokens=10**6, max_age_s=1e9)
        self.history: list[dict[str, Any]] = []

    def text(self, most: int = 6) -> str:
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(0, most)))

    def value(self) -> Any:
        return self.rng.choice([1, 1.0, 2.5, True, None, self.text(), [1, {"x": self.text()}], {}])

    def sampled(self) -> list[int]:
        """Thinking, words, calls; cut into tokens anywhere but where an encoder would; not always to its end."""
        calls = [
            {"name": self.rng.choice("fg"), "arguments": {self.text(2): self.value() for _ in range(2)}}
            for _ in range(self.rng.choice([0, 0, 1, 2]))
        ]
        thought = self.text() if self.rng.random() < 0.5 else None
        if self.style == "harmony":
            # Think blocks that a content begins with count as reasoning, in whichever format.
            text = in_channels(thought, self.text().replace("<think>", "think"), calls)
        elif self.style == "gemma4":
            text = in_gemma4(thought, self.text().replace("<think>", "think"), calls)
        else:
            text = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
            text += ("" if calls and self.style == "headers" else self.text()) + as_written(self.style, calls)
        tokens = encoded(self.tokenizer, text, self.cut)
        if self.rng.random() < 0.3:
            return tokens[: self.rng.randint(1, max(1, len(tokens)))] or [5]
        return [*tokens, self.rng.choice(self.tokenizer.stop_ids)]

    def cut(self, text: str) -> list[str]:
        pieces: list[str] = []
        while text:
            size = self.rng.randint(1, 5)
            pieces.append(text[:size])
            text = text[size:]
        return pieces

    def told(self, tokens: list[int], prompt: Prompt) -> dict[str, Any]:
        ending = tokens[-1] in self.tokenizer.stop_ids
        decoding = IncrementalDecoder(self.tokenizer)
        text = decoding.feed(tokens[:-1] if ending else tokens) + decoding.finish()
        start = answer_start(self.tokenizer, prompt.ids, 0)
        parser = output_parser(self.tokenizer.tool_format, TOOLS, start)
        speech = put_together([*parser.feed(text), *parser.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": speech.content}
        if speech.reasoning is not None:
            message["reasoning_content"] = speech.reasoning
        if speech.calls:
            message["tool_calls"] = [
                {"id": f"c{i}", "function": {"name": c.name, "arguments": c.arguments}}
                for i, c in enumerate(speech.calls)
            ]
        return message

    def echoed(self, message: dict[str, Any]) -> dict[str, Any]:
        message = json.loads(json.dumps(message))
        if self.rng.random() < 0.5:
            message.pop("reasoning_content", None)
        message["content"] = self.rng.choice([message["content"], message["content"].strip()])
        for call in message.get("tool_calls", ()):
            pairs = list(call["function"]["arguments"].items())
            self.rng.shuffle(pairs)
            call["function"]["arguments"] = {k: 1.0 if v == 1 and v is not True else v for k, v in pairs}
        return message

    def back(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.text()}
            for call in message.get("tool_calls", ())
        ]
        return results or [{"role": "user", "content": self.text()}]

    def play(self, turns: int) -> Iterator[Prompt]:
        self.history.append({"role": "user", "content": self.text()})
        for turn in range(turns):
            prompt = self.held.prompt(self.tokenizer, PromptRequest(("o",), self.history, TOOLS))
            yield prompt
            tokens = self.sampled()
            message = self.told(tokens, prompt)
            self.held.keep(prompt, [SampledReply(message, tokens, SampleLocation("t", turn, 0))])
            self.history += [self.echoed(message), *self.back(message)]


@pytest.mark.parametrize("style", [*FAMILIES, "chatml", "open", "glm", "nemotron", "gemma4"])
def test_ids_are_those_read_and_sampled_and_only_what_is_new_is_encoded(style: str, tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(style)

    @examples(30)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        agent = Agent(style, tokenizer, seed)
        for turn, prompt in enumerate(agent.play(turns=6)):
            if turn == 0:
                assert prompt.ids == tokenizer.encode_chat(agent.history, TOOLS)
                continue
            assert (prompt.match, prompt.candidates) == (HistoryMatch.CONTINUED, 1)
            assert prompt.parent is not None
            held = prompt.parent.ids()
            last = max(i for i, message in enumerate(agent.history) if message["role"] == "assistant")
            following = tokenizer.following(agent.history[last], agent.history[last + 1 :], TOOLS)
            end = [] if held[-1] in (following.end, *following.other_ends) else [following.end]
            assert prompt.ids == [*held, *end, *following.tokens]
            assert prompt.read == prompt.ids[len(held) :]

    check()


@pytest.mark.parametrize("style", ["thinking", "qwen35", "qwen38", "glm", "harmony", "gemma4"])
def test_fifty_turns(style: str, tokenizer_of: TokenizerOf) -> None:
    prompts = list(Agent(style, tokenizer_of(style), 7).play(turns=50))
    assert all(prompt.match is HistoryMatch.CONTINUED for prompt in prompts[1:])
    assert all(after.ids[: len(before.ids)] == before.ids for before, after in pairwise(prompts))


# Where the template agrees

PLAIN = st.lists(st.sampled_from(["Hello", "ß", "🙂", "4", "a.", "x y"]), min_size=1, max_size=4).map(".".join)
ANSWERS = st.fixed_dictionaries({"content": PLAIN, "thought": st.none() | PLAIN, "call": st.none() | PLAIN})


def answer(style: str, drawn: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A message, and what the model wrote: what the template itself would write, at the end of a conversation."""
    thought = drawn["thought"] if style in ("chatml", "thinking", "harmony", *PROMPTED) else None
    if style in ("qwen35", "qwen38"):  # without one, two line breaks meet that an encoder makes one token of
        thought = thought or "Hm."
    calls = [] if drawn["call"] is None else [{"name": "f", "arguments": {"x": drawn["call"]}}]
    content = "" if calls and style in ("headers", "brackets", "harmony") else drawn["content"]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [{"id": "c", "function": call} for call in calls]
    if style == "harmony":
        return message, in_channels(thought, content, calls)
    opening = {**dict.fromkeys(PROMPTED, ""), "brackets": " " if content else ""}.get(
        style, "<think>\n" if thought else ""
    )
    thinking = f"{thought or ''}\n</think>\n\n" if thought or style in PROMPTED else ""
    between = {"bars": "", "qwen35": "\n\n", "qwen38": "\n\n"}.get(style, "\n") if content and calls else ""
    return message, opening + thinking + content + between + as_written(style, calls)


@pytest.mark.parametrize("style", [*FAMILIES, "chatml"])
def test_where_the_template_agrees_the_whole_is_what_it_writes_and_else_it_is_told(
    style: str, tokenizer_of: TokenizerOf
) -> None:
    tokenizer = tokenizer_of(style)

    @examples(40)
    @given(st.lists(ANSWERS, min_size=1, max_size=4), st.booleans(), st.booleans())
    def check(drawn: list[dict[str, Any]], has_tools: bool, asks: bool) -> None:
        held = ConversationCache(max_conversations=9, max_tokens=10**6, max_age_s=1e9)
        tools = TOOLS if has_tools else None
        history: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        for turn, one in enumerate(drawn):
            prompt = held.prompt(tokenizer, PromptRequest(("o",), history, tools))
            assert prompt.drift == (prompt.ids != tokenizer.encode_chat(history, tools))
            message, text = answer(style, one)
            end = tokenizer.special_texts["<|call|>"] if style == "harmony" and one["call"] else tokenizer.turn_end
            tokens = [*encoded(tokenizer, text), end]
            held.keep(prompt, [SampledReply(message, tokens, SampleLocation("t", turn, 0))])
            results = [{"role": "tool", "content": "r", "tool_call_id": "c"}] if one["call"] else []
            history += [message, *results]
            if not results or (asks and style not in ("brackets", "turns")):
                history.append({"role": "user", "content": "And?"})
        prompt = held.prompt(tokenizer, PromptRequest(("o",), history, tools))
        assert prompt.drift == (prompt.ids != tokenizer.encode_chat(history, tools))

    check()
