"""What a rollout's page shows beside the conversation: its level, its turns in time, the verifier's verdict, and the
command that plays its task again."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from palestra.environments.session import EnvSession
from palestra.runs.reader import Part, RunReader
from palestra.runs.record_files import write_records
from palestra.runs.writer import RunFolder
from palestra.types.rollouts import Group, Rollout, Task
from palestra.types.sampling import VersionSegment
from palestra.view.app import create_app
from palestra.view.rollouts.rollout_records import complete_tokens, versions_of
from palestra.view.runs.catalogue import Catalogue
from tests.environments.fleet.conftest import PUT, an_env, put_call
from tests.environments.fleet.scripted import DONE
from tests.training.records import make_config, make_rollout, make_turn
from tests.view.browser import opened_browser, opened_page, serious_findings, served, why_not
from tests.view.conftest import OpenClient
from tests.view.folders import HOSTILE

API = "/api/v1/runs/one"


def write_group(root: Path, rollouts: list[Rollout], **extras: Any) -> None:
    """A run with one group in its first step."""
    task = Task(id=rollouts[0].task, environment=rollouts[0].environment, prompt=[], extras=extras)
    with RunFolder.create(root, "one", make_config()) as folder:
        folder.write_rollouts(1, [Group(id="g", task=task, step=1, rollouts=rollouts)])


@pytest.fixture
def client_of(tmp_path: Path, open_client: OpenClient) -> Callable[..., TestClient]:
    """`client_of(rollouts)`: a client of a dashboard with such a run."""

    def show(rollouts: list[Rollout], **extras: Any) -> TestClient:
        write_group(tmp_path, rollouts, **extras)
        return open_client(tmp_path)

    return show


def page_of(client: TestClient, rollout_id: str = "g-0") -> str:
    answer = client.get("/runs/one/rollout", params={"step": 1, "id": rollout_id})
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize(
    ("extras", "level"), [({"level": "mail-1"}, "mail-1"), ({"difficulty": 3}, "3"), ({"level": "", "answer": 1}, None)]
)
def test_rollouts_have_the_level_that_their_task_names(client_of, extras, level):
    client = client_of([make_rollout()], **extras)
    record = client.get(f"{API}/rollout", params={"step": 1, "id": "g-0"}).json()["record"]
    assert record["level"] == level
    assert ("<dt>level</dt>" in page_of(client)) == (level is not None)


def test_levels_are_a_facet_and_a_field_of_conditions(tmp_path, client_of):
    client = client_of([make_rollout(f"g-{i}") for i in range(4)])
    file = RunReader(tmp_path / "one").step_file(Part.ROLLOUTS, 1)
    (records,) = [RunReader(tmp_path / "one").read_rollouts(1)]
    write_records(file, [{**one, "level": level} for one, level in zip(records, ("1", "1", "2", None), strict=True)])
    found = client.get(f"{API}/rollouts", params={"step": 1}).json()
    (facet,) = [one for one in found["facets"] if one["name"] == "level"]
    assert {one["text"]: one["count"] for one in facet["values"]} == {"1": 2, "2": 1, "unknown": 1}
    for value in facet["values"]:
        chosen = client.get(f"{API}/rollouts", params={"step": 1, "where": value["where"]}).json()
        assert chosen["total"] == value["count"], value["where"]


def test_turns_are_drawn_in_the_order_of_play_where_times_were_recorded(client_of):
    turns = [make_turn(sample_s=0.25, env_s=0.5), make_turn(sample_s=0.125, env_s=0.0)]
    client = client_of([make_rollout("g-0", turns=turns), make_rollout("g-1")])
    page = page_of(client)
    for title in ("turn 1: sampling 0.25 s", "turn 1: environment 0.5 s", "turn 2: sampling 0.125 s"):
        assert title in page
    assert "Not recorded turn by turn" not in page
    assert "Not recorded turn by turn" in page_of(client, "g-1")


def test_a_platform_task_shows_the_rows_it_changed_and_the_verdict(client_of):
    async def verdict() -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            session = EnvSession(an_env(PUT, max_turns=5), pool, 30.0)
            await session.init([])
            await session.step(put_call(PUT))
            assert (await session.step(DONE)).reward == 1.0
            found = await session.verdict()
            await session.close()
        return found

    rollout = make_rollout(task=PUT, environment="fleet_task", verdict=asyncio.run(verdict()))
    client = client_of([rollout])
    shown = client.get(f"{API}/rollout", params={"step": 1, "id": "g-0"}).json()
    assert (shown["verdict"]["score"], shown["verdict"]["met"]) == (1.0, ["changes"])
    assert [one["kind"] for one in shown["verdict"]["changes"]] == ["insert"]
    page = page_of(client)
    assert "✓ changes" in page
    assert "change-insert" in page
    assert f'href="../../platform?task={PUT}"' in page
    assert "verdict" not in client.get(f"{API}/rollouts", params={"step": 1}).json()["groups"][0]["rollouts"][0]


@pytest.mark.parametrize(
    "verdict",
    [
        {"expected": HOSTILE, "found": ["a", {"b": 1}], "score": 0.5},
        {"met": HOSTILE, "changes": 3},
        {"changes": [{"table": HOSTILE, "kind": "insert", "key": [1], "after": {HOSTILE: HOSTILE}}]},
        {"score": "high"},
    ],
)
def test_verdicts_of_any_form_are_shown_as_text(client_of, verdict):
    page = page_of(client_of([make_rollout(verdict=verdict)]))
    assert "What the verifier saw and said" in page
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_a_coding_task_shows_the_diff_and_what_the_verifier_printed(client_of):
    patch = f"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old\n+{HOSTILE}\n" + "+more\n" * 1000
    verdict = {"patch": patch, "printed": "1 passed"}
    client = client_of([make_rollout(task="1-fix-typo", environment="coding", verdict=verdict)])
    page = page_of(client)
    assert '<div class="patch-removed">-old</div>' in page
    assert '<div class="patch-place">@@ -1 +1 @@</div>' in page
    assert "… and 605 lines" in page
    assert "1 passed" in page
    assert "<script>alert" not in page


@pytest.mark.parametrize("times", [3, [[1]], [["a", 2]], [[1, None]], None])
def test_times_that_are_none_are_not_drawn(tmp_path, client_of, times):
    client = client_of([make_rollout()])
    run = RunReader(tmp_path / "one")
    write_records(run.step_file(Part.ROLLOUTS, 1), [{**run.read_rollouts(1)[0], "turn_times": times}])
    assert "Not recorded turn by turn" in page_of(client)


def test_the_command_plays_the_task_again(tmp_path, client_of):
    client = client_of([make_rollout(task="it's <b>one</b>", environment="stockroom")])
    again = client.get(f"{API}/rollout", params={"step": 1, "id": "g-0"}).json()["again"]
    words = shlex.split(again["command"])
    assert words[:3] == ["palestra", "eval", str(tmp_path / "one" / "config.json")]
    name, _, ids = words[3].partition("=")
    assert (name, msgspec.json.decode(ids)) == ("task_ids", ["stockroom/it's <b>one</b>"])
    assert again["models"] == ["ephebe"]
    folder = tmp_path / "one" / "checkpoints"
    folder.mkdir(exist_ok=True)
    for name in ("step_000002.json", "step_000010.json", "step_damaged.json"):
        (folder / name).write_text("{")
    again = client.get(f"{API}/rollout", params={"step": 1, "id": "g-0"}).json()["again"]
    assert again["models"] == ["one@10", "one@2", "ephebe"]
    page = page_of(client)
    assert "<b>one</b>" not in page
    assert 'data-fills="again"' in page


@pytest.mark.ui
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_rollout_leads_to_its_task_and_to_the_command_with_any_checkpoint(tmp_path):
    verdict = {"score": 0.0, "missed": ["changes"], "stdout": "missing: a row", "changes": []}
    turns = [make_turn(sample_s=0.25, env_s=0.5), make_turn(sample_s=0.125)]
    write_group(tmp_path, [make_rollout(task=PUT, environment="fleet_task", turns=turns, verdict=verdict)])
    for step in (1, 2):
        pointer = {"step": step, "address": f"tinker://x:train:0/weights/step-{step}"}
        file = tmp_path / "one" / "checkpoints" / f"step_{step:06}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(msgspec.json.encode(pointer))
    app = create_app(Catalogue(tmp_path))
    with (
        served(app) as port,
        opened_browser() as browser,
        opened_page(browser, f"http://127.0.0.1:{port}", bypass_csp=True) as page,
    ):
        page.goto("/runs/one/rollout?step=1&id=g-0")
        assert "✗ changes" in page.get_by_role("region", name="Verdict").inner_text()
        assert page.locator(".waterfall.turns rect").count() == 4
        assert page.locator("#again").inner_text().endswith("--model one@2")
        page.get_by_label("Model").select_option("one@1")
        assert page.locator("#again").inner_text().endswith("--model one@1")
        assert serious_findings(page) == {}
        page.get_by_role("link", name="play it by hand").click()
        assert page.get_by_label("Task", exact=True).input_value() == PUT


def test_the_page_and_the_strip_show_which_weights_drew_what(tmp_path, open_client):
    segments = [VersionSegment(0, 3), VersionSegment(4, 5)]
    rollout = make_rollout("g-0", turns=[make_turn(6, version=3, segments=segments), make_turn(2, 3, version=5)])
    plain = make_rollout("g-1", turns=[make_turn(2, version=5)])
    group = Group(id="g", task=Task(id="t", environment="math", prompt=[]), step=1, rollouts=[rollout, plain])
    with RunFolder.create(tmp_path, "one", make_config()) as folder:
        folder.write_rollouts(1, [group], [])
    client = open_client(tmp_path)
    weights = page_of(client).split("<dt>weights</dt>")[1].split("</dd>")[0]
    assert re.findall(r"\d+", re.sub("<[^>]*>", "", weights)) == ["3", "4", "5", "4"]  # each with its tokens
    assert page_of(client, "g-1").split("<dt>weights</dt>")[1].startswith("<dd>5</dd>")
    tokens = client.get(f"{API}/tokens", params={"step": 1, "id": "g-0"}).json()
    assert tokens["versions"] == [None] * 2 + [3] * 4 + [5] * 2 + [None] * 3 + [5] * 2
    for damaged in ([{"start": -1, "version": 3}], [{"start": 2}], "no list"):
        turn = {"tokens": [1, 2], "segments": damaged}
        with pytest.raises(msgspec.ValidationError):
            complete_tokens({"prompt": [1], "turns": [turn]})
    assert versions_of([[1, 2], [3]]) == versions_of(None) == []
