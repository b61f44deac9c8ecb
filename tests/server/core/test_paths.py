"""Ids and checkpoint paths say what they name, both ways."""

from __future__ import annotations

from string import ascii_letters, digits

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.types.checkpoint import ParsedCheckpointTinkerPath

from palestra.server.core.paths import (
    MAX_SEQ,
    ModelId,
    SampleRequestId,
    SamplerId,
    TinkerPath,
    TrainRequestId,
    parse_request_id,
)
from palestra.server.core.wire_errors import WireError
from palestra.server.tinker.rest_objects import REST_TYPES
from palestra.store.records import CheckpointKind

words = st.text(f"{ascii_letters}{digits}_-", min_size=1, max_size=64)
names = st.text(f"{ascii_letters}{digits}._-", min_size=1, max_size=128).filter(lambda n: n not in (".", ".."))
numbers = st.integers(0, MAX_SEQ)
models = st.builds(ModelId, words, numbers)
samplers = st.builds(SamplerId, words, numbers)


@given(models.map(str), st.sampled_from(CheckpointKind), names)
def test_a_path_is_read_back_by_us_and_by_the_sdk(model_id: str, kind: CheckpointKind, name: str) -> None:
    path = TinkerPath(model_id, kind, name)
    assert TinkerPath.parse(str(path)) == path
    theirs = ParsedCheckpointTinkerPath.from_tinker_path(str(path))
    assert theirs.training_run_id == model_id
    assert theirs.checkpoint_id == path.checkpoint_id
    assert theirs.checkpoint_type == REST_TYPES[kind]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker://",
        "tinker://m/weights",
        "tinker://m/weights/a/b",
        "tinker://m/archive/a",
        "tinker:///weights/a",
        "tinker://../weights/a",
        "tinker://m/weights/",
        "tinker://m/weights/.",
        "tinker://m/weights/..",
        "tinker://m/weights/a b",
        "tinker://m/weights/a\n",
        "tinker://m/weights/ä",
        "tinker://m\0/weights/a",
        "tinker://m/weights/" + "a" * 129,
        "http://m/weights/a",
        "weights/a",
    ],
)
def test_other_texts_are_not_paths(text: str) -> None:
    with pytest.raises(WireError) as caught:
        TinkerPath.parse(text)
    assert "\n" not in str(caught.value)


@given(models, samplers)
def test_ids_are_read_back(model: ModelId, sampler: SamplerId) -> None:
    assert ModelId.parse(str(model)) == model
    assert SamplerId.parse(str(sampler)) == sampler


@pytest.mark.parametrize(
    "text", ["", "s", "s:train:", "s:train:01", "s:train:-1", f"s:train:{MAX_SEQ + 1}", "a:b:train:0"]
)
def test_other_texts_are_not_model_ids(text: str) -> None:
    with pytest.raises(WireError):
        ModelId.parse(text)


@given(models.map(str), words, samplers.map(str), numbers)
def test_a_request_id_shows_what_it_asked_for(model_id: str, boot: str, sampler_id: str, seq_id: int) -> None:
    train, sample = TrainRequestId(model_id, seq_id), SampleRequestId(boot, sampler_id, seq_id)
    assert parse_request_id(str(train)) == train
    assert parse_request_id(str(sample)) == sample


def test_sequences_of_a_sample_have_names_of_their_own() -> None:
    ids = SampleRequestId("b", "s:sample:0", 3).sequence_ids(2)
    assert ids == ["sample:b:s:sample:0:3:0", "sample:b:s:sample:0:3:1"]
    assert parse_request_id(ids[0]) is None


@given(st.text() | st.from_regex(r"(train|sample):[a-z:0-9]*"))
def test_any_text_is_a_request_id_or_none(text: str) -> None:
    found = parse_request_id(text)
    assert found is None or str(found) == text


def test_numbers_beyond_int64_are_no_ids() -> None:
    assert parse_request_id(f"train:s:train:0:{MAX_SEQ}") is not None
    assert parse_request_id(f"train:s:train:0:{MAX_SEQ + 1}") is None
