"""NeMo Gym's own server folders, from its wheel (`make nemo-gym`), with their configs and their example rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from palestra.gym.collect.collection import delivered
from palestra.gym.nemo_gym_compat import COMPAT, provided_packages
from palestra.gym.requirements.folder_requirements import has_requirements
from tests.gym.stock.conftest import StockGym
from tests.gym.stock.surface import walked
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
IMPORTING = """
import importlib, sys, traceback
from pathlib import Path

for file in map(Path, sys.argv[1:]):
    before = set(sys.modules)
    sys.path.insert(0, str(file.parent))
    try:
        importlib.import_module(".".join([*file.parts[-3:-1], file.stem]))
    except BaseException:
        print(file, traceback.format_exc(limit=-1))
    sys.path.remove(str(file.parent))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(file.parent):
            del sys.modules[name]  # the next folder may have one of that name
"""


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


def test_nothing_is_installed_for_a_world_that_needs_nothing(tmp_path: Path) -> None:
    """Though `nemo_gym` itself, which imports pandas, ray and wandb, lies beside it, as in a checkout."""
    assert "from pandas import" in (ORIGINAL / "nemo_gym/reward_profile.py").read_text()
    gym = started(["example_single_tool_call"], uv_venv_dir=str(tmp_path / "venvs"))
    gym.close()
    assert [line for line in gym.lines if "building an environment" in line] == []
    assert not (tmp_path / "venvs").exists()


@pytest.mark.parametrize("ours", [["simple_agent"], ["vllm_model"], ["simple_agent", "vllm_model"]], ids="+".join)
def test_their_agent_and_their_model_server_play_too(tmp_path: Path, ours: list[str]) -> None:
    world = "example_session_state_mgmt"
    gym = started([world], gym={"use_stock": ours})
    try:
        servers = gym.supervisor.config.servers.values()
        assert {one.implementation for one in servers if one.is_stock} == {world, *ours}
        gym.collected(tmp_path, f"{world}_simple_agent", [row_of(world)])
    finally:
        gym.close()
    (result,) = delivered(tmp_path / "out.jsonl")
    assert result["reward"] == 1.0
    assert [one["type"] for one in result["response"]["output"]].count("function_call_output") == 3


@pytest.mark.parametrize(("is_skipped", "reward"), [(False, 1.0), (True, 0.25)])
def test_their_agent_for_simulated_tools_plays(tmp_path: Path, is_skipped: bool, reward: float) -> None:
    skipping = {"skip_verification": is_skipped, "skip_verification_reward": 0.25}
    references = {"resources_server": {"name": "mcqa"}}
    agent = {"responses_api_agents": {"tool_simulation_agent": {**references, **skipping}}}
    files = [
        "resources_servers/mcqa/configs/mcqa.yaml",
        "responses_api_agents/tool_simulation_agent/configs/tool_simulation_agent.yaml",
        "responses_api_models/vllm_model/configs/vllm_model.yaml",
    ]
    gym = StockGym(ORIGINAL, complete, files, tool_simulation_agent=agent)
    try:
        standing = gym.collected(tmp_path, "tool_simulation_agent", [row_of("mcqa")])
    finally:
        gym.close()
    (result,) = delivered(tmp_path / "out.jsonl")
    assert (standing.failed, result["reward"], result.get("verification_skipped", False)) == (0, reward, is_skipped)


def test_of_their_servers_only_those_that_need_their_sandboxes_are_refused() -> None:
    """The script's own words; `docs/nemo-gym.md` has the same list."""
    command = [sys.executable, "-m", "tests.gym.stock.surface", str(ORIGINAL)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ORIGINAL.parent)
    assert done.returncode == 0, done.stdout
    refused = {line.partition(":")[0].split("/")[1] for line in done.stdout.splitlines() if line.startswith("  ")}
    documented = (ORIGINAL.parent / "docs/nemo-gym.md").read_text()
    (sentence,) = re.findall(r"NeMo Gym 0\.7\.0, (\d+) server folders are refused: ([^.]*)\.", documented)
    assert (int(sentence[0]), refused) == (len(refused), set(re.findall(r"`(\w+)`", sentence[1])))


def test_their_servers_that_need_nothing_else_can_be_imported() -> None:
    servers = [
        one.entrypoint
        for one in walked(ORIGINAL)
        if not (one.refused or has_requirements(one.entrypoint.parent) or provided_packages(one.entrypoint))
    ]
    assert len(servers) > 60
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(COMPAT), str(ORIGINAL)])}
    command = [sys.executable, "-c", IMPORTING, *map(str, servers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=servers[0].parent)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
