"""The JSON API: what the pages show, for programs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import httpx
import pytest

from palestra.runs.reader import RunReader
from palestra.runs.writer import RunFolder
from palestra.view.app import create_app
from palestra.view.live import follow
from palestra.view.runs.catalogue import Catalogue
from palestra.view.serving import make_server
from tests.training.records import make_config
from tests.view.folders import ACCIDENTS, write_run

API = "/api/v1"


@pytest.mark.usefixtures("second")
def test_runs_are_listed_starred_first_then_newest(client):
    client.post(f"{API}/runs/first/labels", json={"tag": "star"})
    page = client.get(f"{API}/runs").json()
    assert [(row["name"], row["is_starred"]) for row in page["runs"]] == [("first", True), ("second", False)]
    assert (page["total"], page["all"]) == (2, 2)
    row = page["runs"][0]
    assert (row["status"], row["last_step"], row["steps"], row["eval_success"]) == ("done", 4, 4, 0.5)
    assert (row["curve_name"], len(row["curve"])) == ("reward/mean", 4)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["second", "first"]),
        ("fir", ["first"]),
        ("state:done fir", ["first"]),
        ("tag:good", ["second"]),
        ("good", ["second"]),
        ("tag:fir", []),
        ("env:math", ["second", "first"]),
        ("a<b", []),
    ],
)
@pytest.mark.usefixtures("second")
def test_a_filter_finds_every_word_somewhere(client, text, names):
    client.post(f"{API}/runs/second/labels", json={"tag": "good"})
    assert [row["name"] for row in client.get(f"{API}/runs", params={"filter": text}).json()["runs"]] == names


def test_a_row_follows_the_files(client, root):
    with RunFolder.create(root, "live", make_config(steps=9)) as run:
        assert client.get(f"{API}/runs/live").json()["row"]["last_step"] is None
        run.write_metrics(1, {"reward/mean": 0.5})
        row = client.get(f"{API}/runs/live").json()["row"]
        assert (row["status"], row["last_step"], row["reward_mean"]) == ("running", 1, 0.5)
    detail = client.get(f"{API}/runs/live").json()
    assert detail["row"]["status"] == "killed"
    assert detail["resume"].startswith("palestra train --resume ")


def test_charts_and_series_have_the_same_numbers(client, root):
    board = client.get(f"{API}/runs/first/charts").json()
    (reward, *_) = board["rows"][0]["charts"]
    series = client.get(f"{API}/runs/first/series", params={"name": "reward/mean"}).json()
    assert series["lines"][0]["values"] == reward["series"]["lines"][0]["values"]
    assert series["lines"][0]["values"] == pytest.approx([0.21, 0.22, 0.23, 0.24])
    assert board["position"] == RunReader(root / "first").metrics_file.stat().st_size


def test_a_config_is_compared_with_another(client, root):
    write_run(root, "second", optimizer={"lr": 0.5})
    view = client.get(f"{API}/runs/first/config", params={"against": "second"}).json()
    assert {entry["key"] for entry in view["entries"] if entry["differs"]} == {"optimizer.lr"}


def test_a_log_is_searched_and_only_logs_are_shown(client):
    assert client.get(f"{API}/runs/first/log").json()["lines"] == ["started", "4", "last line"]
    assert client.get(f"{API}/runs/first/log", params={"find": "LAST"}).json()["lines"] == ["last line"]
    for file in ("../config.json", "config.json", "/etc/passwd"):
        assert client.get(f"{API}/runs/first/log", params={"file": file}).status_code == 404


@pytest.mark.parametrize("name", ["..", "%2e%2e", "nobody", "first%2F..%2Ffirst", "a" * 300])
def test_a_name_never_leads_out_of_the_folder(client, name):
    answer = client.get(f"{API}/runs/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["my run", "50% é?", "a#b&c", ".hidden", '"quoted"<b>', "~x"])
def test_every_run_that_is_listed_can_be_opened(client, root, name):
    (root / "first").rename(root / name)
    page = client.get("/").text
    (link,) = re.findall(r'class="strong" href="\./([^"]+)"', page)
    assert client.get(f"/{link}").status_code == 200
    for path in (*PAGES, "/rollouts", "/rollout?step=1&id=g1a-1"):
        assert client.get(f"{API}/runs/{quote(name)}{path}").status_code == 200, path
        assert client.get(f"/{link}{path.replace('/charts', '')}").status_code == 200, path


def test_a_name_that_no_page_can_show_spoils_no_other(client, root):
    os.mkdir(os.fsencode(root) + b"/\xff\xfe")  # noqa: PTH102
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe/config.json")).write_text("{}")
    assert [row["name"] for row in client.get(f"{API}/runs").json()["runs"]] == ["first"]


def test_links_within_the_folder_are_followed_and_those_that_lead_out_are_not(client, root, tmp_path):
    elsewhere = write_run(tmp_path / "elsewhere", "secret")
    (root / "inner").symlink_to(root / "first")
    (root / "outer").symlink_to(elsewhere)
    (root / "loop").symlink_to(root / "loop")
    write_run(root, "mixed")
    (root / "mixed" / "summary.json").unlink()
    (root / "mixed" / "summary.json").symlink_to(elsewhere / "summary.json")
    (root / "first" / "logs" / "more.log").symlink_to(elsewhere / "logs" / "server.log")
    (root / "first" / "rollouts" / "step_000009.jsonl.zst").symlink_to(elsewhere / "rollouts" / "step_000001.jsonl.zst")
    assert {row["name"] for row in client.get(f"{API}/runs").json()["runs"]} == {"first", "inner"}
    assert client.get(f"{API}/runs/inner").status_code == 200
    for path in ("outer", "mixed", "first/rollouts?step=9", "first/rollout?step=9&id=g1a-1"):
        answer = client.get(f"{API}/runs/{path}")
        assert (answer.status_code, "leads out of" in answer.json()["error"]["message"]) == (404, True), path
    assert client.get(f"{API}/runs/first/rollouts").json()["steps"] == [1, 2, 3, 4]
    assert client.get(f"{API}/runs/first/log").json()["files"] == ["server.log"]
    assert client.get(f"{API}/runs/first/log?file=more.log").status_code == 404


def test_an_unknown_name_gets_the_nearest(client):
    assert "did you mean first?" in client.get(f"{API}/runs/frist").json()["error"]["message"]


def test_labels_are_those_of_the_commands(client, root):
    assert client.post(f"{API}/runs/first/labels", json={"tag": "good", "note": "read me"}).json()["tags"] == ["good"]
    labels = RunReader(root / "first").read_labels()
    assert (labels.tags, labels.notes[0].text) == (["good"], "read me")
    client.post(f"{API}/runs/first/labels", json={"untag": "good"})
    assert RunReader(root / "first").read_labels().tags == []
    for body in ('{"tag": "no spaces please"}', '{"colour": 1}', "nonsense"):
        assert client.post(f"{API}/runs/first/labels", content=body).status_code == 400


def test_a_run_is_asked_to_stop(client, root):
    assert client.post(f"{API}/runs/first/stop").json() == {"stopping": False}
    with RunFolder.create(root, "live", make_config()) as run:
        assert client.post(f"{API}/runs/live/stop").json() == {"stopping": True}
        assert run.is_asked_to_stop
        assert client.get(f"{API}/runs/live").json()["is_stopping"]


PAGES = ("", "/charts", "/config", "/log", "/events", "/checkpoints")


@pytest.mark.parametrize("accident", ACCIDENTS, ids=lambda one: one.__name__)
@pytest.mark.usefixtures("second")
def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(client, root, accident):
    accident(root / "first")
    rows = {row["name"]: row for row in client.get(f"{API}/runs").json()["runs"]}
    assert rows.keys() == {"first", "second"}
    assert rows["second"]["status"] == "done"
    for page in PAGES:
        answer = client.get(f"{API}/runs/first{page}")
        assert answer.status_code in (200, 422), page
        if answer.status_code == 422:
            assert "config.json" in answer.json()["error"]["message"]
    for page in ("/", *(f"/runs/first{page.replace('/charts', '')}" for page in PAGES)):
        assert client.get(page).status_code in (200, 422)


def test_an_unknown_status_spoils_no_other_run(client, root):
    (root / "first" / "summary.json").write_text('{"status": "asleep"}')
    write_run(root, "second")
    assert {row["name"] for row in client.get(f"{API}/runs").json()["runs"]} == {"first", "second"}
    assert "summary.json" in client.get(f"{API}/runs/first").json()["error"]["message"]


def test_a_folder_in_place_of_a_config_is_no_run(client, root):
    (root / "odd" / "config.json").mkdir(parents=True)
    assert [row["name"] for row in client.get(f"{API}/runs").json()["runs"]] == ["first"]


def collect(run, position, until):
    async def read():
        found = []
        async for chunk in follow(run, position):
            found.append(chunk.decode())
            if until(found):
                return found
        return found

    return asyncio.run(asyncio.wait_for(read(), 30))


def test_what_a_run_writes_comes_as_events_that_can_be_taken_up_again(root):
    with RunFolder.create(root, "live", make_config()) as run:
        run.write_metrics(1, {"reward/mean": 0.1})
        begin = run.metrics_file.stat().st_size
        run.write_metrics(2, {"reward/mean": 0.2})
        events = collect(run, begin, lambda found: "event: metrics" in found[-1])
        assert "retry:" in events[0]
        assert '"status":"running"' in events[1]
        assert '"reward/mean":0.2' in events[-1]
        position = int(events[-1].partition("id: ")[2].partition("\n")[0])
        assert position == run.metrics_file.stat().st_size
        run.write_metrics(3, {"reward/mean": 0.3})
        again = collect(run, position, lambda found: "event: metrics" in found[-1])
    assert '"step":3' in again[-1]
    assert not any('"step":2' in event for event in again)


def test_a_stream_that_breaks_between_two_rows_goes_on_before_the_second(root):
    with RunFolder.create(root, "live", make_config()) as run:
        run.write_metrics(1, {"reward/mean": 0.1})
        run.write_metrics(2, {"reward/mean": 0.2})
        first = collect(run, 0, lambda found: "event: metrics" in found[-1])[-1]
        position = int(first.partition("id: ")[2].partition("\n")[0])
        again = collect(run, position, lambda found: '"step":2' in found[-1])
    assert '"step":1' in first
    assert again


def test_a_stream_ends_with_the_right_to_look(root):
    rights = iter([True, False])

    async def is_admitted() -> bool:
        return next(rights)

    async def read() -> list[bytes]:
        return [chunk async for chunk in follow(RunReader(root / "first"), 0, is_admitted)]

    assert b'"step":4' in b"".join(asyncio.run(asyncio.wait_for(read(), 30)))


def test_an_open_stream_does_not_hold_up_the_end_of_the_server(root):
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(create_app(Catalogue(root)), log_level="error")  # without an end to its patience
    thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}{API}/runs/first/live"
    with httpx.stream("GET", address, timeout=60) as answer:
        chunks = answer.iter_bytes()
        assert b"retry" in next(chunks)
        server.should_exit = True
        assert b"event: gone" not in b"".join(chunks)
    thread.join(60)
    assert not thread.is_alive()


def test_a_stream_begins_at_no_impossible_place(client):
    assert client.get(f"{API}/runs/first/live?after=-1").status_code == 400


def test_a_run_that_is_deleted_while_it_is_watched_says_so(root):
    run = RunReader(root / "first")
    shutil.rmtree(run.path)
    assert "event: gone" in collect(run, 0, lambda found: len(found) > 1)[-1]
