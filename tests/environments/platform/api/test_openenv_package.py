"""Apps as OpenEnv packages: their files, their server, and OpenEnv's own tools over both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner

from palestra.cli.app import main
from palestra.environments.platform import APPS, Instance, make_task
from palestra.environments.platform.api.openenv.package import write_package
from palestra.environments.platform.api.openenv.standalone import KEYS, StandaloneApp
from palestra.environments.platform.golden import play_golden
from tests.environments.platform.api.conftest import serving

ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("PALESTRA_OPENENV_PYTHON") or ROOT / ".venv-openenv" / "bin" / "python")
WALK = Path(__file__).with_name("openenv_package_walk.py")


@pytest.mark.parametrize("app", APPS)
def test_a_package_says_what_the_app_is(tmp_path: Path, app: str):
    written = write_package(APPS[app], tmp_path / "new")
    assert {str(file.relative_to(tmp_path / "new")) for file in written} >= {
        "openenv.yaml",
        "pyproject.toml",
        "client.py",
        "models.py",
        "server/app.py",
        "server/Dockerfile",
    }
    for file in written:
        assert "$" not in file.read_text().replace("$ ", "")
        if file.suffix == ".py":
            compile(file.read_text(), str(file), "exec")
    manifest = yaml.safe_load((tmp_path / "new" / "openenv.yaml").read_text())
    tools = [tool.name for tool in APPS[app].tools]
    assert (manifest["name"], manifest["app"]) == (f"palestra_{app}", "server.app:app")
    assert manifest["validation"]["capabilities"]["declared_tools"] == tools
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["server"] == f"palestra_{app}.server.app:main"


def test_the_command_writes_only_where_nothing_is(tmp_path: Path):
    def said(*args: str):
        return CliRunner().invoke(main, ["platform", "openenv-package", *args])

    done = said("keys", str(tmp_path / "keys"), "--json")
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "keys" / "openenv.yaml") in json.loads(done.stdout)["files"]
    (tmp_path / "keys" / "openenv.yaml").write_text("mine")
    again = said("keys", str(tmp_path / "keys"))
    assert (again.exit_code, "is not empty; name a new folder" in again.stderr) == (1, True)
    assert (tmp_path / "keys" / "openenv.yaml").read_text() == "mine"
    assert "did you mean keys?" in said("kyes", str(tmp_path / "other")).stderr
    assert not (tmp_path / "other").exists()


def test_an_app_alone_is_at_the_root_and_open_unless_keys_are_named(monkeypatch: pytest.MonkeyPatch):
    call = {"action": {"type": "call_tool", "tool_name": "list", "arguments": {}}}
    for url in serving(StandaloneApp("keys")):
        with httpx.Client(base_url=url, headers={"Host": "space.example"}) as http:
            assert http.get("/metadata").json()["name"] == "keys"
            assert http.post("/step", json=call).status_code == 200
            assert (http.get("/").status_code, http.get("/i/x/mcp").status_code) == (404, 404)
    monkeypatch.setenv(KEYS, "one two")
    for url in serving(StandaloneApp("keys")):
        with httpx.Client(base_url=url) as http:
            assert http.get("/health").json() == {"status": "healthy"}
            statuses = [
                http.post("/step", json=call, headers=headers).status_code
                for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Bearer two"})
            ]
    assert statuses == [401, 401, 200]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """As its README says, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        said = next(line for line in server.stderr if "running on" in line)
        yield said.partition("running on ")[2].split()[0]
    finally:
        server.terminate()
        server.wait(30)


def ran(*command: str | Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([*command], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with openenv: make clients")
@pytest.mark.parametrize("key", ["keys-largest-2-3", "mail-move_only-0-3"])
def test_openenv_accepts_a_package_and_plays_it(tmp_path: Path, key: str):
    task = make_task(key)
    folder = tmp_path / f"palestra_{task.app.key}"
    write_package(task.app, folder)
    openenv = PYTHON.with_name("openenv")
    report = json.loads(ran(openenv, "validate", folder, "--level", "static", "--json"))
    assert (report["verdict"], [one["status"] for one in report["results"]]) == ("pass", ["pass"])
    gold = play_golden(task, Instance(task.seed))
    calls = json.dumps([[call.tool, call.arguments] for call, _ in gold.steps])
    with served(folder) as url:
        assert json.loads(ran(openenv, "validate", "--json", "--url", url))["passed"]
        response = ran(
            PYTHON,
            WALK,
            folder.name,
            task.app.key.capitalize(),
            url,
            key,
            calls,
            json.dumps(gold.answer),
            PYTHONPATH=str(tmp_path),
        )
    seen = json.loads(response.splitlines()[-1])
    tools = [tool.name for tool in task.app.tools]
    assert (seen["gold"]["prompt"], seen["gold"]["tools"][: len(tools)]) == (task.prompt, tools)
    assert seen["gold"]["results"] == [json.loads(result.text) for _, result in gold.steps]
    assert (seen["gold"]["end"], seen["null"]) == ([1.0, True], [0.0, True])
