"""Runs beside each other, and the index by which many are listed."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess

import pytest
from starlette.testclient import TestClient

from palestra.runs.reader import RunReader
from palestra.runs.writer import RunFolder
from palestra.view.app import create_app
from palestra.view.runs.catalogue import SAVE_BYTES, Catalogue
from palestra.view.runs.run_index import FILE
from tests.training.records import make_config
from tests.view.folders import made_read_only, make_step_group, write_run

API = "/api/v1"


@pytest.fixture
def other(root):
    """A run that solved the task at which the first one failed."""
    write_run(root, "other", optimizer={"lr": 0.5})
    with RunFolder.open(root / "other") as run:
        run.write_eval(4, [make_step_group("e", "4", (0.25, 0.0))], {"eval/success": 0.25})
    return "other"


def test_runs_are_compared_by_config_metrics_and_tasks(client, other):
    found = client.get(f"{API}/compare", params={"run": ["first", other]}).json()
    assert [row["name"] for row in found["runs"]] == ["first", "other"]
    assert [(one["name"], one["values"][1]) for one in found["config"]] == [("optimizer.lr", 0.5)]
    assert {one["name"]: one["values"] for one in found["metrics"]}["eval/success"] == [0.5, 0.25]
    (task,) = found["tasks"]
    assert [one["reward"] for one in task["outcomes"]] == [1.0, 0.25]
    assert (task["difference"], found["common_tasks"]) == (0.75, 1)


def test_curves_are_laid_over_each_other(client, root):
    write_run(root, "long", steps=6)
    board = client.get(f"{API}/compare/charts", params={"run": ["first", "long"]}).json()
    chart = board["rows"][0]["charts"][0]
    assert chart["series"]["x"] == [1, 2, 3, 4, 5, 6]
    first, long = chart["series"]["lines"]
    assert (first["label"], first["values"][4:]) == ("first", [None, None])
    assert None not in long["values"]


def test_the_page_leads_to_the_rollouts_side_by_side(client, other):
    page = client.get("/compare", params={"run": ["first", other]}).text
    link = page.partition('<td><a href="')[2].partition('"')[0].replace("&amp;", "&")
    shown = client.get(f"/{link}")
    assert shown.status_code == 200
    assert shown.text.count('<section class="transcript"') == 2


@pytest.mark.parametrize(
    ("names", "status"), [(["first"], 400), (["first", "first"], 400), ([], 400), (["first", "nobody"], 404)]
)
def test_a_choice_that_cannot_be_compared_says_why(client, names, status):
    assert client.get("/compare", params={"run": names}).status_code == status
    assert client.get(f"{API}/compare", params={"run": names}).status_code == status


def test_rows_are_kept_beside_the_runs_and_made_anew_when_files_change(client, open_client, root):
    assert client.get(f"{API}/runs").json()["total"] == 1
    kept = sqlite3.connect(root / FILE).execute("SELECT name FROM runs").fetchall()
    assert kept == [("first",)]
    again = open_client(root)
    again.post(f"{API}/runs/first/labels", json={"tag": "new"})
    assert again.get(f"{API}/runs").json()["runs"][0]["tags"] == ["new"]


def test_git_ignores_what_is_kept_beside_the_runs(client, root):
    subprocess.run(["git", "init", "--quiet", root], check=True)
    shutil.rmtree(root / "first")
    (root / ".palestra-view.sqlite").write_bytes(b"of an older version")
    client.get("/")
    seen = subprocess.run(["git", "-C", root, "status", "--porcelain"], check=True, capture_output=True, text=True)
    assert ((root / FILE).is_file(), seen.stdout) == (True, "")


def test_nothing_is_written_before_runs_are_listed(client, root):
    client.get("/runs/first")
    assert not (root / FILE).exists()


def test_a_kept_row_says_the_same_as_the_files(root):
    first = Catalogue(root).find()
    assert Catalogue(root).find() == first
    (root / FILE).unlink()
    assert Catalogue(root).find() == first


def test_a_broken_index_changes_nothing(client, open_client, root):
    expected = client.get(f"{API}/runs").json()
    (root / FILE).write_bytes(b"not a database at all, but long enough to look like one" * 40)
    assert open_client(root).get(f"{API}/runs").json() == expected


def test_a_folder_that_cannot_be_written_is_shown_all_the_same(client, root):
    expected = client.get(f"{API}/runs").json()
    for keeps_index in (True, False):
        if not keeps_index:
            (root / FILE).unlink()
        with made_read_only(root):
            shown = TestClient(create_app(Catalogue(root)), base_url="http://localhost")
            assert shown.get(f"{API}/runs").json() == expected
            for path in ("", "/charts", "/config", "/log", "/events", "/rollouts"):
                assert shown.get(f"{API}/runs/first{path}").status_code == 200
            answer = shown.post(f"{API}/runs/first/labels", json={"tag": "new"})
            assert (answer.status_code, "Permission denied" in answer.text) == (422, True)


def test_the_index_forgets_runs_that_were_deleted(root):
    write_run(root, "second")
    catalogue = Catalogue(root)
    catalogue.find()
    shutil.rmtree(root / "second")
    for still in (catalogue, Catalogue(root)):  # also those that were deleted while nobody looked
        assert [row.name for row in still.find().runs] == ["first"]
        assert sqlite3.connect(root / FILE).execute("SELECT name FROM runs").fetchall() == [("first",)]
        write_run(root, "second")
        Catalogue(root).find()
        shutil.rmtree(root / "second")


def test_metrics_of_a_long_run_are_not_read_again_after_a_start(root):
    file = root / "first" / "metrics.jsonl"
    rows = (json.dumps({"step": step, "attempt": 1, "reward/mean": step / 9000}) for step in range(5, 9000))
    file.write_text(file.read_text() + "\n".join(rows) + f"{' ' * SAVE_BYTES}\n")
    expected = Catalogue(root).find()
    with file.open("r+b") as stream:
        stream.write(b"#" * 1000)  # would be missing if it were read again
    again = Catalogue(root).metrics(RunReader(root / "first"))
    assert (len(again.steps), expected.runs[0].last_step) == (8999, 8999)
    assert again.column("reward/mean")[0] == pytest.approx(0.21)


def test_tables_are_kept_in_memory_by_their_bytes(root):
    runs = [RunReader(root / "first"), RunReader(write_run(root, "second"))]
    one = Catalogue(root).metrics(runs[0]).size_bytes
    for most_bytes, is_kept in ((2 * one, True), (2 * one - 1, False), (0, False)):
        catalogue = Catalogue(root, most_bytes)
        tables = [catalogue.metrics(run) for run in runs]
        assert catalogue.metrics(runs[1]) is tables[1]  # the newest always is
        assert (catalogue.metrics(runs[0]) is tables[0]) == is_kept


def test_a_kept_row_that_cannot_be_read_is_made_anew(client, open_client, root):
    expected = client.get(f"{API}/runs").json()
    for row in (b'{"name": "first"}', b"nonsense", None):
        with sqlite3.connect(root / FILE) as index:
            index.execute("UPDATE runs SET row = ?", (row,))
        again = open_client(root)
        assert again.get(f"{API}/runs").json() == expected


def test_a_running_run_is_stored_only_when_its_row_changes(root):
    with RunFolder.create(root, "live", make_config()) as run:
        catalogue = Catalogue(root)
        catalogue.find()
        with sqlite3.connect(root / FILE) as index:
            index.execute("DELETE FROM runs")
        catalogue.find()
        assert index.execute("SELECT name FROM runs").fetchall() == []
        run.write_metrics(1, {"reward/mean": 0.1})
        catalogue.find()
        assert index.execute("SELECT name FROM runs").fetchall() == [("live",)]


def test_the_newest_value_of_a_metric_may_be_long_ago(client, root):
    with (root / "first" / "metrics.jsonl").open("a") as stream:
        for step in range(5, 100):
            stream.write(json.dumps({"step": step, "attempt": 1, "reward/mean": 0.9}) + "\n")
    write_run(root, "second")
    metrics = client.get(f"{API}/compare", params={"run": ["first", "second"]}).json()["metrics"]
    assert {one["name"]: one["values"] for one in metrics}["eval/success"] == [0.5, 0.5]


def test_a_run_that_was_killed_is_not_listed_as_running(root):
    run = RunFolder.create(root, "live", make_config())
    catalogue = Catalogue(root)
    assert {row.name: row.status for row in catalogue.find().runs}["live"] == "running"
    run.close()
    assert {row.name: row.status for row in Catalogue(root).find().runs}["live"] == "killed"
