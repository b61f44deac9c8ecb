"""What went wrong with a row is told in one small vocabulary: a real agent, model server and world, in front of an
endpoint that fails in every way."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from click.testing import CliRunner

from palestra.cli.gym import results as gym_results
from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.agents import SimpleAgent
from palestra.gym.collect.aggregating import FailedAttempts, aggregated
from palestra.gym.collect.collection import CollectionRequest, CollectionStatus, collect, delivered
from palestra.gym.collect.files import OutputFiles, read_lines
from palestra.gym.collect.playing import RowPlayer
from palestra.gym.collect.resuming import progress_of
from palestra.gym.collect.rows import Expansion
from palestra.gym.models import VLLMModel
from palestra.gym.servers.base import GymServer
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.row_calls import RetryPolicy
from palestra.types.gym_failures import FailureClass, error_text
from palestra.util.backoff import Backoff
from tests.gym.collect.scripted import run
from tests.gym.models.scripted import VLLM, Endpoint, completion
from tests.gym.servers.conftest import Counter as CounterWorld
from tests.gym.servers.conftest import serving

REASON = 'a "quoted" reason'
EXPECTED = {
    "429": ("model_rate_limited", 2, f"/v1/chat/completions answered 429: {REASON}"),
    "500": ("model_error", 2, f"/v1/chat/completions answered 500: {REASON}"),
    "hang": ("model_timeout", 2, "/chat/completions was not answered within 0.05 s"),
    "garbage": ("bad_answer", 2, "the answer is not JSON; it answered: <html>"),
    "break": ("verifier_error", 2, "counter/verify answered 500: ZeroDivisionError('division by zero')"),
    "judge me": ("judge_failed", 2, "the judge sleeps"),
    "unjudgeable": ("verifier_refused", 1, "counter/verify answered 422: body.expected_count: Expected `int`"),
    "unseeded": ("row_refused", 1, "counter/seed_session answered 422: body.initial_count: Expected `int`"),
}
"""By what is asked: the class, how many attempts, what the reason says."""


async def reply(path: str, body: dict[str, Any]) -> web.StreamResponse:
    """Of an endpoint that does what the question says."""
    wish = body["messages"][-1]["content"]
    if wish == "hang":
        await asyncio.sleep(60)
    if wish in ("429", "500"):
        return web.json_response({"error": {"message": REASON, "code": None}}, status=int(wish))
    return web.Response(text="<html>") if wish == "garbage" else web.json_response(completion(wish))


def classes(url: str) -> dict[str, tuple[type[GymServer], dict[str, Any]]]:
    model = VLLM | {"base_url": url, "max_attempts": 2}
    world = {"resources_server": {"name": "counter"}}
    return {
        "counter": (CounterWorld, {}),
        "policy": (VLLMModel, model),
        "hasty": (VLLMModel, model | {"request_timeout_s": 0.05}),
        "agent": (SimpleAgent, world | {"model_server": {"name": "policy"}}),
        "hasty_agent": (SimpleAgent, world | {"model_server": {"name": "hasty"}}),
    }


def write_rows(folder: Path) -> CollectionRequest:
    odd = {
        "unjudgeable": {"expected_count": "many"},
        "unseeded": {"initial_count": "many"},
        "hang": {"agent_ref": {"name": "hasty_agent"}},
    }
    rows = [
        {"responses_create_params": {"input": wish}, "expected_count": 0, **odd.get(wish, {})}
        for wish in ("fine", *EXPECTED)
    ]
    (folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in rows))
    return CollectionRequest(
        input=folder / "rows.jsonl",
        output=folder / "out.jsonl",
        expansion=Expansion(agent="agent"),
        patience=RetryPolicy(attempts=2),
    )


async def collected(wanted: CollectionRequest) -> tuple[CollectionStatus, list[dict[str, Any]]]:
    async with Endpoint(reply).serving() as url, HttpClient() as client:
        with serving(classes(url), is_shared=False) as gym:
            directory = ServerDirectory(client, url)
            directory.urls = {name: one.url for name, one in gym.config.servers.items()}
            directory.kinds = {name: str(one.kind) for name, one in gym.config.servers.items()}
            standing = await collect(wanted, RowPlayer(client, directory, wanted.patience), {})
            return standing, await aggregated(delivered(wanted.output), directory, client)


def test_every_failure_is_told_by_its_class_and_once_in_rows_metrics_and_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.rollouts.gym.row_calls.BACKOFF", Backoff(0.01, 0.01))
    expected = write_rows(tmp_path)
    standing, figures = run(collected(expected))
    assert (standing.done, standing.failed) == (1, len(EXPECTED))
    counts = Counter({kind: attempts for kind, attempts, _ in EXPECTED.values()})
    assert standing.classes == counts

    request = ["fine", *EXPECTED]
    failures = list(read_lines(OutputFiles(expected.output).failures))
    for wish, (kind, attempts, words) in EXPECTED.items():
        own = [one for one in failures if request[one["_ng_task_index"]] == wish]
        assert [one["_ng_failure_class"] for one in own] == [kind] * attempts
        assert all(words in one["failure_reason"] for one in own), own[0]["failure_reason"]
        assert not any("\\" in one["failure_reason"] for one in own), "a reason is not escaped in itself"
        assert own[0].get("_ng_failure_terminal", False) is (attempts == 1)
    statuses = {request[one["_ng_task_index"]]: one.get("status") for one in failures}
    assert (statuses["429"], statuses["500"], statuses["hang"]) == (429, 500, None)

    entry, hasty = FailedAttempts([expected.output]).beside_agents(figures)
    assert (entry["agent_ref"]["name"], entry["key_metrics"]["mean/reward"]) == ("agent", 1.0)
    assert (hasty["agent_ref"]["name"], hasty["key_metrics"]) == ("hasty_agent", {})
    assert entry["failed_attempts"] | hasty["failed_attempts"] == counts
    assert hasty["failed_attempts"] == {"model_timeout": 2}
    shown = CliRunner().invoke(gym_results.profile, ["--rollouts", str(expected.output), "--partial"])
    assert shown.exit_code == 0, shown.output
    rows = dict(line.split() for line in shown.output.splitlines() if line.startswith("failed_attempts/"))
    assert rows == {f"failed_attempts/{kind}": str(count) for kind, count in counts.items()}


@pytest.mark.parametrize(
    ("old", "new"),
    [("run_failed", "agent_error"), ("server_lost", "server_died"), ("mine", "mine"), ("row_refused", "row_refused")],
)
def test_files_of_earlier_versions_are_read_in_todays_words(tmp_path: Path, old: str, new: str) -> None:
    labels = {"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "agent"}}
    files = OutputFiles(tmp_path / "out.jsonl")
    files.failures.write_bytes(orjson.dumps({"_ng_failure_class": old, "failure_reason": "…", **labels}) + b"\n")
    assert FailedAttempts([files.results]).by_agent == {"agent": {new: 1}}
    assert progress_of(files).failed == Counter({(0, 0): 0 if new == "server_died" else 1})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\"ValueError('x')\"", "ValueError('x')"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body", "a"], "msg": "m", "input": {"huge": 1}}]}', "body.a: m"),
        (b'{"error": {"message": "later", "code": 3}}', "later"),
        (b'{"error": "no"}', "no"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"", ""),
        (b"<html>\xff", "<html>�"),
        (b"[" * 5000, "[" * 2000),
    ],
)
def test_an_errors_words_are_found_in_any_body(body: bytes, words: str) -> None:
    assert error_text(body) == words


def test_the_vocabulary_is_the_one_that_is_documented() -> None:
    text = Path(__file__).parents[3].joinpath("docs/gym.md").read_text(encoding="utf-8")
    section = text.partition("## Failures\n")[2].partition("\n## ")[0]
    named = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert named == [str(one) for one in FailureClass]
