"""The config system: what wins over what, and errors that say where and what instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from palestra.config import Config, ConfigError, Override, dump_config, load_config


class Optim(Config):
    lr: float = 1e-4
    betas: list[float] = [0.9, 0.95]  # noqa: RUF012


class Place(Config):
    path: Path
    device: str = "cpu"


class Run(Config):
    name: str = "run"
    steps: int = 10
    optim: Optim = Optim()
    places: list[Place] = []  # noqa: RUF012
    extra: dict[str, str | float | bool | list | None] = {}  # noqa: RUF012
    password: SecretStr | None = None
    database: str = ""
    cache: bool | Literal["disk"] = False


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def problems(*args) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, *args)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def test_files_merge_left_to_right_and_overrides_win(write):
    one = write("one.yaml", "name: one\nsteps: 1\noptim:\n  lr: 2e-5\n  betas: [0.8, 0.9]\n")
    two = write("two.json", '{"name": "two", "optim": {"betas": [0.1]}}')
    config = load_config(Run, [one, two], ["steps=3", Override("steps", 4, "--steps")])
    assert (config.name, config.steps, config.optim.lr, config.optim.betas) == ("two", 4, 2e-5, [0.1])


def test_nothing_at_all_gives_the_defaults(write):
    assert load_config(Run) == load_config(Run, [write("empty.yaml", "# later\n")]) == Run()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1", 1),
        ("true", True),
        ("null", None),
        ("[1, a]", [1, "a"]),
        ("2026-01-31", "2026-01-31"),
        ("a=b", "a=b"),
        ("", None),
        ("'1'", "1"),
    ],
)
def test_values_of_overrides_are_yaml(text, value):
    got = load_config(Run, [], [f"extra.x={text}"]).extra["x"]
    assert got == value
    assert type(got) is type(value) or isinstance(value, int)


def test_overrides_reach_into_lists(write):
    file = write("a.yaml", "places: [{path: /a}, {path: /b, device: cuda}]")
    config = load_config(Run, [file], ["places.0.device=mps", "places[1].path=/c"])
    assert [(str(place.path), place.device) for place in config.places] == [("/a", "mps"), ("/c", "cuda")]
    config = load_config(Run, [file], ["places.*.device=xpu"])
    assert [place.device for place in config.places] == ["xpu", "xpu"]
    assert load_config(Run, [], ["places.*.device=xpu"]).places == []


def test_a_map_given_as_override_is_merged():
    config = load_config(Run, [], ["optim={lr: 1}", "optim={betas: [0.5]}"])
    assert config.optim == Optim(lr=1, betas=[0.5])
    config = load_config(Run, [], ["places=[{path: /a}]", "places.0={device: mps}"])
    assert config.places == [Place(path=Path("/a"), device="mps")]


def test_configs_are_frozen():
    with pytest.raises(ValidationError):
        Run().steps = 3  # type: ignore[misc]


def test_an_unknown_key_gets_file_place_and_nearest_name(write):
    file = write("a.yaml", "optim: {lrr: 1}\nplaces:\n- {path: /a, devise: cpu}\n")
    assert problems([file], ["stepps=1", "betas=[]", "zzz=1"]) == [
        f"unknown key 'optim.lrr' ({file}); did you mean optim.lr?",
        f"unknown key 'places[0].devise' ({file}); did you mean places[0].device?",
        "unknown key 'stepps' (stepps=1); did you mean steps?",
        "unknown key 'betas' (betas=[]); did you mean optim.betas?",
        "unknown key 'zzz' (zzz=1); known here: name, steps, optim, places, extra, password, database, cache",
    ]


def test_a_wrong_type_is_one_readable_line_with_its_source(write):
    file = write("a.yaml", "steps: many\nplaces: [{device: cpu}, {path: 3}]\noptim: {betas: [0.1, x]}\n")
    assert problems([file], ["name=[1]", "optim.lr=fast"]) == [
        "name should be a valid string, not [1] (name=[1])",
        f"steps should be a valid integer, not 'many' ({file})",
        "optim.lr should be a valid number, not 'fast' (optim.lr=fast)",
        f"optim.betas[1] should be a valid number, not 'x' ({file})",
        f"places[0].path is missing ({file})",
        f"places[1].path should be a path, not 3 ({file})",
    ]


def test_a_value_that_is_neither_of_two_things_is_one_line_with_both(write):
    assert problems([], ["cache=dsk"]) == ["cache should be true or false, or 'disk', not 'dsk' (cache=dsk)"]


def test_the_last_writer_of_a_key_is_the_one_named(write):
    one, two = (
        write("one.yaml", "places: [{path: /a, device: 1}]"),
        write("two.yaml", "places: [{path: /a, device: 2}]"),
    )
    assert problems([one, two], []) == [f"places[0].device should be a valid string, not 2 ({two})"]
    assert problems([one, two], ["places.0.device=3"])[0].endswith("(places.0.device=3)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "should hold keys and values, but holds a list"),
        ("a: [1\nb: 2", "not valid YAML in line 2"),
        ("steps: 1\nname: a\nsteps: 2\n", "'steps' is written twice"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_a_broken_file_is_named(write, text, message):
    file = write("a.yaml", text)
    (problem,) = problems([file])
    assert problem.startswith(f"{file}: ")
    assert message in problem


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert problems([tmp_path / "no.yaml"]) == [
        f"{tmp_path}/no.yaml: cannot be read as a config (No such file or directory)"
    ]
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\xff")
    assert "not text in UTF-8" in problems([tmp_path / "b.yaml"])[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps': an override is key=value, as in port=8001"),
        ("=1", "'=1': an override is key=value, as in port=8001"),
        ("places.2.device=x", "no '2' in places, which has 1 entries, counted from 0 (places.2.device=x)"),
        ("places.x=1", "no 'x' in places, which has 1 entries, counted from 0 (places.x=1)"),
        ("name.x=1", "name is 'a', so no key can be set inside it (name.x=1)"),
        ("optim={", "optim={: not valid YAML (expected the node content, but found '<stream end>')"),
    ],
)
def test_a_bad_override_says_why(write, override, message):
    assert problems([write("a.yaml", "name: a\nplaces: [{path: /a}]")], [override]) == [message]


@given(
    st.recursive(
        st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.text(max_size=3), inner), max_leaves=8
    )
)
def test_no_content_of_a_file_makes_a_traceback(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("c") / "a.yaml"
    file.write_text(json.dumps({"optim": content, "name": content}))
    with pytest.raises(ConfigError):
        load_config(Run, [file], ["unknown=1"])


def test_a_dump_loads_again_and_hides_secrets(write):
    config = load_config(
        Run, [], ["password=hunter2", "database=postgresql://me:hunter3@db/x", "extra.api_key=hunter4", "steps=2"]
    )
    text = dump_config(config)
    assert "hunter" not in text
    assert load_config(Run, [write("again.json", text)]).steps == 2
    assert json.loads(text)["database"] == "postgresql://me:[redacted]@db/x"
