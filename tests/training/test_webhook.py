"""The end of a run is reported to an address; whatever that does, the run ends in time and its secret is kept."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from palestra.config import dump_config
from palestra.config.train import load_train_config
from palestra.runs.reader import RunStatus
from palestra.runs.writer import RunFolder
from palestra.training import webhook
from palestra.training.webhook import report_end
from tests.training.records import make_config

SECRET = "/services/T0/B0/very-secret"


class Listener(ThreadingHTTPServer):
    """Answers with the statuses that it was given, then with 200."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.statuses: list[int] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{SECRET}"


class Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        assert self.path == SECRET
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ended(folder: Path, status: RunStatus = RunStatus.DONE, **settings: Any) -> RunFolder:
    """A run that has ended so, and reported it."""
    config = make_config(steps=4, webhook=settings)
    with RunFolder.create(folder / "runs", None, config) as run:
        run.write_metrics(1, {"reward/mean": 0.25, "time/total_s": 1.0})
        facts = {"error": "the server is gone"} if status is RunStatus.FAILED else {}
        report_end(config, run, run.finish(status, **facts))
    return run


def warnings(run: RunFolder) -> list[str]:
    return [event["message"] for event in run.read_events() if event["event"] == "warning"]


def test_the_end_is_reported_with_how_it_went(listener, tmp_path):
    run = ended(tmp_path, url=listener.url)
    (body,) = listener.bodies
    assert body == {
        "event": "run_ended",
        "run": run.name,
        "kind": "grpo",
        "model": "ephebe",
        "status": "done",
        "step": 1,
        "steps": 4,
        "seconds": body["seconds"],
        "attempts": 1,
        "metrics": {"reward/mean": 0.25},
        "best": {"reward/mean": {"value": 0.25, "step": 1}},
        "selected": None,
        "error": None,
        "host": socket.gethostname(),
        "text": f"run {run.name} is done after step 1 of 4",
    }
    assert warnings(run) == []


def test_a_failure_is_reported_by_the_run_itself_with_its_error(listener, tmp_path, run_training):
    with pytest.raises(Exception, match="nothing_like_it"):
        run_training("lost", webhook={"url": listener.url}, model={"name": "nothing_like_it", "tokenizer": tokenizer()})
    (body,) = listener.bodies
    assert (body["run"], body["status"], body["step"]) == ("lost", "failed", None)
    assert "nothing_like_it" in body["error"]
    assert body["text"].startswith("run lost is failed after step 0 of 5: ")


def test_a_whole_run_reports_once_and_keeps_the_secret(listener, run_training):
    run = run_training("whole", steps=1, webhook={"url": listener.url})
    assert [body["status"] for body in listener.bodies] == ["done"]
    for file in run.path.rglob("*"):
        assert not file.is_file() or b"very-secret" not in file.read_bytes()


def test_only_the_chosen_ends_are_reported(listener, tmp_path):
    ended(tmp_path, RunStatus.DONE, url=listener.url, on=["failed"])
    ended(tmp_path, RunStatus.STOPPED, url=listener.url, on=["failed", "done"])
    assert listener.bodies == []
    ended(tmp_path, RunStatus.FAILED, url=listener.url, on=["failed"])
    assert listener.bodies[0]["error"] == "the server is gone"


def test_a_server_in_trouble_is_tried_again_but_not_for_ever(listener, tmp_path):
    listener.statuses = [503, 429]
    assert warnings(ended(tmp_path, url=listener.url)) == []
    assert len(listener.bodies) == 3
    listener.statuses = [500] * 9
    run = ended(tmp_path, url=listener.url)
    assert warnings(run) == ["webhook: 127.0.0.1 did not take the report (HTTP 500)"]
    assert len(listener.bodies) == 6
    listener.statuses = [404]
    assert "HTTP 404" in warnings(ended(tmp_path, url=listener.url))[0]
    assert len(listener.bodies) == 7  # a 404 is not tried again


@pytest.mark.slow
def test_one_that_hangs_or_is_not_there_delays_the_end_by_seconds_only(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        run = ended(tmp_path, url=f"http://127.0.0.1:{silent.getsockname()[1]}{SECRET}")
        assert time.monotonic() - begin < webhook.DEADLINE_S + 2
    assert warnings(run) == ["webhook: 127.0.0.1 did not take the report (ReadTimeout)"]
    run = ended(tmp_path, url=f"http://127.0.0.1:9{SECRET}")
    assert warnings(run) == ["webhook: 127.0.0.1 did not take the report (ConnectError)"]


def test_one_that_answers_drop_by_drop_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(webhook, "DEADLINE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        threading.Thread(target=drip, args=(slow,), daemon=True).start()
        begin = time.monotonic()
        run = ended(tmp_path, url=f"http://127.0.0.1:{slow.getsockname()[1]}{SECRET}")
        assert time.monotonic() - begin < 3
    assert warnings(run) == ["webhook: 127.0.0.1 took too long"]


def drip(server: socket.socket) -> None:
    line, _ = server.accept()
    with line:
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        try:
            for _ in range(60):
                line.sendall(b"x")
                time.sleep(0.1)
        except OSError:
            pass


def test_the_address_is_neither_logged_nor_saved(listener, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    run = ended(tmp_path, url=listener.url)
    assert len(listener.bodies) == 1
    assert "very-secret" not in caplog.text
    assert "very-secret" not in run.config_file.read_text()
    saved = run.read_about()["config"]
    again = load_train_config([], [], saved)
    assert again.webhook is not None
    assert again.webhook.address is None  # a resume has to give it again
    with RunFolder.open(run.path) as resumed:
        report_end(again, resumed, resumed.finish(RunStatus.DONE))
        assert "give it again at a resume" in warnings(resumed)[-1]


def test_the_address_may_be_in_a_variable_which_a_resume_reads_again(listener, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_HOOK", listener.url)
    run = ended(tmp_path, url="$MY_HOOK")
    assert len(listener.bodies) == 1
    assert run.read_about()["config"]["webhook"]["url"] == "$MY_HOOK"
    monkeypatch.delenv("MY_HOOK")
    assert warnings(ended(tmp_path, url="$MY_HOOK")) == [
        "webhook: the environment has no MY_HOOK; nothing was reported"
    ]


def test_what_is_no_address_is_refused():
    for url in ("hooks.example.org", "ftp://example.org", "$", ""):
        with pytest.raises(ValueError, match="webhook"):
            make_config(webhook={"url": url})
    assert "secret" not in dump_config(make_config(webhook={"url": "https://example.org/secret"}))


def tokenizer() -> str:
    from palestra.config.bundled import BUNDLED, EPHEBE

    return str(BUNDLED / EPHEBE)
