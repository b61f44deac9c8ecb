"""Files in each of NeMo Gym's shapes, and the mistakes in them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from palestra.gym.config import GymSources, ReservedPorts, load_gym, masked, shown
from palestra.gym.config.directives import apply_directives
from palestra.gym.errors import GymConfigError
from palestra.gym.records import GymConfig, Isolation, ServerKind
from palestra.gym.search_folders import SHIPPED

MCQA = """
mcqa: {resources_servers: {mcqa: {entrypoint: app.py, domain: knowledge, grading_mode: strict}}}
mcqa_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: mcqa}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
      - {name: train, type: train, jsonl_fpath: a/train.jsonl, license: Apache 2.0}
      - {name: example, type: example, jsonl_fpath: a/example.jsonl, num_repeats: 2}
"""
MODEL = """
policy_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: ${policy_base_url}
      api_key: ${policy_api_key}
      model: ${policy_model_name}
"""
AGENT_WITH_DATA = "a: {{responses_api_agents: {{x: {{entrypoint: app.py, datasets: [{}]}}}}}}"
POLICY = ("+policy_base_url=http://up/v1", "+policy_api_key=sk-abcdef", "+policy_model_name=m")


class Files:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.told: list[str] = []

    def write(self, name: str, text: str) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def load(self, *files: str, overrides: tuple[str, ...] = POLICY, **options: Any) -> GymConfig:
        sources = GymSources(files=files, roots=[self.root], overrides=overrides, **options)
        return load_gym(sources, is_code_needed=False, report=self.told.append)

    def problem(self, *files: str, overrides: tuple[str, ...] = POLICY, **options: Any) -> str:
        with pytest.raises(GymConfigError) as error:
            self.load(*files, overrides=overrides, **options)
        return str(error.value)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.write("mcqa.yaml", MCQA)
    made.write("model.yaml", MODEL)
    return made


def fields(config: GymConfig, name: str) -> dict[str, Any]:
    return config.servers[name].settings


# Sources


def test_servers_of_a_plain_config(files: Files) -> None:
    config = files.load("mcqa.yaml", "model.yaml")
    assert {name: one.kind for name, one in config.servers.items()} == {
        "mcqa": ServerKind.RESOURCES,
        "mcqa_agent": ServerKind.AGENT,
        "policy_model": ServerKind.MODEL,
    }
    assert fields(config, "policy_model")["base_url"] == "http://up/v1"
    assert (config.head_host, config.head_port) == ("127.0.0.1", 11000)
    ports = [one.port for one in config.servers.values()]
    assert len(set(ports)) == 3
    assert all(10_001 <= port <= 20_000 for port in ports)
    assert config.settings["mcqa"]["resources_servers"]["mcqa"]["port"] == config.servers["mcqa"].port


def test_includes_lie_below_and_later_files_above(files: Files) -> None:
    files.write("deep.yaml", "a: 0\nb: 0\nc: 0\nd: [1, 2]")
    files.write("one.yaml", "config_paths: [deep.yaml]\nb: 1\nc: 1\nd: [3]")
    files.write("two.yaml", "config_paths: [deep.yaml]\nc: 2")
    settings = files.load("one.yaml", "two.yaml").settings
    assert [settings[key] for key in "abcd"] == [0, 1, 2, [3]]
    assert settings["config_paths"] == ["one.yaml", "two.yaml", "deep.yaml"]
    assert [line for line in files.told if "deep.yaml, included by" in line]


def test_files_that_include_each_other_are_read_once(files: Files) -> None:
    files.write("a.yaml", "config_paths: [b.yaml]\nx: a")
    files.write("b.yaml", "config_paths: [a.yaml]\nx: b\ny: b")
    settings = files.load("a.yaml").settings
    assert (settings["x"], settings["y"]) == ("a", "b")


def test_env_yaml_given_values_and_command_line_in_this_order(files: Files) -> None:
    files.write("low.yaml", "w: file\nx: file\ny: file\nz: file\nk: {a: file}")
    files.write("env.yaml", "config_paths: [low.yaml]\nx: env\ny: env\nz: env\nk: {b: env}")
    settings = files.load(overrides=("z=line", "++k.c=line"), initial={"y": "given", "z": "given"}).settings
    assert [settings[key] for key in "wxyz"] == ["file", "env", "given", "line"]
    assert settings["k"] == {"a": "file", "b": "env", "c": "line"}


def test_config_paths_of_the_command_line_win(files: Files) -> None:
    files.write("env.yaml", "config_paths: [nowhere.yaml]")
    assert "mcqa" in files.load(overrides=("+config_paths=[mcqa.yaml, model.yaml]", *POLICY)).servers


def test_shipped_configs_are_found_by_nemo_gyms_paths(files: Files) -> None:
    found = sorted(str(path.relative_to(SHIPPED)) for path in SHIPPED.glob("responses_api_models/*/configs/*.yaml"))
    assert "responses_api_models/vllm_model/configs/vllm_model.yaml" in found
    for name in found:
        sources = GymSources(files=[name], overrides=POLICY)
        assert "policy_model" in load_gym(sources).servers


def test_unset_marks_do_not_cover_values(files: Files) -> None:
    files.write("low.yaml", "a: 1\nm: {b: 2}")
    files.write("high.yaml", "a: ???\nm: {b: '???', c: 3}")
    settings = files.load("low.yaml", "high.yaml").settings
    assert (settings["a"], settings["m"]) == (1, {"b": 2, "c": 3})


def test_all_unset_values_are_told_together(files: Files) -> None:
    files.write("a.yaml", "a: ???\nm: {b: [1, '???']}")
    problem = files.problem("a.yaml")
    assert "2 values must be set" in problem
    assert f"a ({files.root / 'a.yaml'})" in problem
    assert "m.b[1]" in problem
    assert "++a=VALUE" in problem


def test_interpolation(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_TEST", "from-env")
    files.write(
        "a.yaml",
        "x: 1\nm: {y: '${x}', z: 'a${.y}', whole: '${n}'}\nn: {list: ['${oc.env:GYM_TEST}', '${oc.env:NOT_SET,7}']}\n"
        "s: ${oc.select:nope,3}\nraw: '\\${x}'",
    )
    settings = files.load("a.yaml").settings
    assert settings["m"] == {"y": 1, "z": "a1", "whole": {"list": ["from-env", "7"]}}
    assert (settings["s"], settings["raw"]) == (3, "${x}")


def test_failed_interpolations_are_told_together_with_file_and_key(files: Files) -> None:
    problem = files.problem("model.yaml", overrides=("+policy_base_urls=x", "+policy_model_name=m"))
    assert "policy_model.responses_api_models.vllm_model.base_url" in problem
    assert "uses 'policy_base_url'" in problem
    assert "did you mean: policy_base_urls" in problem
    assert "uses 'policy_api_key'" in problem
    assert str(files.root / "model.yaml") in problem


def test_addresses_can_be_interpolated(files: Files) -> None:
    files.write("a.yaml", "url: http://${mcqa.resources_servers.mcqa.host}:${mcqa.resources_servers.mcqa.port}")
    config = files.load("mcqa.yaml", "model.yaml", "a.yaml")
    assert config.settings["url"] == config.servers["mcqa"].url


# Directives


def test_inherited_part_moves_and_copied_part_stays(files: Files) -> None:
    files.write(
        "bench.yaml",
        "config_paths: [mcqa.yaml]\n"
        "gpqa: {_inherit_from: mcqa, resources_servers: {mcqa: {grading_mode: lenient}}}\n"
        "gpqa_agent:\n"
        "  _inherit_from: mcqa_agent\n"
        "  responses_api_agents: {simple_agent: {resources_server: {name: gpqa}}}\n"
        "second: {_copy: gpqa}\n",
    )
    config = files.load("bench.yaml", "model.yaml")
    assert set(config.servers) == {"gpqa", "gpqa_agent", "second", "policy_model"}
    assert fields(config, "gpqa")["grading_mode"] == fields(config, "second")["grading_mode"] == "lenient"
    assert fields(config, "gpqa_agent")["resources_server"] == {"type": "resources_servers", "name": "gpqa"}


def test_directives_from_the_command_line(files: Files) -> None:
    overrides = (
        *POLICY,
        "+mine=${inherit_from:mcqa}",
        "+n=${copy:mine.resources_servers.mcqa.grading_mode}",
        "~mcqa_agent",
    )
    config = files.load("mcqa.yaml", "model.yaml", overrides=overrides)
    assert set(config.servers) == {"mine", "policy_model"}
    assert config.settings["n"] == "strict"


@pytest.mark.parametrize("order", [1, -1])
def test_chains_of_inheritance_work_in_any_order(order: int) -> None:
    entries = [("c", {"x": 1, "y": 1}), ("b", {"_inherit_from": "c", "y": 2}), ("a", {"_inherit_from": "b", "z": 3})]
    assert apply_directives(dict(entries[::order])) == {"a": {"x": 1, "y": 2, "z": 3}}


def test_deleted_keys() -> None:
    data = {"a": {"_delete_key": "x, y", "_copy": "b", "y": 1}, "b": {"x": "???", "z": 2}}
    assert apply_directives(data) == {"a": {"z": 2}, "b": {"x": "???", "z": 2}}
    assert apply_directives({"a": {"_delete_key": "not_there", "y": 1}}) == {"a": {"y": 1}}


def test_what_is_taken_while_unset_is_unset() -> None:
    assert apply_directives({"a": {"_copy": "b", "y": 1}, "b": "???"})["a"] == "???"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": {"_inherit_from": "mcqb"}, "mcqa": {}}, "did you mean: mcqa"),
        ({"a": {"_copy": "m.y"}, "m": {"x": {}}}, "no 'y' in m"),
        ({"a": {"_copy": "a"}}, "inherits from itself"),
        ({"a": {"_inherit_from": "b"}, "b": "${inherit_from:a}"}, "inherits from itself (b -> a -> b)"),
        ({"a": {"_copy": "b", "_inherit_from": "b"}, "b": {}}, "choose one"),
        ({"a": {"_copy": "b", "_delete_key": "xy"}, "b": {"xx": 1}}, "no 'xy' to delete"),
        ({"a": {"_copy": 3}}, "should be the dotted path"),
        ({"a": {"_copy": "b"}, "b": 3}, "not a mapping"),
    ],
)
def test_directives_that_cannot_be(data: dict[str, Any], words: str) -> None:
    with pytest.raises(GymConfigError) as error:
        apply_directives(data)
    assert words in str(error.value)


def test_a_placeholder_model_lies_below_the_real_one(files: Files) -> None:
    files.write(
        "p.yaml", "policy_model: {responses_api_models: {dummy_model: {entrypoint: app.py, model: d, more: 1}}}"
    )
    config = files.load("p.yaml", "model.yaml")
    assert config.servers["policy_model"].implementation == "vllm_model"
    assert (fields(config, "policy_model")["model"], fields(config, "policy_model")["more"]) == ("m", 1)


def test_data_commands_need_no_model(files: Files) -> None:
    config = files.load("mcqa.yaml", overrides=(), is_model_needed=False)
    assert config.servers["policy_model"].implementation == "dummy_model"


# Servers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: {resources_servers: {x: {entrypoint: app.py}}}", "a.resources_servers.x.domain is missing"),
        ("a: {resources_servers: {x: {entrypoint: app.py, domain: maths}}}", "did you mean: math?"),
        ("a: {resources_servers: {x: {entrypoint: /app.py, domain: math}}}", "should be a Python file"),
        ("a: {responses_api_agents: {x: {entrypoint: app.py}, y: {}}}", "has x, y, but an instance has one"),
        (
            "a: {responses_api_agents: {x: {entrypoint: app.py}}, resources_servers: {y: {}}}",
            "an instance has one kind",
        ),
        ("a: {resource_servers: {x: {entrypoint: app.py}}}", "did you mean: resources_servers"),
        ("a: {responses_api_agents: {x: {entrypoint: app.py, port: 99999}}}", "a.responses_api_agents.x.port"),
        ("a: {responses_api_agents: {x: {entrypoint: app.py, num_workers: 0}}}", "num_workers"),
        ("a: {responses_api_agents: {x: {entrypoint: app.py, isolation: own}}}", "not one of shared, process"),
        (AGENT_WITH_DATA.format("{name: n, type: train, jsonl_fpath: f}"), "datasets[0].license is missing"),
        (AGENT_WITH_DATA.format("{name: n, type: exampel, jsonl_fpath: f}"), "did you mean: example?"),
        (
            AGENT_WITH_DATA.format("{name: n, type: train, jsonl_fpath: f, license: Apache}"),
            "datasets[0].license: 'Apache' is not one of",
        ),
        (AGENT_WITH_DATA.format("{name: n, type: benchmark, jsonl_fpath: f}"), "datasets[0].prepare_script is missing"),
    ],
)
def test_almost_servers_are_an_error_unless_told_otherwise(files: Files, text: str, words: str) -> None:
    files.write("a.yaml", text)
    assert words in files.problem("a.yaml")
    config = files.load("a.yaml", overrides=("++error_on_almost_servers=false",))
    assert "a" not in config.servers
    assert any(words in line for line in files.told)


def test_a_reference_to_nobody(files: Files) -> None:
    files.write("a.yaml", "mcqa_agent: {responses_api_agents: {simple_agent: {resources_server: {name: mcq}}}}")
    problem = files.problem("mcqa.yaml", "model.yaml", "a.yaml")
    assert "mcqa_agent.responses_api_agents.simple_agent.resources_server: no resources_servers" in problem
    assert "did you mean: mcqa?" in problem


def test_a_part_of_a_server_alone_is_told(files: Files) -> None:
    files.write("a.yaml", "mcqa2: {resources_servers: {mcqa: {grading_mode: x}}}")
    assert "mcqa2" not in files.load("mcqa.yaml", "model.yaml", "a.yaml").servers
    assert "mcqa2 has no entrypoint, so no server is started for it" in files.told


def test_verification_can_be_skipped_for_all_agents(files: Files) -> None:
    config = files.load("mcqa.yaml", "model.yaml", overrides=(*POLICY, "skip_verification=true"))
    assert fields(config, "mcqa_agent")["skip_verification"] is True
    assert "skip_verification" not in fields(config, "mcqa")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mcqa.resource_servers.mcqa.x=1", "did you mean: resources_servers?"),
        ("mcqb.resources_servers.mcqa.x=1", "did you mean: mcqa"),
        ("polcy_model_name=m", "did you mean: policy_model_name"),
        ("~mcqb", "did you mean: mcqa"),
        ("gym.isolation=own", "gym.isolation: input should be 'shared' or 'process'"),
        ("gym.max_restart=1", "did you mean: max_restarts?"),
        ("port_range_low=30000", "low before high"),
        ("config_paths=mcqa.yaml", "should be a list of files"),
        ("head_server.port=http", "head_server.port"),
        ("mcqa.resources_servers.mcqa.grading_mode.x=1", "no key can be set inside it"),
        ("model_endpoint_readiness_timeout_seconds=soon", "should be a number of seconds"),
    ],
)
def test_wrong_overrides_name_the_nearest(files: Files, override: str, words: str) -> None:
    assert words in files.problem("mcqa.yaml", "model.yaml", overrides=(*POLICY, override))


@pytest.mark.parametrize(
    "override", ["hf_tokn.api_key=sk-hush", "polcy_api_key=sk-hush", "policy_api_key=sk-hush,more"]
)
def test_mistakes_do_not_repeat_secrets(files: Files, override: str) -> None:
    problem = files.problem("mcqa.yaml", "model.yaml", overrides=(override,))
    assert override.partition("=")[0] in problem
    assert "hush" not in problem


def test_a_file_that_is_not_there_or_no_config(files: Files) -> None:
    problem = files.problem("mcq.yaml")
    assert "there is no 'mcq.yaml'" in problem
    assert "did you mean: mcqa.yaml" in problem
    files.write("bad.yaml", "a: [1\nb: 2")
    assert "bad.yaml: not valid YAML in line 2" in files.problem("bad.yaml")
    files.write("list.yaml", "- 1")
    assert "should hold keys and values" in files.problem("list.yaml")


# Ports


def free_ports(count: int) -> int:
    """The first of as many free ones in a row."""
    for low in range(23_000, 60_000, count):
        with ReservedPorts() as taken:
            try:
                for port in range(low, low + count):
                    taken.reserve("127.0.0.1", port, "a test")
                return low
            except GymConfigError:
                continue
    raise AssertionError("this machine has no free ports")


def test_two_gyms_never_share_a_port(files: Files) -> None:
    low = free_ports(6)
    overrides = (*POLICY, f"port_range_low={low}", f"port_range_high={low + 5}", "head_server.port=0")
    sources = GymSources(files=["mcqa.yaml", "model.yaml"], roots=[files.root], overrides=overrides)
    with ReservedPorts() as first, ReservedPorts() as second, ReservedPorts() as third:
        both = [load_gym(sources, ports=held, is_code_needed=False) for held in (first, second)]
        used = {one.port for config in both for one in config.servers.values()}
        assert used == set(range(low, low + 6))
        with pytest.raises(GymConfigError, match=r"mcqa\.resources_servers\.mcqa\.port: found no free port"):
            load_gym(sources, ports=third, is_code_needed=False)


def test_a_port_that_is_taken_or_given_twice(files: Files) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ReservedPorts() as ports:
        taken = other.getsockname()[1]
        sources = GymSources(overrides=[f"head_server.port={taken}"])
        with pytest.raises(GymConfigError, match=rf"head_server\.port: cannot listen at 127\.0\.0\.1:{taken}"):
            load_gym(sources, ports=ports)
    twice = ("mcqa.resources_servers.mcqa.port=9001", "mcqa_agent.responses_api_agents.simple_agent.port=9001")
    problem = files.problem("mcqa.yaml", "model.yaml", overrides=(*POLICY, *twice))
    assert "9001 is also the port of mcqa" in problem


# Code


def test_ours_wins_over_a_folder_of_the_same_name_unless_told(files: Files) -> None:
    files.write("responses_api_models/vllm_model/app.py", "import nemo_gym")
    files.write("resources_servers/mcqa/app.py", "from nemo_gym import Domain")
    files.write("resources_servers/mcqa/requirements.txt", "-e nemo-gym[dev] @ ../../\n")
    sources = GymSources(files=["mcqa.yaml", "model.yaml"], roots=[files.root], overrides=POLICY)
    config = load_gym(sources)
    assert config.servers["policy_model"].folder == SHIPPED / "responses_api_models/vllm_model"
    assert (config.servers["mcqa"].is_stock, config.servers["mcqa"].isolation) == (True, Isolation.PROCESS)
    assert (config.servers["mcqa_agent"].is_stock, config.servers["mcqa_agent"].isolation) == (False, Isolation.SHARED)
    theirs = load_gym(
        GymSources(files=sources.files, roots=sources.roots, overrides=[*POLICY, "gym.use_stock=[vllm_model]"])
    )
    assert theirs.servers["policy_model"].is_stock
    assert theirs.servers["policy_model"].folder == files.root / "responses_api_models/vllm_model"


def test_an_environment_server_that_only_hands_on_is_ours(files: Files) -> None:
    """As in all of NeMo Gym's configs since 0.7."""
    reference = "agent_server: {type: responses_api_agents, name: mcqa_agent}"
    files.write("relay.yaml", f"front: {{environment_servers: {{legacy_agent: {{entrypoint: app.py, {reference}}}}}}}")
    files.write("other.yaml", "front: {environment_servers: {user_sim: {entrypoint: app.py}}}")
    response: list[str] = []
    relayed = GymSources(files=["mcqa.yaml", "model.yaml", "relay.yaml"], roots=[files.root], overrides=POLICY)
    found = load_gym(relayed, report=response.append).servers["front"]
    assert (found.kind, found.is_stock, found.isolation) == (ServerKind.ENVIRONMENT, False, Isolation.SHARED)
    assert response == []
    without = GymSources(files=relayed.files, roots=relayed.roots, overrides=[*POLICY, "~mcqa_agent"])
    assert "front" not in load_gym(without, report=response.append).servers
    assert response == ["front stands before an agent that is not in this gym, so no server is started for it"]
    with pytest.raises(GymConfigError, match=r"front: of NeMo Gym's environment servers only legacy_agent runs here"):
        load_gym(GymSources(files=["other.yaml"], roots=[files.root]))


