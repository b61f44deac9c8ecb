"""Hydra's grammar on the command line."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.gym.config.values import GymOverride, OverrideKind
from palestra.gym.errors import GymConfigError
from tests.properties import examples


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-1_000", -1000),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", ""),
        ("'12'", "12"),
        ('"it\\"s"', 'it"s'),
        ("a b ", "a b"),
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("[a.yaml, b/c.yaml]", ["a.yaml", "b/c.yaml"]),
        ("[]", []),
        ("[1,[2,'x,y'],{a:1}]", [1, [2, "x,y"], {"a": 1}]),
        ("{a:1, b: {c: [x]}}", {"a": 1, "b": {"c": ["x"]}}),
        ("${oc.env:HOME,/tmp}", "${oc.env:HOME,/tmp}"),
        ("${inherit_from:a.b}", "${inherit_from:a.b}"),
        ("sk-a=b", "sk-a=b"),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert GymOverride.parse(f"+k={text}").value == value


@pytest.mark.parametrize("text", ["[a,b", "{a:1", "{a}", "'open", "a,b", "[a,,b]", "[,]", "${oc.env:A", "[1] 2"])
def test_mistakes_are_named(text: str) -> None:
    with pytest.raises(GymConfigError) as error:
        GymOverride.parse(f"what={text}")
    assert repr(f"what={text}") in str(error.value)


@pytest.mark.parametrize("text", ["key", "=1", "+", "~", "a b=1", "+++k=1"])
def test_what_is_no_override(text: str) -> None:
    with pytest.raises(GymConfigError, match="an override is key=value"):
        GymOverride.parse(text)


def test_ways() -> None:
    found = [GymOverride.parse(text) for text in ("a.b=1", "+a.b=1", "++a.b=1", "~a.b")]
    assert [(one.how, one.key) for one in found] == [
        (how, "a.b") for how in (OverrideKind.CHANGE, OverrideKind.ADD, OverrideKind.SET, OverrideKind.DELETE)
    ]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


def written(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(inner)}" for key, inner in value.items()) + "}"
    return repr(value) if value is not None else "null"


@examples(40)
@given(VALUES)
def test_what_is_written_is_read(value: Any) -> None:
    assert GymOverride.parse(f"k={written(value)}").value == value


@given(st.text())
def test_any_text_is_a_value_or_a_mistake(text: str) -> None:
    with suppress(GymConfigError):
        assert GymOverride.parse(f"k={text}").key == "k"
