"""Values, ranges and distributions on the command line become the settings of runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config import ConfigError
from palestra.sweeps.settings import expand, parse_choice, split_overrides
from tests.properties import examples


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", [1e-4, 3e-4]),
        ("0..3", [0, 1, 2, 3]),
        ("3..1", [3, 2, 1]),
        ("0..1,8", [0, 1, 8]),
        ("ppo,cispo", ["ppo", "cispo"]),
        ("[[1, 2], [3]]", [[[1, 2], [3]]]),
        ("null,true", [None, True]),
    ],
)
def test_a_text_is_a_list_of_values(text, values):
    assert parse_choice("key", text) == values


def test_settings_with_one_value_stay_settings_of_all_runs():
    one = ["steps=3", "environments=[{name: a, weight: 2}]", "alias=null", "model.name=a..b", "prompt='a,b'"]
    many = {"optimizer.lr": "loguniform(1e-5,1e-3)", "seed": "0..7", "rollout.group_size": "4,8"}
    assert split_overrides([*one, *(f"{key}={value}" for key, value in many.items())]) == (many, one)


def test_a_grid_has_every_combination_and_seeds_of_a_setting_are_neighbours():
    grid = expand({"seed": "0..1", "a": "1,2", "b": ["x", "y"]}, None, 0)
    assert [tuple(one.values()) for one in grid[:3]] == [(1, "x", 0), (1, "x", 1), (1, "y", 0)]
    assert len({str(one) for one in grid}) == 8


@given(count=st.integers(1, 20), seed=st.integers(0, 9), more=st.integers(0, 5))
@examples(40)
def test_draws_stay_the_same_when_more_are_drawn(count, seed, more):
    vary = {"lr": "loguniform(1e-5,1e-3)", "n": "randint(1,8)", "x": "uniform(0,1)", "kind": "a,b", "seed": "0..1"}
    drawn = expand(vary, count, seed)
    assert drawn == expand(vary, count + more, seed)[: len(drawn)]
    assert len(drawn) == 2 * count
    assert all(1e-5 <= one["lr"] <= 1e-3 and 1 <= one["n"] <= 8 and 0 <= one["x"] <= 1 for one in drawn)


def test_no_setting_is_drawn_twice_and_no_more_than_there_are():
    assert sorted(one["a"] for one in expand({"a": "1..5"}, 9, 0)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ({"lr": "loguniform(0,1)"}, "above 0"),
        ({"lr": "uniform(2,1)"}, "lower one first"),
        ({"lr": "uniform(a,1)"}, "two numbers"),
        ({"lr": "uniform(0,1)"}, "--sample 16"),
        ({"seed": "randint(0,9)"}, "seed=0..7"),
        ({"lr": "1,1"}, "twice"),
        ({"lr": []}, "no values"),
    ],
)
def test_what_cannot_be_varied_is_said(vary, said):
    with pytest.raises(ConfigError, match=said):
        expand(vary, None, 0)
