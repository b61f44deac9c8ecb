"""`palestra platform mcp`: one app, or one task, over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from palestra.cli.app import main
from palestra.environments.platform import APPS, Instance, make_task
from palestra.environments.platform.golden import play_golden

PUT, LARGEST = "keys-put_number-0b-17", "keys-largest-2-3"
OLD_PYTHON = Path(os.environ.get("PALESTRA_MCP1_PYTHON") or Path(__file__).parents[4] / ".venv-mcp1" / "bin" / "python")
COMMAND = [sys.executable, "-m", "palestra.cli", "platform", "mcp"]
TOOLS = [tool.name for tool in APPS["keys"].tools]


def said(*args: str, messages: list[Any] | None = None) -> Result:
    typed = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in messages or [])
    return CliRunner().invoke(main, ["platform", "mcp", *args], input=typed)


def asked(*args: str, messages: list[Any]) -> list[dict[str, Any]]:
    """The answers. A line that is none would not be read."""
    result = said(*args, messages=messages)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def request(method: str, number: int = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return request("tools/call", name=tool, arguments=arguments)


def text_of(answer: dict[str, Any]) -> Any:
    (block,) = answer["result"]["content"]
    return json.loads(block["text"])


def test_a_handshake_and_calls_over_lines():
    begun, listed, put, numbered = asked(
        "keys",
        messages=[
            request("initialize", protocolVersion="2025-06-18", capabilities={}),
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            "",
            request("tools/list"),
            call("put", value=7),
            request("ping", 5),
        ],
    )
    assert (begun["result"]["protocolVersion"], begun["result"]["serverInfo"]["name"]) == (
        "2025-06-18",
        "palestra-keys",
    )
    assert "today is 2026-" in begun["result"]["instructions"]
    assert [tool["name"] for tool in listed["result"]["tools"]] == TOOLS
    assert text_of(put) == {"put": 7}
    assert numbered == {"jsonrpc": "2.0", "id": 5, "result": {}}


def test_what_is_no_message_is_told_so_and_the_connection_goes_on():
    codes = [answer.get("error", {}).get("code") for answer in asked("keys", messages=["{", "[]", request("ping")])]
    assert codes == [-32700, -32600, None]


def test_the_modern_era_needs_no_headers_here():
    meta = {f"io.modelcontextprotocol/{name}": value for name, value in (("protocolVersion", "2026-07-28"),)}
    both = {**meta, "io.modelcontextprotocol/clientCapabilities": {}}
    found, called, incomplete = asked(
        "keys",
        messages=[
            request("server/discover", _meta=both),
            request("tools/call", name="put", arguments={"value": 7}, _meta=both),
            request("tools/list", _meta=meta),
        ],
    )
    assert found["result"]["supportedVersions"][0] == "2026-07-28"
    assert called["result"]["resultType"] == "complete"
    assert incomplete["error"]["code"] == -32602


def test_the_world_is_the_one_that_was_named():
    first, other, again = (
        text_of(asked("keys", "--data", data, messages=[call("list")])[0]) for data in ("tiny-1", "tiny-2", "tiny-1")
    )
    assert first == again != other


def test_a_task_brings_its_world_its_words_and_a_verdict():
    task = make_task(PUT)
    begin = request("initialize", protocolVersion="2025-06-18")
    for value, score in ((task.params["value"], "1.0"), (task.params["value"] + 1, "0.0")):
        result = said(PUT, messages=[begin, request("tools/list"), call("put", value=value)])
        begun, listed, _ = map(json.loads, result.stdout.splitlines())
        assert task.prompt in begun["result"]["instructions"]
        assert [tool["name"] for tool in listed["result"]["tools"]] == TOOLS
        assert f"{PUT}: score {score}" in result.stderr
    assert "missing: a new row in numbers" in result.stderr


def test_an_answer_is_given_once_and_ends_the_task():
    expected = make_task(LARGEST).params["wanted"]
    submit = "submit_final_answer"
    result = said(LARGEST, messages=[request("tools/list"), call("list"), call(submit, answer=expected), call("list")])
    listed, _, given, late = map(json.loads, result.stdout.splitlines())
    assert [tool["name"] for tool in listed["result"]["tools"]] == [*TOOLS, submit]
    assert (text_of(given), given["result"]["isError"]) == ({"submitted": expected}, False)
    assert (text_of(late)["error"], late["result"]["isError"]) == ("task_over", True)
    assert result.stderr.count("score 1.0") == 1
    unread = said(LARGEST, messages=[call("list"), call(submit, reply="x"), call(submit, answer=3)])
    assert [text_of(json.loads(line)).get("error") for line in unread.stdout.splitlines()[1:]] == ["bad_arguments"] * 2
    assert "score 0.0" in unread.stderr


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["kyes"], 3, "did you mean keys?"),
        (["keys-nothing-0-1"], 3, "keys has no task template 'nothing'"),
        (["keys", "--data", "vast-1"], 2, "a key looks like small-17"),
        ([PUT, "--data", "small-1"], 2, "a task has its own data"),
    ],
)
def test_what_cannot_be_served_is_told_and_nothing_is_said_on_stdout(args: list[str], code: int, told: str):
    result = said(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert told in result.stderr


def test_the_help_shows_what_to_write_into_an_agents_config():
    shown = said("--help").output
    block = shown[shown.index("{") : shown.rindex("}") + 1]
    assert json.loads(block) == {"mcpServers": {"mail": {"command": "palestra", "args": ["platform", "mcp", "mail"]}}}


def solution(key: str) -> tuple[list[tuple[str, dict[str, Any]]], str | None]:
    task = make_task(key)
    played = play_golden(task, Instance(task.seed))
    return [(step.tool, step.arguments) for step, _ in played.steps], played.answer


@pytest.mark.e2e
@pytest.mark.parametrize(("mode", "version"), [("auto", "2026-07-28"), ("legacy", "2025-11-25")])
def test_the_official_client_plays_a_task_in_a_process_of_its_own(tmp_path: Path, mode: Any, version: str):
    mcp = pytest.importorskip("mcp")
    from mcp.client.stdio import stdio_client

    key = "travel-events_during_stay-2-2"
    calls, answer = solution(key)
    log = tmp_path / "stderr.txt"

    async def play(errlog: Any) -> None:
        server = mcp.StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], key])
        async with mcp.Client(stdio_client(server, errlog=errlog), mode=mode) as client:
            assert client.protocol_version == version
            assert make_task(key).prompt in client.instructions
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names[:-1] == [tool.name for tool in APPS["travel"].tools]
            for tool, arguments in calls:
                assert not (await client.call_tool(tool, arguments)).is_error
            assert not (await client.call_tool(names[-1], {"answer": answer})).is_error

    with log.open("w") as errlog:
        asyncio.run(play(errlog))
    assert f"{key}: score 1.0" in log.read_text()


@pytest.mark.e2e
@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="needs a venv with mcp<2: make clients")
def test_mcp_1_plays_over_stdio():
    walk = Path(__file__).with_name("mcp1_walk.py")
    ran = subprocess.run([OLD_PYTHON, walk, *COMMAND, "keys"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    response = json.loads(ran.stdout)
    assert (response["version"], response["tools"], response["good"]) == ("2025-11-25", TOOLS, [False, ['{"put":7}']])


@pytest.mark.e2e
def test_the_process_ends_with_its_input_and_also_when_nobody_reads():
    with subprocess.Popen([*COMMAND, PUT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdin is not None
        assert ran.stdout is not None
        ran.stdin.write(json.dumps(request("ping")) + "\n")
        ran.stdin.flush()
        assert json.loads(ran.stdout.readline())["result"] == {}
        ran.stdin.close()
        assert ran.wait(60) == 0
    with subprocess.Popen([*COMMAND, "keys"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdin is not None
        assert ran.stdout is not None
        ran.stdout.close()
        ran.stdin.write(json.dumps(request("ping")) + "\n")
        ran.stdin.flush()
        assert ran.wait(60) in (0, 1)
