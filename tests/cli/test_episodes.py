"""`palestra episode` against a real server: what there is, what to do about it, and one line when nobody answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.episodes import EpisodeClient
from palestra.types.episodes import RunSettings
from palestra.types.rollouts import Task
from tests.episodes.client.conftest import arena, client, group, keyed
from tests.server.model_api.stockroom import TOOLS, question

__all__ = ["arena", "client", "keyed"]


@pytest.fixture
def run(client: EpisodeClient, request: pytest.FixtureRequest):
    """What is lost in it can be claimed again at once."""
    return client.run(request.node.name, RunSettings(backoff_s=0.0), model="ephebe")


@pytest.fixture
def episodes(arena, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", arena.url)
    monkeypatch.setenv("TINKER_API_KEY", arena.trainer)

    def call(*args: object, **options: Any) -> Result:
        return CliRunner().invoke(main, ["episode", *map(str, args)], prog_name="palestra", **options)

    return call


def answer(result: Result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_episodes_are_listed_by_run_and_state(episodes, client, run):
    assert f"no episodes of run {run.name}" in episodes("list", "--run", run.name).output
    run.register([group("g0", 3)])
    with client.episode(run.name) as episode:
        episode.end(0.5)
    listed = answer(episodes("list", "--run", run.name, "--json"))
    assert (listed["total"], [one["state"] for one in listed["episodes"]]) == (3, ["ended", "queued", "queued"])
    shown = episodes("list", "--run", run.name, "--in-state", "ended", "--limit", 1).output
    assert episode.id in shown
    assert "0.5" in shown
    assert "… 1 of 3; the next: --offset 1" in episodes("list", "--run", run.name, "--limit", 1).output
    assert "there are 3" in episodes("list", "--run", run.name, "--offset", 7).output


def test_an_episode_is_shown_with_its_losses_and_its_result(episodes, client, run):
    run.register([group("g0", tags={"level": "easy"})])
    with pytest.raises(ValueError, match="no"), client.episode(run.name) as episode:
        raise ValueError("no \x1b[2J tool")
    shown = episodes("show", episode.id).output
    for text in (f"{run.name} (train)", "ended, attempt 1", "ValueError: no \\x1b[2J tool", "level=easy", "group g0"):
        assert text in shown
    assert answer(episodes("show", episode.id, "--json"))["result"]["error"]["type"] == "ValueError"
    missing = episodes("show", "e-nowhere")
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert missing.stderr.startswith("error: GET /episodes/v1/episodes/e-nowhere/timeline: no episode 'e-nowhere'")


def test_episodes_are_found_by_what_became_of_them(episodes, client, run):
    other = Task(id="t2", environment="stockroom", prompt=[{"role": "user", "content": "And hats?"}])
    run.register([group("g0"), group("g1"), group("g2", task=other)])
    good, bad, failed = client.claim(3, run=run.name)
    client.end_many([(good, 1.0), (bad, 0.25)])
    failed.end(error=ValueError("no such file"))
    for options, expected in (
        (("--reward-below", 0.5), [bad]),
        (("--reward-min", 0.25), [good, bad]),
        (("--error", "no such"), [failed]),
        (("--error", ""), [failed]),
        (("--task", "HATS"), [failed]),
        (("--task", "cups", "--reward-below", 1), [bad]),
        (("--error", "timeout"), []),
    ):
        found = answer(episodes("list", "--run", run.name, *options, "--json"))
        assert [one["episode_id"] for one in found["episodes"]] == [one.id for one in expected]
    assert f"no episodes of run {run.name} like that" in episodes("list", "--run", run.name, "--task", "x y").output
    assert [one.episode_id for one in run.episodes(reward_below=0.5).episodes] == [bad.id]


def test_the_timeline_of_an_episode_is_shown_and_exported_without_secrets(episodes, client, run, tmp_path):
    run.register([group("g0"), group("g1")])
    with client.episode(run.name) as episode:
        policy, messages = episode.openai(), question()
        request = {"model": episode.model, "tools": TOOLS, "temperature": 0, "max_tokens": 64}
        said = policy.chat.completions.create(messages=messages, **request).choices[0].message
        (call,) = said.tool_calls
        response = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": f"12\x1b[2J cups, ask bob@example.org {'x ' * 60} {4111 * 10**12}",
        }
        policy.chat.completions.create(messages=[*messages, said, response], **request)
        episode.end(0.5, metadata={"api_key": "sesame"}, metrics={"found_secret": 1.0})
    shown = episodes("show", episode.id, "--mask", r"\w+@\w+\.org").output
    assert f"attempt 1: ended; trace {episode.traceparent.split('-')[1]}" in shown
    assert f"tool {call.function.name}, " in shown
    assert "= 12\\x1b[2J cups, ask [redacted]" in shown
    assert "user: How many cups and hats" in shown
    assert "metrics     found_secret=1" in shown
    assert "4111" in shown
    assert "4111" not in episodes("show", episode.id, "--mask", r"\d{16}").output  # it is cut in the middle
    whole = answer(episodes("show", episode.id, "--json"))
    assert [span["name"] for span in whole["attempts"][0]["tools"]][:1] == [call.function.name]
    assert whole["result"]["metadata"] == {"api_key": "[redacted]"}
    assert episodes("show", episode.id, "--mask", "[").stderr.startswith("error: '[' is not a regular expression")
    file = tmp_path / "lines.jsonl"
    assert "1 written" in episodes("export", "--run", run.name, "--in-state", "ended", "-o", file).stderr
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["attempts"] == whole["attempts"]
    exported = episodes("export", "--run", run.name, "--limit", 1, "--mask", "bob@")
    assert "bob@" not in exported.stdout
    assert [json.loads(one)["episode"]["episode_id"] for one in exported.stdout.splitlines()] == [episode.id]
    missing = episodes("export", "--run", "nowhere", "-o", tmp_path / "none.jsonl")
    assert (missing.exit_code, "no run 'nowhere'" in missing.stderr) == (3, True)
    assert not (tmp_path / "none.jsonl").exists()


def test_parked_ones_are_queued_again(episodes, client, run):
    run.register([group("open", 3, on_loss="shrink"), group("over", 1, on_loss="drop")])
    given = [episode for episode in client.claim(4, run=run.name) if episode.index == 0]
    while given:  # until they are parked
        for episode in given:
            episode.release("cannot do it")
        given = client.claim(2, run=run.name, wait_s=0)
    parked = answer(episodes("list", "--run", run.name, "--in-state", "parked", "--json"))["episodes"]
    assert {one["group_id"] for one in parked} == {"open", "over"}
    shown = episodes("list", "--run", run.name, "--in-state", "parked").output
    assert "lost 16×, last: released: cannot do it" in shown
    assert "1 queued again; 1 not, because their groups have ended" in episodes("requeue", "--run", run.name).output
    refused = episodes("requeue", next(one["episode_id"] for one in parked if one["group_id"] == "over"))
    assert refused.exit_code == 1
    assert "only parked episodes of open groups" in refused.stderr
    assert answer(episodes("requeue", "--run", run.name, "--json")) == {"requeued": 0, "skipped": 1}
    assert episodes("requeue").exit_code == 2


def test_episodes_groups_or_all_are_cancelled(episodes, client, run):
    run.register([group(f"g{i}", 2, on_loss="drop") for i in range(4)])
    with client.episode(run.name) as episode:
        assert "1 cancelled" in episodes("cancel", "--run", run.name, episode.id, "--reason", "enough").output
        assert not episode.check()
        assert "enough" in episode.reason
    assert answer(episodes("cancel", "--run", run.name, "--group", "g1", "--json")) == {"cancelled": 2}
    assert "4 cancelled" in episodes("cancel", "--run", run.name, "--all").output
    assert run.refresh().queued == 0
    assert episodes("cancel", "--run", run.name).exit_code == 2
    assert episodes("cancel", "--run", run.name, "--all", "--group", "g1").exit_code == 2


def test_a_run_is_deleted_when_it_is_meant(episodes, client, run):
    run.register([group("g0", 2), group("g1", 1)])
    client.claim(1, run=run.name)
    request = episodes("delete", run.name, input="n\n")
    assert (request.exit_code, "3 episodes that wait or are played, and 0 groups" in request.stderr) == (1, True)
    assert run.refresh().queued == 2
    assert f"run {run.name} deleted, with 3 episodes" in episodes("delete", run.name, input="y\n").output
    missing = episodes("delete", run.name, "--yes")
    assert (missing.exit_code, "no run" in missing.stderr) == (3, True)
    client.run(run.name, model="ephebe")
    assert answer(episodes("delete", run.name, "--yes", "--json")) == {"deleted": 0}


def test_watch_shows_counts_until_it_is_stopped(arena, run):
    run.register([group("g0", 12)])
    command = [sys.executable, "-m", "palestra.cli", "episode", "watch", "--run", run.name]
    command += ["--server", arena.url, "--key", arena.trainer]
    environment = os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1", "FORCE_COLOR": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as watching:
        assert watching.stdout is not None
        try:
            while b" 12 " not in watching.stdout.readline():
                assert watching.poll() is None
            watching.send_signal(signal.SIGINT)
            _, complaints = watching.communicate(timeout=60)
        finally:
            watching.kill()
    assert (watching.returncode, complaints) == (0, b"")


def test_who_may_not_is_told_in_one_line(episodes, arena):
    shown = episodes("list", "--key", arena.worker)
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "this key has the right 'worker'; this call needs admin or trainer" in shown.stderr


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("http://127.0.0.1:9", 4, "error: http://127.0.0.1:9 does not answer: "),
        ("127.0.0.1:8000", 2, "error: '127.0.0.1:8000' is not the URL of a server"),
    ],
)
@pytest.mark.parametrize(
    "command", [["list"], ["show", "e"], ["requeue", "e"], ["cancel", "--run", "r", "e"], ["watch"]]
)
def test_no_server_is_one_line(command, url, code, said):
    shown = CliRunner().invoke(main, ["episode", *command, "--server", url], prog_name="palestra")
    assert shown.exit_code == code
    assert shown.stderr.startswith(said)
    assert shown.stderr.count("\n") == 1


def test_help_of_the_group_loads_no_client():
    script = (
        "import sys\nfrom palestra.cli import main\n"
        "try: main(['episode', '--help'])\nexcept SystemExit: pass\n"
        "print('loaded:', [name for name in sys.modules if name.startswith('palestra.episodes')])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "loaded: []"


def test_the_client_needs_the_core_install_only():
    """What `dependencies` in pyproject.toml names; nothing of the extras."""
    script = (
        "import sys\nimport palestra.episodes as e\n[getattr(e, name) for name in e.__all__]\n"
        "extras = {'aiohttp', 'tinker', 'torch', 'numpy', 'sqlalchemy', 'fastapi', 'openai', 'structlog'}\n"
        "print('loaded:', sorted(extras & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "loaded: []"


def test_aliases_and_runs_take_the_key_that_is_given(arena, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", arena.worker)  # which may do neither

    def call(*args: str, key: str) -> Result:
        return CliRunner().invoke(main, [*args, "--server", arena.url, "--key", key], prog_name="palestra")

    small = ["rollout.group_size=2", "rollout.groups_per_step=1", "steps=1", "eval.every=0", "alias=null"]
    for command in (["alias", "list"], ["train", "arithmetic", *small, "--name", "keyed", "--display", "none"]):
        refused = call(*command, key=arena.worker)
        assert (refused.exit_code, "this key has the right 'worker'" in refused.stderr) == (1, True)
        allowed = call(*(["keyed2" if one == "keyed" else one for one in command]), key=arena.trainer)
        assert allowed.exit_code == 0, allowed.output
    written = [file.read_text(errors="replace") for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(written) > 5
    assert not any(arena.trainer in text for text in written)
