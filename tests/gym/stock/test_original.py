"""NeMo Gym's own server folders, from its wheel (`make nemo-gym`), with their configs and their example rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from palestra.gym.collect.collection import delivered
from tests.gym.stock.conftest import StockGym
from tests.gym.stock.upstream import calling, completion, text_of

ORIGINAL = Path(__file__).parents[3] / ".nemo-gym"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (ORIGINAL / "resources_servers").is_dir(), reason="type: make nemo-gym"),
]
WORLDS = ["example_single_tool_call", "example_session_state_mgmt", "example_multi_step", "mcqa"]
GYMNASIUM = "example_multi_turn_gymnasium"
Turns = list[dict[str, Any]]


def row_of(world: str) -> dict[str, Any]:
    path = ORIGINAL / "resources_servers" / world / "data/example.jsonl"
    return orjson.loads(path.read_bytes().splitlines()[0])


def saying(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turns_of(world: str) -> Turns:
    """How its first example is played well."""
    row = row_of(world)
    if world == "example_single_tool_call":
        return [calling("get_weather", {"city": "sf"}), saying("cold")]
    if world == "example_session_state_mgmt":
        amounts = (1, 2)
        calls = [calling("increment_counter", {"count": amount}) for amount in amounts]
        return [*calls, calling("get_counter_value", {}), saying("six")]
    if world == "example_multi_step":
        values = row["expected_synonym_values"]
        return [calling("extract_synonym_values", {"synonym_values": values}), saying("done")]
    if world == "mcqa":
        return [saying(rf"\boxed{{{row['expected_answer']}}}")]
    return [saying("Paris"), saying("two million"), saying("the Eiffel tower")]


def scripts() -> dict[str, Turns]:
    """By the first thing the user says."""
    rows = {world: row_of(world) for world in (*WORLDS, GYMNASIUM)}
    firsts = {
        world: next(one["content"] for one in row["responses_create_params"]["input"] if one["role"] == "user")
        for world, row in rows.items()
    }
    return {first: turns_of(world) for world, first in firsts.items()}


async def complete(request: web.Request) -> web.StreamResponse:
    messages = (await request.json())["messages"]
    turns = scripts()[next(text_of(one) for one in messages if one["role"] == "user")]
    return completion(turns[sum(one["role"] == "assistant" for one in messages)])


def started(worlds: list[str], **settings: Any) -> StockGym:
    configs = [f"resources_servers/{world}/configs/{world}.yaml" for world in worlds]
    model = "responses_api_models/vllm_model/configs/vllm_model.yaml"
    return StockGym(ORIGINAL, complete, [*configs, model], **settings)


@pytest.fixture(scope="module")
def original() -> Iterator[StockGym]:
    made = started([*WORLDS, GYMNASIUM])
    yield made
    made.close()


@pytest.mark.parametrize("world", [*WORLDS, GYMNASIUM])
def test_a_rollout_in_a_world_of_nemo_gyms(original: StockGym, tmp_path: Path, world: str) -> None:
    servers = original.supervisor.config.servers.values()
    assert [one.is_stock for one in servers if one.implementation == world] == [True]
    agent = f"{world}_agent" if world == GYMNASIUM else f"{world}_simple_agent"
    standing = original.collected(tmp_path, agent, [row_of(world)])
    (result,) = delivered(tmp_path / "out.jsonl")
    assert (standing.done, result["reward"]) == (1, 1.0)


def test_their_agent_plays_too(tmp_path: Path) -> None:
    world = "example_session_state_mgmt"
    gym = started([world], gym={"use_stock": ["simple_agent"]})
    try:
        assert gym.supervisor.config.servers[f"{world}_simple_agent"].is_stock
        gym.collected(tmp_path, f"{world}_simple_agent", [row_of(world)])
    finally:
        gym.close()
    (result,) = delivered(tmp_path / "out.jsonl")
    assert result["reward"] == 1.0
    assert [one["type"] for one in result["response"]["output"]].count("function_call_output") == 3
