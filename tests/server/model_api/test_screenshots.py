"""An agent that looks at its screen through Anthropic's API, as computer-use clients do; what it played is trained."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tinker import types

from tests.pictures import drawn, file_of

if TYPE_CHECKING:
    import anthropic

    from tests.server.conftest import Server

pytestmark = pytest.mark.slow

STEPS = 3
TOOLS: Any = [
    {
        "name": "screenshot",
        "description": "Takes a picture of the screen.",
        "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
        "cache_control": {"type": "ephemeral"},
    }
]


class Screen:
    """What the agent sees; it is another one each time."""

    def __init__(self) -> None:
        self.shown = 0

    def result(self, use: Any) -> Any:
        data = base64.b64encode(file_of(drawn(self.shown))).decode()
        self.shown += 1
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "text", "text": "The screen:"}, {"type": "image", "source": source}]
        return {"type": "tool_result", "tool_use_id": use.id, "content": content}


def played(client: anthropic.Anthropic, model: str, screen: Screen) -> list[Any]:
    """The agent's loop: it calls its tool until it has seen enough, and then says what it saw."""
    messages: list[Any] = [{"role": "user", "content": "What is on the screen?"}]
    answers = []
    for step in range(STEPS + 1):
        choice: Any = {"type": "tool", "name": "screenshot"} if step < STEPS else {"type": "none"}
        answer = client.messages.create(
            model=model,
            max_tokens=96,
            system="You use a computer.",
            thinking={"type": "disabled"},
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
        )
        answers.append(answer)
        messages.append({"role": "assistant", "content": [one.model_dump() for one in answer.content]})
        uses = [one for one in answer.content if one.type == "tool_use"]
        if not uses:
            return answers
        messages.append({"role": "user", "content": [screen.result(use) for use in uses]})
    return answers


@pytest.mark.parametrize(("family", "rows"), [("qwen3_vl", 12), ("gemma4_moe_vl", 63)])
def test_what_an_agent_saw_on_its_screen_is_what_is_trained(
    make_server: Any, random_model: Any, family: str, rows: int
) -> None:
    import anthropic

    server: Server = make_server(model=random_model(family, context=2048))
    screen = Screen()
    with anthropic.Anthropic(base_url=server.url, api_key="tml-test", max_retries=0) as client:
        answers = played(client, server.name, screen)
    assert [answer.stop_reason for answer in answers[:-1]] == ["tool_use"] * STEPS
    assert screen.shown == STEPS
    for before, after in pairwise(answers):  # nothing that was computed is computed again
        assert after.usage.cache_read_input_tokens >= before.usage.input_tokens // 2
    (trace,) = server.http().get("/v1/traces").json()["data"]
    (found,) = server.http().get(f"/v1/traces/{trace['id']}/trajectories").json()["data"]
    assert [one["tokens"] for one in found["images"]] == [rows] * STEPS
    chunks: list[Any] = []
    at, tokens = 0, found["tokens"][:-1]
    for one in found["images"]:
        chunks.append(types.EncodedTextChunk(tokens=tokens[at : one["start"]]))
        file = server.http().get(f"/v1/pictures/{one['url'].removeprefix('picture:')}").content
        chunks.append(types.ImageChunk(data=file, format="png", expected_tokens=one["tokens"]))
        at = one["start"] + one["tokens"]
    chunks.append(types.EncodedTextChunk(tokens=tokens[at:]))
    mask = np.array(found["loss_mask"][1:], np.float32)
    targets = np.array(found["tokens"][1:])
    inputs: Any = {"target_tokens": targets, "weights": mask}
    datum = types.Datum(types.ModelInput(chunks=chunks), inputs)
    with server.client() as service:
        trainer = service.create_lora_training_client(server.name, rank=4, seed=1)
        (output,) = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs
    sampled = np.array(found["logprobs"][1:])
    assert output["logprobs"].to_numpy()[mask > 0] == pytest.approx(sampled[mask > 0], abs=2e-4)