@pytest.mark.parametrize(
    ("name", "code"),
    [("setup_tool.py", ""), ("helper.py", "run('cd x && npm install -g tool', shell=True)")],
)
def test_set_up_code_of_a_stock_folder_must_be_allowed(files: Files, name: str, code: str) -> None:
    """One of NeMo Gym's runs a global npm install when it starts."""
    files.write("a.yaml", "a: {resources_servers: {stock: {entrypoint: app.py, domain: math}}}")
    files.write("resources_servers/stock/app.py", f"from nemo_gym import Domain\nimport {name.removesuffix('.py')}")
    files.write(f"resources_servers/stock/{name}", code)
    with pytest.raises(GymConfigError, match=rf"stock/{name}:1 \((?s:.*)gym\.allow_setup=\[stock\]"):
        load_gym(GymSources(files=["a.yaml"], roots=[files.root]))
    allowed = GymSources(files=["a.yaml"], roots=[files.root], overrides=["gym.allow_setup=[stock]"])
    assert load_gym(allowed).servers["a"].is_stock


def test_a_stock_folder_with_a_source_that_cannot_be_handed_on(files: Files) -> None:
    files.write("a.yaml", "a: {resources_servers: {stock: {entrypoint: app.py, domain: math}}}")
    files.write("resources_servers/stock/app.py", "import nemo_gym")
    project = "[project]\nname = 'x'\ndependencies = ['tiny']\n[tool.uv.sources]\ntiny = {workspace = true}\n"
    files.write("resources_servers/stock/pyproject.toml", project)
    with pytest.raises(GymConfigError, match="tiny has the source"):
        load_gym(GymSources(files=["a.yaml"], roots=[files.root]))
    files.write("resources_servers/stock/.venv/bin/python", "")
    ready = GymSources(files=["a.yaml"], roots=[files.root], overrides=["++skip_venv_if_present=true"])
    assert load_gym(ready).servers["a"].is_stock


