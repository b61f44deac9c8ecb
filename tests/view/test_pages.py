"""Pages without a browser: what is in them, and that text of models stays text."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from palestra.runs.reader import RunStatus
from palestra.runs.writer import RunFolder
from palestra.view.app import Extension, create_app, no_server
from palestra.view.rendering import FOLDER
from palestra.view.runs.catalogue import Catalogue
from tests.training.records import make_config
from tests.view.folders import HOSTILE, write_run


def test_the_list_shows_runs_with_their_curves(client):
    page = client.get("/").text
    assert 'href="./runs/first"' in page
    assert re.search(r'<polyline points="1\.0,\d', page)
    fragment = client.get("/", params={"filter": "nothing such"}, headers={"hx-request": "true"}).text
    assert "No run fits this filter" in fragment
    assert "<html" not in fragment


def test_runs_are_sorted_by_any_column_either_way(root, open_client):
    for name, reward in {"b": 0.5, "a": None, "c": 0.9}.items():
        with RunFolder.create(root, name, make_config()) as run:
            run.write_metrics(1, {} if reward is None else {"reward/mean": reward})
    (root / "first" / "summary.json").unlink()
    client = open_client(root)

    def listed(sort: str) -> list[str]:
        return re.findall(r'<a class="strong" href="\./runs/(\w+)"', client.get("/", params={"sort": sort}).text)

    assert listed("name") == ["a", "b", "c", "first"]
    assert listed("-name") == ["first", "c", "b", "a"]
    assert listed("-reward") == ["c", "b", "first", "a"]
    assert listed("reward") == ["first", "b", "c", "a"], "those without a reward come last either way"
    page = client.get("/", params={"sort": "-reward", "filter": "a"}).text
    assert 'aria-sort="descending"><a class="sort" href="./?filter=a&amp;sort=reward">' in page
    assert [row["name"] for row in client.get("/api/v1/runs?sort=-reward").json()["runs"]] == ["c", "b", "first", "a"]


def test_an_empty_folder_shows_the_command_to_type(tmp_path, open_client):
    client = open_client(tmp_path)
    assert f"palestra train demo runs={tmp_path}" in client.get("/").text


def test_a_run_has_its_tabs(client):
    page = client.get("/runs/first").text
    for tab in ("config", "log", "events", "checkpoints", "rollouts"):
        assert f'href="../runs/first/{tab}"' in page
    assert 'data-api="../api/v1/runs/first"' in page


def test_of_many_events_the_newest_are_shown(client, root):
    with (root / "first" / "events.jsonl").open("a") as stream:
        stream.writelines(f'{{"event": "odd", "number": {number}}}\n' for number in range(2000))
    page = client.get("/runs/first/events").text
    assert ("</span> 1999" in page, "</span> 1500" in page, "</span> 1499" in page) == (True, True, False)
    assert "1502 earlier ones" in page
    assert len(client.get("/api/v1/runs/first/events").json()) == 2002


def test_a_star_is_given_and_taken(client):
    assert 'aria-pressed="true"' in client.post("/runs/first/star").text
    assert 'aria-pressed="false"' in client.post("/runs/first/star").text


def test_labels_of_a_form_come_back_in_the_head(client):
    assert ">good<" in client.post("/runs/first/labels", data={"tag": "good"}).text
    assert "look at &lt;b&gt; step 7" in client.post("/runs/first/labels", data={"note": "look at <b> step 7"}).text


def test_a_missing_run_is_a_page_that_says_so(client):
    answer = client.get("/runs/nobody")
    assert answer.status_code == 404
    assert "there is no run" in answer.text
    assert "All runs" in answer.text


@pytest.mark.parametrize("page", ["", "/config", "/log", "/events", "/checkpoints"])
def test_text_of_models_stays_text(tmp_path, open_client, page):
    write_run(tmp_path, text=HOSTILE, card={"license": HOSTILE})
    client = open_client(tmp_path)
    shown = client.get(f"/runs/first{page}").text
    assert "<script>alert" not in shown
    assert "<img src=x" not in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    if page in ("/log", "/config"):
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
        assert "\\x1b[31mred" in shown


def test_the_selected_checkpoint_is_marked_when_the_run_is_over(tmp_path, open_client):
    folder = write_run(tmp_path, steps=4)
    (folder / "checkpoints").mkdir()
    for step in (2, 4):
        pointer = {"step": step, "address": f"tinker://x:train:0/weights/step_{step}"}
        (folder / "checkpoints" / f"step_{step:06d}.json").write_text(json.dumps(pointer))
    with RunFolder.open(folder) as run:
        run.write_metrics(2, {"eval/success": 0.9})
        run.write_metrics(4, {"eval/success": 0.5})
        going = open_client(tmp_path).get("/api/v1/runs/first/checkpoints").json()
        run.finish(RunStatus.DONE, selected={"step": 2, "metric": "eval/success", "value": 0.9})
    client = open_client(tmp_path)
    ended = client.get("/api/v1/runs/first/checkpoints").json()
    assert [[one["is_selected"] for one in found] for found in (going, ended)] == [[False, False], [False, True]]
    assert "step 2, the best by eval/success (0.900)" in client.get("/runs/first").text
    assert '<span class="tag">selected</span>' in client.get("/runs/first/checkpoints").text


def test_a_checkpoint_leads_to_the_playground_of_a_server(root):
    address = "tinker://x:train:0/weights/step-2"
    folder = root / "first" / "checkpoints"
    folder.mkdir(exist_ok=True)
    (folder / "step_000002.json").write_text(json.dumps({"step": 2, "address": address}))

    def with_server(request):
        return {**no_server(request), "has_server": True}

    alone = create_app(Catalogue(root))
    mounted = create_app(Catalogue(root), extension=Extension(lambda app: None, FOLDER / "templates", with_server))
    pages = [
        TestClient(app, base_url="http://localhost").get("/runs/first/checkpoints").text for app in (alone, mounted)
    ]
    link = f'href="../../playground?{urlencode({"model": address})}"'
    assert [link in page for page in pages] == [False, True]
    assert all("palestra checkpoint export first@2" in page for page in pages)
