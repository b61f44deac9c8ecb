"""An agent of openai-agents that answers questions about the stock. Import it inside tests: its SDK is a large one."""

from __future__ import annotations

from typing import Any

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

from tests.server.model_api.stockroom import STOCK, SYSTEM

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
