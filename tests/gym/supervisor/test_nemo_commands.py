"""NeMo Gym's own commands, whose scripts `integrations/palestra_nemo_gym_cli` installs, do what ours do."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from palestra.cli.gym.ng.collecting import RUNNING, collect_arguments
from tests.gym.collect.conftest import UPSTREAM
from tests.gym.supervisor.conftest import RunningGym

PACKAGE = Path(__file__).parents[3] / "integrations/palestra_nemo_gym_cli"
ORIGINAL = Path(__file__).parents[3] / ".nemo-gym"
POLICY = ["--model", "m", "--model-url", "http://127.0.0.1:1/v1", "--model-api-key", "sk-quite-secret"]


@pytest.fixture
def upstream() -> Iterator[str]:
    """The address of a model that says B."""
    command = [sys.executable, str(UPSTREAM), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def called(*arguments: str) -> Result:
    from palestra.cli.gym.ng.commands import root

    return CliRunner().invoke(root(), arguments, env={"COLUMNS": "200"})


def printed(*arguments: str) -> str:
    result = called(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    """What was said on stderr, without the frame around it."""
    result = called(*arguments)
    assert result.exit_code not in (0, None), result.output
    return " ".join(result.stderr.replace("│", " ").split())


def test_a_gym_is_chosen_by_the_names_of_its_folders() -> None:
    config = printed("env", "resolve", "--resources-server", "mcqa", "--model-type", "vllm_model", *POLICY)
    assert "mcqa_simple_agent:" in config
    assert "policy_model_name: m" in config
    assert "sk-quite-secret" not in config
    files = "resources_servers/mcqa/configs/mcqa.yaml,responses_api_models/vllm_model/configs/vllm_model.yaml"
    change = "++mcqa.resources_servers.mcqa.port=9001"
    assert "port: 9001" in printed("env", "resolve", f"+config_paths=[{files}]", *POLICY, change)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["env", "start", "--resources-server", "mcq"], "did you mean: mcqa?"),
        (
            ["env", "resolve", "--model-type", "vllm_model/for_training"],
            "did you mean: vllm_model/vllm_model_for_training",
        ),
    ],
)
def test_a_name_without_a_config_is_told_with_the_nearest(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments)


def test_a_setting_reaches_us_with_its_secret() -> None:
    from palestra.cli.gym.ng.command_map import COMMANDS
    from palestra.cli.gym.ng.translating import arguments_of, parameter_name

    face = COMMANDS["env start"]
    nothing = {parameter_name(one): () if one.is_multiple else None for one in face.options}
    assert arguments_of(face, nothing, ["++policy_api_key=sk-1", "~a"]) == ["++policy_api_key=sk-1", "~a"]


@pytest.mark.parametrize("how", ["--head", "++head_server"])
def test_the_servers_of_a_running_gym(gym: RunningGym, how: str) -> None:
    where = ["--head", gym.head] if how == "--head" else [f"++head_server.port={gym.head.rpartition(':')[2]}"]
    found = json.loads(printed("env", "status", "--json", *where))
    assert {one["process_name"] for one in found} >= {"lone", "counter"}


def test_a_collection_goes_to_the_gym_that_is_meant(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text("{}")
    run = ["eval", "run", "--agent", "a", "--input", str(rows), "--output", str(tmp_path / "out.jsonl"), "--limit", "5"]
    nobody = refused(*run, "--no-serve", "--num-repeats", "1", "++head_server.port=9")
    assert "no gym answers at http://127.0.0.1:9" in nobody
    assert "or --no-serve for a running one" in refused(*run)
    assert "leave out the config here" in refused(*run, "--no-serve", "--config", "a.yaml")


def test_ng_collect_rollouts_knows_the_head_by_both_words() -> None:
    assert collect_arguments(["++head_server.port=9500", "--resume"]) == [
        "--resume",
        f"{RUNNING}=http://127.0.0.1:9500",
    ]
    assert collect_arguments(["--head", "http://h:1", "--resume"]) == [f"{RUNNING}=http://h:1", "--resume"]


def test_what_there_is_can_be_listed_and_searched() -> None:
    agents = json.loads(printed("list", "agents", "--json"))
    assert "simple_agent" in [one["name"] for one in agents]
    (found,) = json.loads(printed("search", "resources-servers", "MCQ", "--json"))
    assert (found["kind"], found["configs"]) == ("resources-servers", ["resources_servers/mcqa/configs/mcqa.yaml"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "submit", "-c", "x.yaml", "--dry-run"], "`gym eval submit` has no counterpart in Palestra"),
        (["dataset", "download", "--repo-id", "a/b"], "palestra gym datasets -c FILE -o DIR"),
        (["env", "test", "--all"], "--all has no counterpart in Palestra; the nearest: one server after another"),
        (
            ["eval", "profile", "+rollout=x"],
            "rollout: not a setting of this command; there are: materialized_inputs",
        ),
        (["env", "start", "mcqa"], "'mcqa': settings are KEY=VALUE"),
        (["env", "starts"], "starts"),
        (["env", "status", "++head_server.port=abc"], "is {'port': 'abc'}, but it must have a host and a port"),
    ],
)
def test_what_is_not_there_is_said_with_the_nearest(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments)


def test_every_old_name_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from palestra.cli.gym.ng.command_map import ABSENT, COMMANDS, OLD_NAMES
    from palestra.cli.gym.ng.commands import by_old_name

    scripts = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["scripts"]
    old = {name.removeprefix("nemo_gym_").removeprefix("ng_") for name in scripts.keys() - {"gym", "ng"}}
    assert old == OLD_NAMES.keys()
    commands = {name.partition(" --")[0] for name in OLD_NAMES.values()}
    assert commands <= {*COMMANDS, *ABSENT, "--help", "--version"}
    monkeypatch.setattr(sys, "argv", ["/bin/nemo_gym_reinstall", "--anything"])
    with pytest.raises(SystemExit):
        by_old_name()
    assert "`gym reinstall` has no counterpart in Palestra" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.skipif(not ORIGINAL.is_dir(), reason="type: make nemo-gym")
def test_every_script_command_and_option_of_theirs_is_known_here() -> None:
    from palestra.cli.gym.ng.command_map import ABSENT, COMMANDS
    from palestra.cli.gym.ng.commands import root

    (listed,) = ORIGINAL.glob("*.dist-info/entry_points.txt")
    theirs = {line.partition(" = ")[0] for line in listed.read_text().splitlines() if " = " in line}
    projects = [tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (PACKAGE, PACKAGE.parents[1])]
    assert theirs <= {name for project in projects for name in project["project"]["scripts"]}

    tree = ast.parse((ORIGINAL / "nemo_gym/cli/main.py").read_text())
    (commands,) = [
        one.value for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "COMMANDS"
    ]
    assert isinstance(commands, ast.Dict)
    named = {ast.literal_eval(key): value for key, value in zip(commands.keys, commands.values, strict=True) if key}
    assert named.keys() <= COMMANDS.keys() | ABSENT.keys()
    unknown = {
        name: set(_options_in(named[name])) - _options_of(root(), name) for name in named.keys() & COMMANDS.keys()
    }
    assert {name: options for name, options in unknown.items() if options} == {}


def _options_of(command: Any, name: str) -> set[str]:
    for part in name.split():
        command = command.commands[part]
    return {one for each in command.params for one in each.opts}


def _options_in(command: ast.expr) -> Iterator[str]:
    """Those that are not shared with other commands."""
    for call in ast.walk(command):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            name = str(call.args[0].value)
            if ast.unparse(call.func).endswith("_flag"):
                yield f"--{name}"
            elif ast.unparse(call.func) == "p.add_argument" and name.startswith("--"):
                yield name


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_their_quick_start_works_with_the_package_installed(tmp_path: Path, upstream: str) -> None:
    """As their README has it, in a folder with an env.yaml."""
    place = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(place), str(PACKAGE)]
    subprocess.run(pip, check=True)
    (tmp_path / "env.yaml").write_text(
        f"policy_base_url: {upstream}\npolicy_api_key: x\npolicy_model_name: steady\nhead_server: {{port: 0}}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(place)}

    def command(*arguments: str) -> list[str]:
        return [sys.executable, str(place / "bin/gym"), *arguments]

    def run(*arguments: str) -> str:
        done = subprocess.run(
            command(*arguments), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    start = command("env", "start", "--resources-server", "mcqa", "--model-type", "vllm_model")
    with subprocess.Popen(start, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as servers:
        assert servers.stdout is not None
        head = servers.stdout.readline().split()[-1]
        assert "mcqa_simple_agent" in run("env", "status", f"++head_server.port={head.rpartition(':')[2]}")
        rows = ["--input", "resources_servers/mcqa/data/example.jsonl", "--output", "results/mcqa_rollouts.jsonl"]
        some = ["--agent", "mcqa_simple_agent", *rows, "--limit", "5", "--num-repeats", "1"]
        assert "5 of 5 rollouts" in run("eval", "run", "--no-serve", *some, "--head", head)
        servers.send_signal(signal.SIGINT)
        assert servers.wait(60) == 0
    assert "5 tasks" in run("eval", "profile", "--rollouts", "results/mcqa_rollouts.jsonl")
    whole = ["--resources-server", "mcqa", "--model-type", "vllm_model", "--split", "train", "--output", "whole.jsonl"]
    data = f"[{{name: d, type: train, jsonl_fpath: {tmp_path / 'd.jsonl'}, license: MIT}}]"
    (tmp_path / "d.jsonl").write_bytes((tmp_path / "results/mcqa_rollouts_materialized_inputs.jsonl").read_bytes())
    change = f"mcqa_simple_agent.responses_api_agents.simple_agent.datasets={data}"
    assert "5 of 5 rollouts" in run("eval", "run", *whole, change)
    assert (tmp_path / "whole/preprocessed_datasets/train.jsonl").is_file()
