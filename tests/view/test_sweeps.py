"""The pages of sweeps: what one has found, and a run of it is stopped by a click."""

from __future__ import annotations

import pytest

from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import RunFolder
from palestra.sweeps.folder import Decision
from palestra.view.runs.catalogue import Catalogue
from palestra.view.sweeps.sweep_detail import parallel_coordinates, read_sweep
from tests.sweeps.records import create, play


@pytest.fixture
def sweep(root):
    """Two settings with two seeds each: one is pruned, one goes on in this process."""
    with create(root, {"optimizer.lr": [1e-4, 1e-2], "seed": "0..1"}, prune="halving") as found:
        for n, value in enumerate((0.2, 0.3, 0.6, 0.8)):
            play(found, n, {0: 0.1, 4: value}, RunStatus.STOPPED if n < 2 else RunStatus.DONE)
        found.decide([Decision(kind="pruned", member="pop-0", step=4, reason="2 of 2 settings", value=0.25)])
        yield found


def test_the_page_shows_settings_runs_lines_and_decisions(sweep, root, open_client):
    client = open_client(root)
    assert 'href="./sweeps/pop"' in client.get("/sweeps").text
    page = client.get("/sweeps/pop").text
    for text in ("optimizer.lr=0.01", "2 of 2 settings", 'class="coordinates"', 'href="../runs/pop-3"', "pruned"):
        assert text in page
    fragment = client.get("/sweeps/pop", headers={"hx-request": "true"}).text
    assert "<html" not in fragment
    assert client.get("/sweeps/..%2Fpop").status_code == 404
    assert client.get("/sweeps/nothing").status_code == 404


def test_programs_get_the_same_and_the_curves_of_settings(sweep, root, open_client):
    client = open_client(root)
    found = client.get("/api/v1/sweeps/pop").json()
    assert (found["best"]["settings"], found["best"]["mean"]) == ({"optimizer.lr": 0.01}, pytest.approx(0.7))
    assert [one["best"] for one in client.get("/api/v1/sweeps").json()] == ["optimizer.lr=0.01"]
    (chart,) = client.get("/api/v1/sweeps/pop/charts").json()["rows"][0]["charts"]
    best = chart["series"]["lines"][0]
    assert (chart["series"]["x"], best["label"]) == ([0, 4], "optimizer.lr=0.01")
    assert best["values"] == [pytest.approx(0.1), pytest.approx(0.7)]


def test_lines_run_from_the_settings_to_the_metric_with_rates_by_their_logarithm(sweep, root):
    lines = parallel_coordinates(read_sweep(Catalogue(root), "pop"))
    assert lines is not None
    assert [axis.name for axis in lines.axes] == ["optimizer.lr", "seed", "eval/success"]
    assert [line.name for line in lines.lines][-1] == "pop-3"
    assert [line.shade for line in lines.lines] == [0, 2, 7, 10]


def test_a_run_is_stopped_by_a_click_and_only_one_of_the_sweep(sweep, root, open_client):
    client = open_client(root)
    with RunFolder.open(root / "pop-2"):
        assert "hx-post" in client.get("/sweeps/pop").text
        assert client.post("/sweeps/pop/stop/pop-2", headers={"hx-request": "true"}).status_code == 200
        assert RunReader(root / "pop-2").is_asked_to_stop
        assert client.post("/sweeps/pop/stop/first", headers={"hx-request": "true"}).status_code == 404
