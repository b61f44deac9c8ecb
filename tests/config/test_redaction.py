"""A mask: secrets always, and what is named, wherever it is in a JSON value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.redaction import REDACTED, Mask
from palestra.types.episodes import EpisodeResult, EpisodeState

KEY = "tml-0123456789abcdef"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def texts(value: Any) -> str:
    return repr(value)


def test_keys_are_blacked_out_without_being_asked_for():
    masked = Mask().of({"tool": [f"curl -H 'X-API-Key: {KEY}'"], KEY: 1, "api_key": ["any", "thing"], "key": "kept"})
    assert KEY not in texts(masked)
    assert (masked["api_key"], masked["key"], masked[REDACTED]) == (REDACTED, "kept", 1)


@pytest.mark.parametrize(
    "key",
    ["sk-proj-abcdefghijklmnop0123456789", "hf_abcdefghijklmnopqrstuvwxyz", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"],
)
def test_keys_of_others_are_known_by_their_looks(key: str):
    assert Mask().of(f"with {key}, and go on") == f"with {REDACTED}, and go on"


@pytest.mark.parametrize("text", ["sk-learn-is-a-library-without-numbers", "task-1234567890123456789012345", "hf_hub"])
def test_what_only_looks_a_little_like_a_key_stays(text: str):
    assert Mask().of(text) == text


@pytest.mark.parametrize(
    "text", ["there are: api_key, model_name, base_url", "unknown key 'x'; there are: password, name", "secret, key"]
)
def test_a_list_of_names_stays(text: str):
    assert Mask().of(text) == text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("(b'x-api-key', b'sesame')", "(b'x-api-key', b'[redacted]')"),
        ("authorization, Bearer open-sesame", "authorization, Bearer [redacted]"),
        ("password, 1234-open-sesame", "password, [redacted]"),
        ("api_key: sesame, base_url: here", "api_key: [redacted], base_url: here"),
    ],
)
def test_what_follows_a_secret_name_is_secret_where_it_is_a_value(text: str, masked: str):
    assert Mask().of(text) == masked


SECRET_NAMES = ["password", "db_password", "passwd", "X-Api-Key", "Authorization", "client-secret", "private_key"]


@pytest.mark.parametrize("name", [*SECRET_NAMES, "aws_secret_access_key", "access_token"])
def test_a_field_whose_name_says_so_is_secret_whatever_it_holds(name: str):
    assert Mask().of({name: "sesame"}) == {name: REDACTED}
    assert Mask().of({name: {"nested": "sesame"}}) == {name: REDACTED}
    assert Mask().of({name: None}) == {name: None}


def test_a_measure_is_no_secret_whatever_its_name():
    assert Mask().of({"found_secret": 0.5, "has_password": True}) == {"found_secret": 0.5, "has_password": True}
    assert Mask().of({"password": 1234}) == {"password": REDACTED}


def test_names_and_states_of_a_record_stay():
    result = EpisodeResult(reward=1.0, metadata={"reward": "reward"})
    assert Mask(["reward"]).of(result) == EpisodeResult(reward=1.0, metadata={REDACTED: REDACTED})
    assert Mask(["ended"]).of([EpisodeState.ENDED, "ended"]) == [EpisodeState.ENDED, REDACTED]


def test_what_a_pattern_matches_is_blacked_out_everywhere():
    mask = Mask([r"\d{3}-\d{4}", "(?i)alice"])
    response = mask.of({"said": "ALICE: call 555-0123 or 555-0124", "to": ["alice"], "n": 5550123})
    assert response == {"said": f"{REDACTED}: call {REDACTED} or {REDACTED}", "to": [REDACTED], "n": 5550123}


@given(VALUES)
def test_the_shape_stays_and_what_is_harmless_too(value: Any):
    masked = Mask(["never said"]).of(value)
    assert type(masked) is type(value)
    if isinstance(value, list):
        assert len(masked) == len(value)
    if not isinstance(value, str | list | dict):
        assert masked == value
    assert Mask(["never said"]).of(masked) == masked


@given(VALUES, st.text(min_size=1, max_size=3))
def test_nothing_that_a_pattern_matches_is_left(value: Any, inside: str):
    masked = Mask(["SENTINEL[0-9]+"]).of({"value": value, "text": f"{inside}SENTINEL42{inside}", "list": ["SENTINEL1"]})
    assert "SENTINEL4" not in texts(masked)
    assert masked["list"] == [REDACTED]
