"""The task of a rollout is played again from the server's pages, by a model of the server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from palestra.environments.bundled import stockroom_tasks
from palestra.runs.writer import RunFolder
from palestra.server.core.task_replays import KEY_NAME
from palestra.types.rollouts import Group
from tests.server.model_api.conftest import ephebe_in
from tests.training.records import make_config, make_rollout
from tests.view.browser import opened_browser, opened_page, serious_findings, why_not
from tests.waiting import until

QUERY = {"run": "one", "step": 1, "id": "g-0"}


def test_only_those_who_see_runs_play_their_tasks_again(open_browser):
    for method in ("GET", "POST"):
        assert open_browser("alice").request(method, "/again", params=QUERY).status_code == 403
        assert open_browser("carol").request(method, "/again", params=QUERY).status_code == 404


def write_stockroom_run(root: Path) -> None:
    task = stockroom_tasks.tasks("train")[0]
    config = make_config(environments=[{"name": "stockroom"}], rollout={"max_tokens": 16, "max_context": 640})
    rollout = make_rollout("g-0", 0.0, task=task.id, environment="stockroom", messages=list(task.prompt))
    with RunFolder.create(root, "one", config) as run:
        run.write_rollouts(1, [Group(id="g", task=task, step=1, rollouts=[rollout])])
        run.write_metrics(1, {"reward/mean": 0.0})


@pytest.mark.ui
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_task_is_played_again_by_a_model_of_the_server(tmp_path: Path):
    with ephebe_in(tmp_path / "server", require_key="always") as server:
        server.start()
        write_stockroom_run(server.folder / "runs")
        key = server.make_key("carol", right="admin")
        _play_in_a_browser(server.url, key)
        admin = httpx.Client(base_url=f"{server.url}/ui", headers={"X-API-Key": key}, verify=False, trust_env=False)
        made = [one for one in admin.get("/api/v1/keys").json() if one["name"].startswith(KEY_NAME)]
        assert len(made) == 1
        until(lambda: admin.get("/api/v1/keys").json()[-1]["revoked_at"] is not None)
        _refuse_what_cannot_be_played(admin, server.folder / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("is_here", [True, False], ids=["trained here", "trained elsewhere"])
def test_a_task_is_played_again_by_a_checkpoint_of_its_run(tmp_path: Path, is_here: bool):
    with ephebe_in(tmp_path / "server") as server:
        server.start()
        runs = server.folder / "runs"
        few = ("steps=1", "rollout.group_size=2", "rollout.groups_per_step=2", "rollout.max_tokens=16", "eval.every=0")
        where = ("--server", server.url) if is_here else ()
        command = [
            sys.executable,
            "-m",
            "palestra",
            "train",
            "stockroom",
            *few,
            f"runs={runs}",
            "--name",
            "one",
            *where,
        ]
        subprocess.run(command, check=True, capture_output=True)
        admin = httpx.Client(base_url=f"{server.url}/ui", verify=False, trust_env=False, timeout=120)
        query = {"run": "one", "step": 1, "id": "g000000-0"}
        offered = re.findall('<option value="([^"]+)">one@1', admin.get("/again", params=query).text)
        assert [one.startswith("tinker://") for one in offered] == [is_here]
        answer = admin.post("/again", params=query, data={"model": offered[0]})
        assert answer.status_code == 303, answer.text
        metrics = runs / Path(answer.headers["location"]).name / "metrics.jsonl"
        until(lambda: metrics.is_file() and "eval/stockroom" in metrics.read_text(), timeout_s=120)


def _play_in_a_browser(url: str, key: str) -> None:
    with opened_browser() as browser, opened_page(browser, url, bypass_csp=True) as page:
        page.goto("/ui/login")
        page.get_by_label("Key").fill(key)
        page.get_by_role("button", name="Open").click()
        page.goto("/ui/runs/one/rollout?step=1&id=g-0")
        page.get_by_role("link", name="play it on this server").click()
        assert serious_findings(page) == {}
        page.get_by_label("with").select_option("ephebe")
        page.get_by_role("button", name="Play 4 times").click()
        page.wait_for_url("**/ui/runs/again-*", timeout=120_000)
        page.locator("#run-head .state-done").wait_for(timeout=120_000)
        page.get_by_role("link", name="Rollouts").click()
        page.locator(".dot").nth(3).wait_for()
        assert page.locator(".dot").count() == 4


def _refuse_what_cannot_be_played(admin: httpx.Client, runs: Path) -> None:
    def play(model: str, **headers: str) -> Any:
        return admin.post("/again", params=QUERY, data={"model": model}, headers=headers, timeout=120)

    assert play("nobody").status_code == 400
    assert play("ephebe", **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
    config = runs / "one" / "config.json"
    config.write_text(re.sub(r'"stockroom"', '"nowhere"', config.read_text()))
    answer = play("ephebe")
    assert (answer.status_code, "nowhere" in answer.text) == (422, True), answer.text
    assert len(list(runs.glob("again-*"))) == 1
