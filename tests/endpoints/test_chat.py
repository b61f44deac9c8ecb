"""`palestra chat` with real servers and tools; on a terminal and on a pipe as the real program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.testing.puppet import Cue, make_puppet
from tests.server.conftest import Server
from tests.terminal import palestra_in_terminal
from tests.training.trainers import FEW

NOBODY = "http://127.0.0.1:9"
COUNT = '<tool_call>{"name": "count", "arguments": {"item": "cards"}}</tool_call>'
LONG = " ".join(f"word{number}" for number in range(1500))


class Puppet(Server):
    name, worker = "puppet", "worker-puppet"


@pytest.fixture(scope="module")
def puppet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Puppet]:
    """A model that says what these tests need."""
    model = tmp_path_factory.mktemp("puppet")
    cues = [
        Cue(when="a long story", say=LONG),
        Cue(when="the second time", say="Again."),
        Cue(when="count the cards", say=COUNT),
        Cue(when="Tool result: 35", say="There are 35 cards. <done>"),
    ]
    make_puppet(model, cues, otherwise="Hello there.")
    with Puppet(tmp_path_factory.mktemp("server"), model) as server:
        server.start()
        yield server


def once(*args: object, **environment: str) -> Result:
    """In this process, which has imported most of it already."""
    done = CliRunner().invoke(main, ["chat", *map(str, args)], env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_message_on_a_pipe_is_answered_once(puppet):
    command = [sys.executable, "-m", "palestra.cli", "chat", "puppet", "--server", puppet.url]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there.\n", "")


def test_json_has_messages_tokens_and_logprobs(puppet):
    done = once("puppet", "hi", "--server", puppet.url, "--json", "--logprobs")
    found = json.loads(done.stdout)
    assert found["text"] == "Hello there."
    assert found["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello there."}]
    assert (found["stop"], len(found["logprobs"])) == ("stop", found["sampled_tokens"])
    assert all(-0.01 < one["logprob"] <= 0 for one in found["logprobs"])


def test_the_same_seed_gives_the_same_answer(ephebe_url):
    def answer(seed: int) -> list[float]:
        done = once("ephebe", "What is 8 + 7?", "--server", ephebe_url, "--seed", seed, "--json", "--logprobs")
        return [one["logprob"] for one in json.loads(done.stdout)["logprobs"]]

    assert answer(1) == answer(1)


def test_conversation_keeps_exactly_what_was_said(puppet, tmp_path):
    saved = tmp_path / "talk.jsonl"
    with palestra_in_terminal("chat", "puppet", "--server", puppet.url, "--system", "Be kind.") as terminal:
        terminal.see("> ")
        for line, answer in {"hi": "Hello there.", "now the second time": "Again.", "//one": "Again."}.items():
            terminal.type(line)
            terminal.see(f"{answer}\n> ")
        for command in ("/undo", f"/save {saved}", "/reset", f"/save {saved}", "/undo", "/nothing", "/help"):
            terminal.type(command)
            terminal.see("\n> ")
        terminal.type("two \\\nlines")
        terminal.see("Hello there.\n> ")
        assert "\x1b[?2004h" in terminal.raw  # the terminal is asked to say what is pasted
        terminal.type("\x1b[200~three\npasted\nlines\x1b[201~")
        terminal.see("Hello there.\n> ")
        terminal.type(f"/save {saved}")
        terminal.see("saved")
        terminal.type("/quit")
        assert terminal.end() == 0
    talks = [json.loads(line)["messages"] for line in saved.read_text().splitlines()]
    system = {"role": "system", "content": "Be kind."}
    assert [one["content"] for one in talks[0]] == ["Be kind.", "hi", "Hello there.", "now the second time", "Again."]
    assert talks[1] == [system]
    assert [one["content"] for one in talks[2][1::2]] == ["two \nlines", "three\npasted\nlines"]
    assert "there is nothing to take back" in terminal.text
    assert "unknown command /nothing" in terminal.text


def test_ctrl_c_stops_the_answer_and_not_the_program(puppet, tmp_path):
    saved = tmp_path / "talk.jsonl"
    with palestra_in_terminal("chat", "puppet", "--server", puppet.url) as terminal:
        terminal.see("> ")
        terminal.type("tell a long story")
        terminal.see("word20")
        terminal.type("\x03", end="")
        terminal.see("[stopped]\n> ")
        terminal.type(f"/save {saved}")
        terminal.see("> ")
        terminal.type("\x03", end="")
        terminal.see("/quit ends")
        terminal.type("\x04", end="")
        assert terminal.end() == 0
    said = json.loads(saved.read_text())["messages"]
    assert said[1]["role"] == "assistant"
    assert LONG.startswith(said[1]["content"])
    assert len(said[1]["content"]) < len(LONG)


def test_tools_of_an_environment_are_executed(puppet):
    options = ("puppet", "--server", puppet.url, "--env", "stockroom", "--task", "eval-0")
    found = json.loads(once(*options, "Please count the cards", "--json").stdout)
    assert [one["role"] for one in found["messages"]] == ["user", "assistant", "user", "assistant"]
    assert found["messages"][2]["content"] == "Tool result: 35"
    assert found["text"] == "There are 35 cards. <done>"
    shown = once(*options, "Please count the cards").stdout
    assert shown == f"{COUNT}\n[user] Tool result: 35\nThere are 35 cards. <done>\n"


def test_task_of_an_environment_is_played_to_its_reward(ephebe_url):
    with palestra_in_terminal("chat", "ephebe", "--server", ephebe_url, "--env", "stockroom") as terminal:
        terminal.see("> ")
        terminal.type("")
        terminal.see("[the episode ends with reward")
        terminal.see("> ")
        terminal.type("/quit")
        assert terminal.end() == 0


def test_two_models_answer_side_by_side(puppet):
    args = ("chat", "puppet", "--beside", "puppet", "--server", puppet.url)
    with palestra_in_terminal(*args) as terminal:
        terminal.see("> ")
        terminal.type("hi")
        shown = terminal.see("\n> ")
        last = shown.rstrip("> \n").splitlines()[-1]
        assert last.count("Hello there.") == 2
        terminal.type("/quit")
        terminal.end()
    plain = once(*args[1:], "hi").stdout
    assert plain == "[puppet]\nHello there.\n[puppet]\nHello there.\n"


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, pytest.param({"TERM": "dumb"}, marks=pytest.mark.slow)], ids=str
)
def test_no_colours_where_there_are_none(puppet, environment):
    with palestra_in_terminal(
        "chat", "puppet", "hi", "--server", puppet.url, "--logprobs", environment=environment
    ) as terminal:
        assert terminal.end() == 0
    assert "'Hello'" in terminal.raw
    assert "\x1b[3" not in terminal.raw


def test_probable_tokens_are_green(puppet):
    with palestra_in_terminal("chat", "puppet", "hi", "--server", puppet.url, "--logprobs") as terminal:
        assert terminal.end() == 0
    assert "\x1b[32mHello\x1b[0m" in terminal.raw


def test_escapes_of_a_model_do_not_reach_the_terminal():
    from palestra.util.safe_text import safe_text

    assert "\x1b" not in safe_text("\x1b[2J")


def test_anthropics_api_is_spoken(puppet):
    options = ("puppet", "hi", "--server", puppet.url, "--api", "anthropic")
    found = json.loads(once(*options, "--system", "Be kind.", "--json").stdout)
    assert (found["text"], found["stop"]) == ("Hello there.", "stop")
    assert min(found["prompt_tokens"], found["sampled_tokens"]) > 0
    refused = once(*options, "--logprobs")
    assert (refused.exit_code, "no log-probabilities" in refused.stderr) == (2, True)


def test_server_is_started_if_none_runs_and_ends_with_the_chat(tmp_path):
    with palestra_in_terminal("chat", "ephebe", environment={"TINKER_BASE_URL": NOBODY}) as terminal:
        terminal.see("Palestra is ready")
        terminal.see("> ")
        servers = psutil.Process(terminal.process.pid).children(recursive=True)
        assert any("serve" in server.cmdline() for server in servers)
        terminal.type("What is 2 + 2?")
        terminal.see("\n> ")
        terminal.type("/quit")
        assert terminal.end() == 0
    assert not [server for server in servers if server.is_running() and server.status() != psutil.STATUS_ZOMBIE]


def test_running_server_that_has_the_model_is_used(puppet):
    done = once("puppet", "hi", TINKER_BASE_URL=puppet.url)
    assert (done.stdout, done.stderr) == ("Hello there.\n", f"puppet is at {puppet.url}\n")


def test_checkpoint_of_a_run_is_talked_to(run_training, tmp_path):
    run = run_training("trained", steps=1, rollout=FEW)
    address = json.loads(next(iter((run.path / "checkpoints").glob("step_*.json"))).read_text())["address"]
    server = run.read_about()["config"]["server"]
    for name, options in {f"{run.path}@last": (), address: ("--server", server)}.items():
        done = once(name, "What is 2 + 2?", "--max-tokens", 4, "--json", *options)
        assert json.loads(done.stdout)["sampled_tokens"] > 0, done.stderr
    assert once(f"{run.path}@9", "hi").exit_code == 3


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["no-such-model", "hi"], 3, "no model 'no-such-model'"),
        (["ephebe", "hi", "--server", NOBODY], 4, "does not answer"),
        (["ephebe", "hi", "--env", "nowhere"], 3, "unknown environment 'nowhere'"),
        (["ephebe", "hi", "--env", "stockroom", "--task", "none"], 3, "has no task 'none'"),
        (["ephebe", "hi", "--task", "eval-0"], 2, "--env"),
        (["ephebe"], 2, "there is no message"),
        (["ephebe", "hi", "--temperature", "-1"], 2, "temperature"),
    ],
)
def test_mistakes_are_one_clear_line(args, code, said):
    done = once(*args, TINKER_BASE_URL=NOBODY)
    assert (done.exit_code, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_model_at_a_server_is_named(puppet):
    done = once("other", "hi", "--server", puppet.url)
    assert (done.exit_code, "'other'" in done.stderr) == (3, True), done.stderr


def test_error_in_a_conversation_does_not_end_it(puppet):
    with palestra_in_terminal("chat", "other", "--server", puppet.url) as terminal:
        terminal.see("> ")
        terminal.type("hi")
        terminal.see("error: ")
        terminal.see("> ")
        terminal.type("/undo")
        terminal.see("nothing to take back")
        terminal.type("/quit")
        assert terminal.end() == 0


def test_saved_conversation_can_be_trained_on(puppet, tmp_path):
    from palestra.data.conversations import ConversationFile, conversation_of

    saved: Path = tmp_path / "talk.jsonl"
    with palestra_in_terminal("chat", "puppet", "--server", puppet.url) as terminal:
        terminal.see("> ")
        terminal.type("hi")
        terminal.see("Hello there.\n> ")
        terminal.type(f"/save {saved}")
        terminal.see("saved")
        terminal.type("/quit")
        terminal.end()
    assert len(ConversationFile(saved, conversation_of)) == 1
