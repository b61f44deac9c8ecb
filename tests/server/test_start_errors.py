"""`palestra serve` with a worker that cannot start: the reason in plain words, no log line and no traceback."""

from __future__ import annotations

import shutil

import pytest

from palestra.util.log_files import last_error

END_S = 100.0


def test_the_last_error_of_this_start_counts_and_no_older_one(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("error: of an earlier start\n")
    began = log.stat().st_size
    assert last_error(log, began) is None
    with log.open("a") as file:
        file.write("level=INFO event=loading\nerror: first\nerror: no weights\n  in this folder\n")
    assert last_error(log, began) == "no weights\n  in this folder"


@pytest.mark.e2e
def test_a_model_that_cannot_be_loaded_is_one_plain_line(make_server, micro_model, tmp_path):
    server = make_server(start=False)
    server.model = shutil.copytree(micro_model, tmp_path / "broken")
    (server.model / "model.safetensors").unlink()
    assert said_at_its_end(server) == (
        f"error: {server.model} cannot be served: {server.model}: no model.safetensors and no "
        "model.safetensors.index.json; only safetensors weights are supported\n"
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "its worker was killed by the system, probably because memory ran out"),
        ("os.kill(os.getpid(), 11)", "its worker was ended by SIGSEGV"),
        ("os._exit(7)", "its worker ended with code 7"),
    ],
)
def test_a_worker_that_says_nothing_is_told_by_its_exit(make_server, code, reason):
    server = make_server(start=False)
    server.sabotage(code)
    server.worker_log.parent.mkdir(parents=True)
    server.worker_log.write_text("error: of an earlier start\n")
    response = f"error: {server.model} cannot be served: {reason}; its log is {server.worker_log}\n"
    assert said_at_its_end(server) == response


def said_at_its_end(server) -> str:
    server.launch()
    assert server.process.wait(END_S) == 1
    return server.said()