def test_a_server_without_code(files: Files) -> None:
    files.write("resources_servers/counting/app.py", "")
    files.write("a.yaml", "a: {resources_servers: {countin: {entrypoint: app.py, domain: math}}}")
    with pytest.raises(GymConfigError) as error:
        load_gym(GymSources(files=["a.yaml"], roots=[files.root]))
    assert "there is no server resources_servers/countin" in str(error.value)
    assert "did you mean: counting?" in str(error.value)


# Secrets


def test_secrets_are_masked_wherever_they_went() -> None:
    settings = {
        "policy_api_key": "sk-abcdef",
        "hf_token": "hf_1234567",
        "headers": {"Authorization": "Bearer zzzzzzzz", "X": "key is sk-abcdef"},
        "url": "https://user:pass1234@host/x",
        "keys": {"api_keys": ["k1", "k2"]},
        "max_tokens": 12,
        "tokenizer": "qwen",
        "empty": {"api_key": None},
        "return_token_id_information": True,
    }
    text = shown(settings)
    for secret in ("sk-abcdef", "hf_1234567", "zzzzzzzz", "pass1234", "k1"):
        assert secret not in text
    assert yaml.safe_load(text) == masked(settings)
    kept = {key: masked(settings)[key] for key in ("max_tokens", "tokenizer", "return_token_id_information", "empty")}
    assert kept == {key: settings[key] for key in kept}
