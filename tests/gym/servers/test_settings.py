"""What is said about a server and what it knows: a key that nobody would read is an error with the nearest one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from palestra.gym.config import GymSources, load_gym
from palestra.gym.errors import GymConfigError
from palestra.gym.peers import GymPeers
from palestra.gym.records import GymConfig
from palestra.gym.registry import load_class
from palestra.gym.search_folders import SHIPPED
from palestra.gym.servers.base import GymServer

MODEL = "responses_api_models/vllm_model/configs/vllm_model.yaml"
WORLDS = sorted(str(file.relative_to(SHIPPED)) for file in SHIPPED.glob("resources_servers/*/configs/*.yaml"))
POLICY = {"policy_base_url": "http://127.0.0.1:1/v1", "policy_api_key": "none", "policy_model_name": "none"}


def loaded(world: str, *overrides: str) -> GymConfig:
    return load_gym(GymSources(files=(world, MODEL), roots=(), overrides=overrides, initial=POLICY))


def made(config: GymConfig) -> list[GymServer]:
    peers = GymPeers(config)
    return [load_class(instance)(instance, peers) for instance in config.servers.values()]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mcqa.resources_servers.mcqa.prot=1", ".mcqa.prot: unknown setting\n  did you mean: port?"),
        ("mcqa.resources_servers.mcqa.gradin_mode=x", "did you mean: grading_mode?"),
        ("mcqa.resources_servers.mcqa.zzz=1", "there are: expose_tools_over_mcp, grading_mode, max_sessions"),
        ("mcqa_simple_agent.responses_api_agents.simple_agent.max_stps=3", "did you mean: max_steps"),
        ("+mcqa_simple_agent.responses_api_agents.simple_agent.max_stps=3", "did you mean: max_steps"),
        ("mcqa_simple_agent.responses_api_agents.simple_agent.resources_server.nam=x", "unknown field `nam`"),
        ("policy_model.responses_api_models.vllm_model.modl=x", "did you mean: model"),
    ],
)
def test_an_unknown_key_below_a_server_is_an_error_with_the_nearest(override: str, words: str) -> None:
    with pytest.raises(GymConfigError) as response:
        made(loaded("resources_servers/mcqa/configs/mcqa.yaml", override))
    assert words in str(response.value)
    assert override.lstrip("+").split(".")[0] in str(response.value)


@pytest.mark.parametrize("world", WORLDS)
def test_shipped_configs_say_nothing_that_their_servers_do_not_know(world: str) -> None:
    assert len(made(loaded(world))) == 3


@pytest.mark.e2e
def test_a_gym_ends_with_all_its_unknown_keys(tmp_path: Path) -> None:
    wrong = ["mcqa.resources_servers.mcqa.prot=1", "policy_model.responses_api_models.vllm_model.modl=x"]
    command = [sys.executable, "-m", "palestra.cli", "gym", "run", "-c", "resources_servers/mcqa/configs/mcqa.yaml"]
    command += ["-c", MODEL, *(f"{key}={value}" for key, value in POLICY.items()), "head_server.port=0", *wrong]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    response = done.stderr.partition("error: ")[2]
    assert "mcqa.resources_servers.mcqa.prot: unknown setting\n  did you mean: port?" in response
    assert "policy_model.responses_api_models.vllm_model.modl: unknown setting\n  did you mean: model" in response


@pytest.mark.e2e
def test_code_that_cannot_be_loaded_is_no_mistake_of_the_config(tmp_path: Path) -> None:
    gym = [sys.executable, "-m", "palestra.cli", "gym"]
    subprocess.run([*gym, "new", "broken"], cwd=tmp_path, capture_output=True, timeout=100, check=True)
    (tmp_path / "resources_servers/broken/app.py").write_text("import nothing_of_that_name\n")
    command = [*gym, "run", "-c", "resources_servers/broken/configs/broken.yaml", "-c", MODEL, "head_server.port=0"]
    command += [f"{key}={value}" for key, value in POLICY.items()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "No module named 'nothing_of_that_name'" in done.stderr
    assert "starting it again" not in done.stderr
