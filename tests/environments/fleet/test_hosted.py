"""Hosted Fleet's path, with its unmodified SDK: our platform's REST face stands in for the hosted one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from palestra.environments.fleet import FleetTaskEnv, fleet_row
from palestra.environments.fleet.backends.hosted import judged
from palestra.environments.platform import make_task
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import PoolLimits
from tests.environments.fleet.conftest import PUT, call, put_call
from tests.environments.platform.api.conftest import started

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PALESTRA_FLEET_PYTHON") or ROOT / ".venv-fleet" / "bin" / "python")
WALK = Path(__file__).with_name("hosted_walk.py")


def embedded(file: Path, task_key: str, actions: list[str]) -> list[str]:
    env = FleetTaskEnv({"tasks_file": str(file)}, {"task_key": task_key, "max_turns": 9})
    env.init([])
    response = [env.step(action)["observations"][0]["content"] for action in actions]
    env.close()
    return response


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with fleet-python, mcp, msgspec: make clients")
def test_a_task_is_played_through_the_sdk_as_it_is_in_process(tmp_path: Path):
    own = "def v(env, final_answer=None):\n    return env.db('current').table('numbers').count().value / 4"
    rows = [fleet_row(make_task(PUT)), {**fleet_row(make_task(PUT)), "key": "mine", "verifier_func": own}]
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(rows))
    actions = [call("list"), call("get", name="zz"), put_call(), "<done>"]
    with InstancePool(PoolLimits(max_per_team=2)) as pool:
        for url in started(pool, PlatformAuth(secret=b"of the tests")):
            seen = [_walked(url, tmp_path, file, key, actions) for key in (PUT, "mine")]
        assert pool.usage().instances == 0
    assert [one["rewards"] for one in seen] == [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.25]]
    assert seen[0]["told"] == embedded(file, PUT, actions)
    assert seen[0]["tools"] == ["list", "get", "set", "drop", "put"]


def _walked(url: str, home: Path, file: Path, task_key: str, actions: list[str]) -> dict[str, Any]:
    environment = {
        "FLEET_BASE_URL": url,
        "FLEET_API_KEY": "sk_any",
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
    }
    response = [PYTHON, WALK, file, task_key, json.dumps(actions)]
    ran = subprocess.run(response, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_platform_elsewhere_plays_as_one_in_process_without_the_sdk(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    own = "def v(env, final_answer=None):\n    return env.db('current').table('numbers').count() / 4"
    mine = {**fleet_row(make_task(PUT)), "key": "mine", "verifier_func": own}
    broken = {**mine, "key": "broken", "verifier_func": "def v(env):\n    1 / 0"}
    asserts = {**mine, "key": "asserts", "verifier_func": "def v(env):\n    assert not env"}
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([fleet_row(make_task(PUT)), mine, broken, asserts]))
    actions = [call("list"), call("get", name="zz"), put_call(), "<done>"]
    seen: dict[str, tuple[list[str], float | None]] = {}
    with InstancePool(PoolLimits(max_per_team=1)) as pool:
        for url in started(pool, PlatformAuth(keys=("k",), secret=b"of the tests")):
            config: dict[str, Any] = {"tasks_file": str(file), "backend": "remote", "base_url": url, "api_key": "k"}
            config["ttl_seconds"] = 10**6
            for task_key in (PUT, "mine", "broken", "asserts"):
                env = FleetTaskEnv(config, {"task_key": task_key, "max_turns": 9})
                env.init([])
                with pytest.raises(RuntimeError, match=r"answered 403.*instance_limit_exceeded"):
                    FleetTaskEnv(config, {"task_key": PUT}).init([])
                steps = [env.step(action) for action in actions]
                (changed,) = asyncio.run(env.get_verdict_async())["changes"]
                assert (changed["kind"], changed["table"]) == ("insert", "numbers")
                assert make_task(PUT).params["value"] in changed["after"].values()
                env.close()
                seen[task_key] = [step["observations"][0]["content"] for step in steps], steps[-1]["reward"]
            assert pool.usage().instances == 0
            stranger = FleetTaskEnv({**config, "api_key": "x"}, {"task_key": PUT})
            with pytest.raises(RuntimeError, match="answered 401"):
                stranger.init([])
    assert "ttl_seconds 1000000 is more than the limit; it was reduced to 86400" in caplog.text
    assert seen[PUT] == (embedded(file, PUT, actions), 1.0)
    assert (seen["mine"][1], seen["broken"][1], seen["asserts"][1]) == (0.25, None, 0.0)
    with pytest.raises(RuntimeError, match="did not answer"):
        env.init([])


JUDGED = """
# We define def here, and nothing depends on it.
def v(env, final_answer=None, conversation=None):
    print("App keys: 1\\nApp more: 0\\n>>> SUCCESS_ACCUMULATOR >>>\\n['a']\\n<<< SUCCESS_ACCUMULATOR <<<")
    assert len(conversation) > 2
    if final_answer == "ask":
        print("JUDGE ERROR: nobody answered")
    return 0
"""


def test_a_platform_elsewhere_tells_what_the_verifier_printed(tmp_path: Path):
    """Partial rewards, and a judge that did not judge, come from there. Without a key, too."""
    row = {**fleet_row(make_task(PUT)), "prompt": "Answer with submit_final_answer.", "verifier_func": JUDGED}
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([row]))
    config: dict[str, Any] = {"tasks_file": str(file), "partial_reward": True}
    with InstancePool() as pool:
        for url in started(pool, PlatformAuth(secret=b"of the tests")):
            for backend in ({}, {"backend": "remote", "base_url": url}):
                for answer, reward in (("no", 0.5), ("ask", None)):
                    env = FleetTaskEnv(config | backend, {"task_key": PUT})
                    env.init([])
                    assert env.step(call("submit_final_answer", answer=answer))["reward"] == reward
                    env.close()


def response(**fields: Any) -> SimpleNamespace:
    """What the SDK says of an execution."""
    return SimpleNamespace(**{"success": True, "result": None, "error": None, "stdout": None, **fields})


def test_what_hosted_fleet_says_is_read_as_what_is_said_here():
    """Its own environment takes a success without a result for a 1, and a failed assertion for no grade."""
    failed = {"type": "AssertionError", "message": "no such row", "traceback": "…"}
    graded = judged(response(success=False, error=failed, stdout="App keys: 1\nApp more: 0"))
    assert (graded.score, graded.error) == (0.0, "no such row")
    for found, score, why in (
        (response(result=0.25), 0.25, ""),
        (response(result=True), 1.0, ""),
        (response(), None, "returned None"),
        (response(result=1.5), None, "returned 1.5"),
        (response(result="1"), None, "returned '1'"),
        (response(result=0, stdout="JUDGE ERROR: busy"), None, ""),
        (response(success=False, error={"type": "KeyError", "message": "'x'"}), None, "'x'"),
        (response(success=False), None, "did not run"),
    ):
        assert judged(found).score == score
        assert why in judged(found).error


@pytest.mark.skipif(find_spec("fleet") is not None, reason="fleet-python is installed here")
def test_without_the_sdk_it_is_said_what_to_install(tmp_path: Path):
    row = {"key": "x", "prompt": "p", "env_id": "booking"}
    (tmp_path / "tasks.json").write_text(json.dumps([row]))
    env = FleetTaskEnv({"tasks_file": str(tmp_path / "tasks.json"), "api_key": "k"}, {"task_key": "x"})
    with pytest.raises(RuntimeError, match="pip install fleet-python"):
        asyncio.run(env.init_async([]))
