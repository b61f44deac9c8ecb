"""Whatever a caller sends, it gets an answer or a refusal: nothing breaks."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from palestra.gym.models.requests import FIELDS
from tests.gym.models.scripted import Endpoint, always, completion, model, posted
from tests.properties import examples

words = st.sampled_from(
    [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "input_text",
        "input_image",
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "image",
        "base64",
        "user",
        "assistant",
        "system",
        "function",
        "namespace",
        "{}",
        "auto",
        "any",
        "tool",
    ]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "summary",
        "call_id",
        "name",
        "arguments",
        "output",
        "id",
        "input",
        "source",
        "media_type",
        "data",
        "tool_use_id",
        "thinking",
        "prompt_token_ids",
        "generation_token_ids",
        "generation_log_probs",
        "namespace",
        "tools",
        "function",
        "image_url",
        "format",
        "effort",
    ]
)
kinds = st.sampled_from(
    ["text", "image", "tool_use", "tool_result", "thinking", "input_text", "input_image", "output_text"]
)
part = st.fixed_dictionaries({"type": kinds}, optional={"text": st.just("a"), "id": words, "name": words}) | anything
content = st.just("Hi") | st.lists(part, max_size=2) | anything
role = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
message = st.fixed_dictionaries({"role": role, "content": content}, optional={"tool_calls": anything})
item = message | message | st.dictionaries(names, anything, max_size=6) | anything
items = st.lists(item, max_size=3) | st.lists(message, min_size=1, max_size=3)
fields = st.sampled_from(
    [*FIELDS, "messages", "system", "max_tokens", "stop_sequences", "stream_options", "top_k", "n", "logprobs"]
)
bodies = st.dictionaries(fields, items | anything, max_size=2)
asked = st.tuples(bodies, items, items, st.booleans()).map(
    lambda made: {"input": made[1], "messages": made[2], **made[0], **({"stream": True} if made[3] else {})}
)
PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(asked | anything)
def test_any_body_is_answered_or_refused(body: Any) -> None:
    async def main() -> None:
        async with Endpoint(always(completion())).serving() as url:
            server = model(base_url=url)
            for path in PATHS:
                fitting = body
                if isinstance(body, dict) and path == "/v1/responses" and not body.get("stream"):
                    fitting = {key: value for key, value in body.items() if key in FIELDS}
                answer = await posted(server, path, fitting)
                assert answer.status in (200, 422), (path, fitting, answer.body)
                answer.raw()
            await server.close()

    asyncio.run(main())
