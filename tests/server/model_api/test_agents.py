"""openai-agents as its users have it: an agent with tools, whose every model call is in one trajectory."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.model_api.stockroom import STOCK

QUESTION = "How many cups and hats are there together?"
ROUTES = ["responses", "chat"]


class Stock(BaseModel):
    item: Literal["cups", "hats"]
    count: int = Field(ge=0, le=99)


@pytest.mark.parametrize(
    ("route", "run"),
    [
        ("responses", "streamed"),
        ("chat", "plain"),
        pytest.param("responses", "plain", marks=pytest.mark.slow),
        pytest.param("chat", "streamed", marks=pytest.mark.slow),
    ],
)
def test_an_agent_uses_its_tools_and_all_it_said_is_one_trajectory(ephebe: Ephebe, route: str, run: str) -> None:
    from tests.server.model_api import stock_agent

    play = getattr(stock_agent, run)

    async def work() -> tuple[int, str]:
        async with openai.AsyncOpenAI(base_url=f"{ephebe.url}/v1", api_key="tml-test") as client:
            agent = stock_agent.clerk(stock_agent.MODELS[route](MODEL, client))
            first = await play(agent, QUESTION)
            more = await play(agent, [*first.to_input_list(), {"role": "user", "content": "How many cups are there?"}])
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


@pytest.mark.parametrize("route", ROUTES)
def test_an_agents_output_has_the_type_it_asks_for(ephebe: Ephebe, route: str) -> None:
    from agents import Agent, ModelSettings, Runner

    from tests.server.model_api.stock_agent import MODELS, UNTRACED

    async def work() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{ephebe.url}/v1", api_key="tml-test") as client:
            settings = ModelSettings(temperature=0)  # drawn at random, an answer may be thoughts up to its limit
            agent = Agent(name="clerk", model=MODELS[route](MODEL, client), model_settings=settings, output_type=Stock)
            return (await Runner.run(agent, "How many cups are there?", run_config=UNTRACED)).final_output

    assert isinstance(asyncio.run(work()), Stock)
