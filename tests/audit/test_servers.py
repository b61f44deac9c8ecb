"""Environments that are servers: a gym's resources server, an OpenEnv server and an MCP server, in processes of their
own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from palestra.audit import AuditReport, AuditSettings, FindingKind, audit_target
from palestra.audit.targets import targets_named
from tests.waiting import until

pytestmark = pytest.mark.e2e
K = FindingKind
ROOT = Path(__file__).parents[2]
OPENENV = Path(os.environ.get("PALESTRA_OPENENV_PYTHON") or ROOT / ".venv-openenv" / "bin" / "python")
APP = '''
from typing import Any

from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings, tool
from palestra.gym.servers.responses import output_text
from palestra.gym.servers.states import Session


class Lenient(ResourcesServer[ResourcesSettings]):
    @tool
    async def look(self, session: Session, place: str) -> str:
        """Look somewhere."""
        return "nothing"

    async def verify(self, session: Session, response: dict[str, Any], expected_answer: str) -> float:
        said = output_text(response)
        return float(CONDITION)
'''
CONFIG = """
lenient: {resources_servers: {lenient: {entrypoint: app.py, domain: other}}}
lenient_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: lenient}
      model_server: {type: responses_api_models, name: policy_model}
      datasets: [{name: example, type: example, jsonl_fpath: resources_servers/lenient/data/example.jsonl}]
"""


def audited(name: str, tmp_path: Path) -> AuditReport:
    (target,) = targets_named(name, tmp_path)
    return asyncio.run(audit_target(target, AuditSettings(limit=4, at_once=4, fresh_process=False, slow_s=30)))


def gym_folder(below: Path, condition: str) -> Path:
    folder = below / "resources_servers" / "lenient"
    (folder / "configs").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "app.py").write_text(APP.replace("CONDITION", condition))
    (folder / "configs" / "lenient.yaml").write_text(CONFIG)
    rows = [
        {"responses_create_params": {"input": f"What is {n} + {n}?"}, "expected_answer": str(2 * n)}
        for n in range(411, 415)
    ]
    (folder / "data" / "example.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("condition", "kinds"),
    [
        ("said.strip() == expected_answer", set()),
        ("said.strip() in expected_answer", {K.IDLE_PAYS}),
        ("expected_answer in said", {K.CHEAT_PAYS}),
    ],
)
def test_a_resources_server_is_audited_by_its_agent(tmp_path: Path, condition: str, kinds: set[FindingKind]) -> None:
    report = audited(str(gym_folder(tmp_path, condition)), tmp_path)
    assert {one.kind for one in report.findings} == kinds, [one.seen for one in report.findings]
    assert {one.probe: one.solved for one in report.probes}["gold"] == 4


def test_a_server_accepts_findings_with_a_reason(tmp_path: Path) -> None:
    folder = gym_folder(tmp_path, "expected_answer in said")
    config = folder / "configs" / "lenient.yaml"
    config.write_text(CONFIG.replace("domain: other", "domain: other, accepted_findings: {cheat-pays: by design}"))
    report = audited(str(folder), tmp_path)
    assert (report.findings, report.accepted) == ([], {K.CHEAT_PAYS: "by design"})
    assert report.ignored > 0


@contextmanager
def served(*command: str | Path) -> Iterator[int]:
    """Starts a program with a free port as its last argument, until it listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([*command, str(port)], cwd=ROOT) as process:

        def listens() -> bool:
            assert process.poll() is None
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        try:
            until(listens)
            yield port
        finally:
            process.terminate()


def test_tools_of_an_mcp_server_are_tried(tmp_path: Path) -> None:
    with served(sys.executable, "tests/audit/counting_server.py") as port:
        report = audited(f"http://127.0.0.1:{port}/mcp", tmp_path)
    assert {one.kind for one in report.findings} == {K.NONDETERMINISTIC}, [one.seen for one in report.findings]
    assert '"count"' in report.findings[0].seen
    assert {one.probe: one.episodes for one in report.probes}["random"] == 3


@pytest.mark.skipif(not OPENENV.exists(), reason="needs a venv with openenv: make clients")
def test_actions_of_an_openenv_server_are_tried(tmp_path: Path) -> None:
    with served(OPENENV, "tests/audit/guessing_server.py") as port:
        report = audited(f"http://127.0.0.1:{port}", tmp_path)
    assert {one.kind for one in report.findings} == {K.CHEAT_PAYS}, [one.seen for one in report.findings]
    assert "prints every number" in {one.probe for one in report.findings}
