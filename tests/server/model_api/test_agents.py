"""openai-agents as its users have it: an agent with tools, whose every model call is in one trajectory."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from pydantic import BaseModel, Field

from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.model_api.stockroom import STOCK, SYSTEM

QUESTION = "How many cups and hats are there together?"
UNTRACED = RunConfig(tracing_disabled=True)
MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


@function_tool
def count(item: str) -> int:
    return STOCK.get(item, 0)


@function_tool
def add(a: int, b: int) -> int:
    return a + b


@function_tool
def subtract(a: int, b: int) -> int:
    return a - b


class Stock(BaseModel):
    item: Literal["cups", "hats"]
    count: int = Field(ge=0, le=99)


def clerk(model: Model) -> Agent[Any]:
    return Agent(
        name="clerk",
        instructions=str(SYSTEM["content"]),
        model=model,
        tools=[count, add, subtract],
        model_settings=ModelSettings(temperature=0),
    )


async def plain(agent: Agent[Any], given: Any) -> Any:
    return await Runner.run(agent, given, run_config=UNTRACED)


async def streamed(agent: Agent[Any], given: Any) -> Any:
    result = Runner.run_streamed(agent, given, run_config=UNTRACED)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds
    return result


@pytest.mark.parametrize("run", [plain, streamed])
@pytest.mark.parametrize("route", MODELS)
def test_an_agent_uses_its_tools_and_all_it_said_is_one_trajectory(ephebe: Ephebe, route: str, run: Any) -> None:
    async def work() -> tuple[int, str]:
        async with openai.AsyncOpenAI(base_url=f"{ephebe.url}/v1", api_key="tml-test") as client:
            agent = clerk(MODELS[route](MODEL, client))
            first = await run(agent, QUESTION)
            more = await run(agent, [*first.to_input_list(), {"role": "user", "content": "How many cups are there?"}])
            return len(first.raw_responses) + len(more.raw_responses), first.final_output

    calls, response = asyncio.run(work())
    assert str(sum(STOCK.values())) in response
    http = ephebe.http()
    trace_id = http.get("/v1/traces?limit=1").json()["data"][0]["id"]
    turns = http.get(f"/v1/traces/{trace_id}").json()["turns"]
    assert [turn["match"] for turn in turns] == ["new", *["continued"] * (calls - 1)]
    assert {turn["route"] for turn in turns} == {route}
    assert calls > 4
    (whole,) = http.get(f"/v1/traces/{trace_id}/trajectories").json()["data"]
    assert sum(whole["loss_mask"]) == sum(len(turn["samples"][0]["tokens"]) for turn in turns)


@pytest.mark.parametrize("route", MODELS)
def test_an_agents_output_has_the_type_it_asks_for(ephebe: Ephebe, route: str) -> None:
    async def work() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{ephebe.url}/v1", api_key="tml-test") as client:
            settings = ModelSettings(temperature=0)  # drawn at random, an answer may be thoughts up to its limit
            agent = Agent(name="clerk", model=MODELS[route](MODEL, client), model_settings=settings, output_type=Stock)
            return (await Runner.run(agent, "How many cups are there?", run_config=UNTRACED)).final_output

    assert isinstance(asyncio.run(work()), Stock)
