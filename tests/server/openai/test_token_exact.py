"""Whatever an agent does to a history that it sends back, the model reads the ids that were sampled."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.chat import ChatTokenizer
from palestra.chat.conversations import Ask, Conversations, Match, Place, Reply
from palestra.config.bundled import bundled_model
from palestra.server.openai.answers import Reader, read_message
from palestra.server.openai.messages import read_messages
from palestra.server.openai.schemas import ChatRequest
from palestra.types.sampling import SampledSequence, StopReason

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
WORDS = ["hello", "né", "🙂", "漢字", "<|im_end|>", "<think>", "</think>", "<tool_call>", "{", "1.0", "\n", " "]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    folder = bundled_model("ephebe")
    assert folder is not None
    return ChatTokenizer.load(folder)


class Agent:
    """Talks for some turns, and sends the history back as frameworks do: not quite as it got it."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.held = Conversations(max_conversations=9, max_tokens=10**6, max_age_s=1e9)
        self.history: list[dict[str, Any]] = []

    def text(self, most: int = 6) -> str:
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(0, most)))

    def value(self) -> Any:
        return self.rng.choice([1, 1.0, 2.5, True, None, self.text(), [1, {"x": self.text()}], {}])

    def sampled(self) -> SampledSequence:
        """Thinking, words, calls; cut into tokens anywhere but where an encoder would; not always to its end."""
        text = f"<think>\n{self.text()}\n</think>\n\n" if self.rng.random() < 0.5 else ""
        text += self.text()
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            arguments = {self.text(2): self.value() for _ in range(self.rng.randint(0, 3))}
            body = json.dumps({"name": self.rng.choice("fg"), "arguments": arguments}, ensure_ascii=False)
            text += f"<tool_call>\n{body}\n</tool_call>"
        tokens: list[int] = []
        while text:
            size = self.rng.randint(1, 5)
            tokens += self.tokenizer.encode_text(text[:size])
            text = text[size:]
        if self.rng.random() < 0.3:
            tokens = tokens[: self.rng.randint(1, max(1, len(tokens)))] or [5]
            return SampledSequence(tokens=tokens, logprobs=[], stop_reason=StopReason.LENGTH)
        return SampledSequence(
            tokens=[*tokens, self.rng.choice(self.tokenizer.stop_ids)], logprobs=[], stop_reason=StopReason.STOP
        )

    def echoed(self, message: dict[str, Any]) -> dict[str, Any]:
        message = json.loads(json.dumps(message))
        if self.rng.random() < 0.5:
            message.pop("reasoning_content", None)
        if self.rng.random() < 0.5:
            message.pop("refusal")
        content = message["content"]
        if isinstance(content, str):
            message["content"] = self.rng.choice([content, content.strip(), [{"type": "text", "text": content}]])
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            compact = json.dumps(arguments, separators=(",", ":"))
            call["function"]["arguments"] = self.rng.choice([compact, json.dumps(arguments, indent=1, sort_keys=True)])
        return message

    def observations(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.text()}
            for call in message.get("tool_calls", ())
        ]
        return results or [{"role": "user", "content": self.text()} for _ in range(self.rng.randint(1, 2))]

    def play(self, turns: int) -> None:
        call = ChatRequest.model_validate({"model": "m", "messages": [], "tools": TOOLS})
        reader = Reader(self.tokenizer, call, self.tokenizer.stop_ids)
        new, before = [{"role": "system", "content": self.text()}, {"role": "user", "content": self.text()}], None
        for turn in range(turns):
            self.history += new
            prompt = self.held.prompt(self.tokenizer, Ask(("o",), read_messages(self.history), TOOLS))
            if before is None:
                assert prompt.ids == self.tokenizer.encode_chat(self.history, TOOLS)
            else:
                ended = before[-1] == self.tokenizer.turn_end
                added = self.tokenizer.observation(read_messages(new), tools=TOOLS)
                assert prompt.match is Match.CONTINUED
                assert prompt.ids == [*before, *([] if ended else [self.tokenizer.turn_end]), *added]
            sequence = self.sampled()
            message = read_message(reader, sequence, call, prompt.ids)
            self.held.keep(prompt, [Reply(message, sequence.tokens, Place("t", turn, 0))])
            before = [*prompt.ids, *sequence.tokens]
            self.history.append(self.echoed(message))
            new = self.observations(message)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_ids_are_those_read_and_sampled_and_only_what_is_new_is_encoded(tokenizer: ChatTokenizer, seed: int) -> None:
    Agent(tokenizer, seed).play(turns=6)


def test_fifty_turns(tokenizer: ChatTokenizer) -> None:
    Agent(tokenizer, 7).play(turns=50)
