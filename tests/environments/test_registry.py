from __future__ import annotations

import copy
import sys

import pytest

from palestra.environments import BaseTextEnv, UnknownEnvironment, deregister, make, register, registry, spec
from palestra.environments.registry import EnvConfig


class Simple(BaseTextEnv):
    def __init__(self, env_config, extras=None, flavour="plain", seen=None):
        super().__init__(env_config, extras)
        self.flavour, self.seen = flavour, seen


@pytest.fixture(autouse=True)
def _as_before():
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


def test_registered_environments_are_made_with_their_arguments():
    register("simple", Simple, kwargs={"flavour": "sweet", "seen": []})
    env = make("simple", env_config={"a": 1}, extras={"answer": 4})
    assert (env.env_config, env.extras, env.flavour) == ({"a": 1}, {"answer": 4}, "sweet")
    assert env.spec is spec("simple")
    env.seen.append("mine")
    assert make("simple", env_config={}).seen == []
    assert make("simple", env_config={}, flavour="sour").flavour == "sour"
    deregister("simple")
    with pytest.raises(UnknownEnvironment):
        make("simple", env_config={})


def test_the_bundled_ones_are_there():
    assert {"arithmetic", "stockroom"} <= registry.keys()
    assert type(make("arithmetic", extras={"answer": 1})).__name__ == "Arithmetic"


def test_a_class_is_found_by_its_path_also_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_envs_here.py").write_text(
        "class Mine:\n"
        "    def __init__(self, env_config, extras): self.extras = extras\n"
        "    def init(self, prompt): return prompt, {}\n"
        "    def step(self, action): return {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    env = make("my_envs_here:Mine", env_config={}, extras={"a": 1})
    assert env.extras == {"a": 1}
    assert env.spec.id == "my_envs_here:Mine"
    with pytest.raises(UnknownEnvironment, match=r"no class 'Mein' in .*my_envs_here.py\n  did you mean: Mine\?"):
        make("my_envs_here:Mein")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aritmetic", r"unknown environment 'aritmetic'\n  did you mean: arithmetic\?\n  see all: palestra env list"),
        ("zzz", r"unknown environment 'zzz'\n  see all: palestra env list"),
        ("", "unknown environment ''"),
        ("no_such_module:Env", "no module 'no_such_module' here\n  its folder should be the current one"),
        ("palestra.environments.nothing:Env", "no module 'palestra.environments.nothing'"),
        ("palestra.environments:Nothing", "no class 'Nothing'"),
        ("palestra.environments:__doc__", "no class '__doc__'"),
        (":Env", "is not a module name"),
        ("..:Env", "is not a module name"),
        ("palestra.environments:", "no class ''"),
    ],
)
def test_unknown_names_say_what_to_do(name, message):
    with pytest.raises(UnknownEnvironment, match=message):
        make(name)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nclass Env(:\n", r"raised SyntaxError: .*{file}:2\)"),
        ("x = 1\ny = 1 / 0\n", r"raised ZeroDivisionError: division by zero \(.*{file}:2\)"),
        ("raise ValueError('no key')\n", r"raised ValueError: no key \(.*{file}:1\)"),
        ("import sys\nsys.exit(3)\n", r"raised SystemExit: 3 \(.*{file}:2\)"),
        ("from palestra import nobody_here\n", r"raised ImportError: .*\(.*{file}:1\)"),
    ],
)
def test_a_module_with_a_mistake_is_one_line_with_the_place(tmp_path, monkeypatch, code, message):
    (tmp_path / "broken_env.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(
        UnknownEnvironment,
        match=r"environment 'broken_env:Env': importing broken_env " + message.format(file="broken_env.py"),
    ) as caught:
        make("broken_env:Env")
    assert "\n" not in str(caught.value)


def test_a_folder_has_no_class(tmp_path, monkeypatch):
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UnknownEnvironment, match="no class 'Env' in only_a_folder"):
        make("only_a_folder:Env")


def test_skyrl_gym_has_to_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(
        UnknownEnvironment, match="'skyrl_gym:gsm8k' needs skyrl_gym; to install: pip install skyrl-gym"
    ):
        make("skyrl_gym:gsm8k")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("arithmetic", Simple), "already registered; to replace it: deregister"),
        (("a:b", Simple), "cannot be called 'a:b'"),
        (("", Simple), "cannot be called ''"),
        (("x", None), "entry point of 'x'"),
        (("x", "no_colon"), "entry point of 'x'"),
    ],
)
def test_what_cannot_be_registered(args, message):
    with pytest.raises(ValueError, match=message):
        register(*args)
    with pytest.raises(UnknownEnvironment):
        deregister("nobody")


def test_wrong_arguments_name_the_environment_and_hide_their_values():
    register("simple", Simple)
    with pytest.raises(TypeError, match="environment 'simple', made with the arguments env_config, api_key:") as caught:
        make("simple", env_config={}, api_key="secret")
    assert "secret" not in str(caught.value)


def test_what_has_no_step_is_no_environment():
    register("text", str)
    with pytest.raises(TypeError, match="'text' is a str, which has no init"):
        make("text")


def test_an_env_config_is_read_by_key_or_attribute():
    config = EnvConfig({"db_path": "/data", "server": {"host": "x"}})
    assert copy.deepcopy(config).server.host == "x"
    assert config.db_path == config["db_path"] == config.get("db_path") == "/data"
    assert config == {"db_path": "/data", "server": {"host": "x"}}
    with pytest.raises(AttributeError, match=r"no 'topk'; to set it: environments\[\].config.topk"):
        _ = config.topk
