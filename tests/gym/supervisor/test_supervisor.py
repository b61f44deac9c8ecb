"""Servers come up, come back, and leave nothing behind."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from palestra.gym.config import GymSources, ReservedPorts, load_gym
from palestra.gym.config.settings import READINESS
from palestra.gym.errors import GymConfigError, ServerStartError
from palestra.gym.records import GymConfig
from palestra.gym.supervisor import Supervisor
from palestra.gym.supervisor.child import log_to
from palestra.gym.supervisor.probes import NoAnswer, check_server, wait_for_upstreams
from tests.gym.supervisor.conftest import PATIENCE_S, RunningGym, is_alive, still_alive

StartGym = Callable[..., RunningGym]


def test_servers_of_every_kind_are_healthy(gym: RunningGym, gym_root: Path) -> None:
    found = {one["process_name"]: one for one in gym.get("/server_instances")}
    assert {name: (one["state"], one["status"]) for name, one in found.items()} == dict.fromkeys(
        ["policy_model", "simple_agent", "counter", "lone", "foreign"], ("healthy", "success")
    )
    shared = {found[name]["pid"] for name in ("policy_model", "simple_agent", "counter")}
    assert len(shared) == 1
    assert len(shared | {found["lone"]["pid"], found["foreign"]["pid"]}) == 3
    for name in ("counter", "lone"):
        assert gym.post(name, "/anything") == {"name": name, "pid": found[name]["pid"]}
    assert gym.get("/", found["foreign"]["url"])["cwd"] == str(gym_root / "resources_servers/foreign")
    assert gym.get("/readyz") == {"status": "ok"}


@pytest.mark.parametrize("name", ["counter", "lone"])
def test_a_killed_server_comes_back_and_its_callers_wait(gym: RunningGym, name: str) -> None:
    before = gym.instance(name)
    process = psutil.Process(before["pid"])
    process.kill()
    process.wait(PATIENCE_S)
    answer = gym.post(name, "/anything")  # it is starting: no connection is refused meanwhile
    assert answer["pid"] != before["pid"]
    assert gym.until_healthy(name, before["restarts"] + 1)["pid"] == answer["pid"]


def test_a_killed_stock_server_takes_its_children_along(gym: RunningGym) -> None:
    before = gym.instance("foreign")
    helper = psutil.Process(gym.get("/", before["url"])["helper"])
    os.kill(before["pid"], signal.SIGKILL)
    after = gym.until_healthy("foreign", before["restarts"] + 1)
    assert gym.get("/", after["url"])["helper"] != helper.pid
    assert not is_alive(helper)


def test_a_hung_server_is_started_again(gym: RunningGym) -> None:
    before = gym.instance("lone")
    os.kill(before["pid"], signal.SIGSTOP)
    after = gym.until_healthy("lone", before["restarts"] + 1)
    assert after["pid"] != before["pid"]
    assert not psutil.pid_exists(before["pid"])
    assert gym.post("lone", "/anything")["pid"] == after["pid"]


@pytest.mark.parametrize(
    ("number", "config", "count"),
    [
        # The shared ones, the lone one, the stock one and its helper, the reaper.
        (signal.SIGKILL, "all.yaml", 5),
        (signal.SIGINT, "one.yaml", 3),
        pytest.param(signal.SIGINT, "all.yaml", 5, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "all.yaml", 5, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_behind(start_gym: StartGym, number: int, config: str, count: int) -> None:
    running = start_gym("-c", config).start()
    left = running.processes()
    assert len(left) == count, left
    running.process.send_signal(number)
    running.process.wait(PATIENCE_S)
    assert still_alive(left) == []
    if number != signal.SIGKILL:
        assert running.process.returncode == 0
        assert running.rest().endswith("The gym has stopped.")


@pytest.mark.slow
def test_a_killed_reaper_is_replaced(start_gym: StartGym) -> None:
    running = start_gym("-c", "one.yaml").start()
    (server,) = [one for one in running.processes() if one.pid == running.instance("foreign")["pid"]]
    (reaper,) = [one for one in psutil.Process(running.process.pid).children() if one.pid != server.pid]
    reaper.kill()
    server.kill()
    running.until_healthy("foreign", 1)
    left = running.processes()
    running.process.kill()
    assert still_alive(left) == []


@pytest.mark.slow
def test_a_mistake_of_the_user_ends_in_words_and_code_1(start_gym: StartGym) -> None:
    running = start_gym("-c", "one.yaml", "foreign.resources_servers.foreign.is_bad=true")
    assert running.process.wait(PATIENCE_S) == 1
    assert "(foreign) this world is not for me" in running.rest()


# In this process: the servers are processes all the same.


@dataclass
class Tried:
    error: str
    said: str
    names: list[str]


def run_gym(root: Path, *overrides: str, file: str = "one.yaml", break_it: bool = False) -> Tried:
    """Until it ends by itself. `break_it`: once ready, the first server is killed."""
    response: list[str] = []

    async def run(config: GymConfig, ports: ReservedPorts) -> None:
        async with Supervisor(config, ports, response.append) as gym:
            await gym.ready()
            if break_it:
                os.kill(gym.instances()[0]["pid"], signal.SIGKILL)
            await gym.run()

    with ReservedPorts() as ports:
        sources = GymSources(files=[file], roots=[root], overrides=["head_server.port=0", *overrides])
        config = load_gym(sources, ports=ports)
        with pytest.raises(ServerStartError) as failed:
            asyncio.run(asyncio.wait_for(run(config, ports), PATIENCE_S))
    return Tried(str(failed.value), "\n".join(response), list(config.servers))


def test_bad_settings_end_the_start_with_the_servers_words(gym_root: Path) -> None:
    tried = run_gym(gym_root, "counter.resources_servers.counter.is_bad=true", "~lone", "~foreign", file="all.yaml")
    assert tried.names == ["policy_model", "simple_agent", "counter"]
    assert tried.error.startswith("gym: ended with code 78; its last output:")
    assert "ERROR cannot serve counter: is_bad: should be false" in tried.error
    assert "starting it again" not in tried.said


def test_a_server_that_always_crashes_is_given_up(gym_root: Path) -> None:
    tried = run_gym(gym_root, "foreign.resources_servers.foreign.is_bad=true")
    assert tried.said.count("foreign: ended with code 1; starting it again") == 2
    assert tried.error == "foreign: ended with code 1 (3 times in a row); its last output:\nthis world is not for me"


def test_after_too_many_restarts_the_gym_ends(gym_root: Path) -> None:
    tried = run_gym(gym_root, "gym.max_restarts=0", break_it=True)
    assert tried.error.startswith("foreign: killed by signal 9 (1 times in a row)")


def test_model_endpoints_that_do_not_answer_are_named(gym_root: Path, gym: RunningGym) -> None:
    overrides = [f"policy_base_url=[{gym.head}/v1, http://127.0.0.1:9/v1]", f"{READINESS}=3"]
    config = load_gym(GymSources(files=["all.yaml"], roots=[gym_root], overrides=overrides))
    with pytest.raises(ServerStartError) as failed:
        asyncio.run(wait_for_upstreams(config, print))
    assert "http://127.0.0.1:9/v1 (policy_model.responses_api_models.vllm_model.base_url)" in str(failed.value)
    assert gym.head not in str(failed.value)


def test_a_stranger_on_the_port_is_not_the_server(gym: RunningGym) -> None:
    port = gym.instance("counter")["port"]
    asyncio.run(check_server("counter", "127.0.0.1", port, PATIENCE_S))
    with pytest.raises(NoAnswer, match="the server 'counter' answers there"):
        asyncio.run(check_server("lone", "127.0.0.1", port, PATIENCE_S))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_cluster_needs_ray(gym_root: Path) -> None:
    async def start(config: GymConfig, ports: ReservedPorts) -> None:
        async with Supervisor(config, ports, print):
            pass

    with ReservedPorts() as ports:
        overrides = ["head_server.port=0", "gym.ray=true"]
        config = load_gym(GymSources(files=["one.yaml"], roots=[gym_root], overrides=overrides), ports=ports)
        with pytest.raises(GymConfigError, match=r"palestra\[ray\]"):
            asyncio.run(start(config, ports))


def test_a_log_that_cannot_be_written_costs_its_lines_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "gym.log").mkdir()
    heard: list[str] = []
    response = log_to(tmp_path, "gym", heard.append)
    response("one")
    response("two")
    assert "cannot write" in heard[0]
    assert heard[1:] == ["one", "two"]
    (tmp_path / "gym.log").rmdir()
    response("three")
    assert (tmp_path / "gym.log").read_text() == "three\n"


def test_a_gym_without_servers_is_refused(gym_root: Path) -> None:
    with ReservedPorts() as ports:
        config = load_gym(GymSources(overrides=["head_server.port=0"]), ports=ports)
        with pytest.raises(GymConfigError, match="no servers"):
            Supervisor(config, ports, print)
