"""Splits have exact sizes, keep groups together and depend on the seed alone."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.data.errors import DatasetError
from palestra.data.splitting import _subset, by_field, by_prompt, split_dataset


@pytest.fixture
def dataset(tmp_path):
    def write(*rows: dict) -> str:
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_row_is_in_one_part_in_its_order(dataset, tmp_path):
    source = dataset(*({"prompt": f"q{n}", "n": n} for n in range(100)))
    written = split_dataset(source, {"eval": 20, "test": 0.1}, tmp_path / "out", group=None, seed=3)
    assert written == {"train": 70, "eval": 20, "test": 10}
    parts = {name: [row["n"] for row in read(tmp_path / "out" / f"{name}.jsonl")] for name in written}
    assert sorted(number for part in parts.values() for number in part) == list(range(100))
    assert all(part == sorted(part) for part in parts.values())
    split_dataset(source, {"eval": 20, "test": 0.1}, tmp_path / "same", group=None, seed=3)
    split_dataset(source, {"eval": 20, "test": 0.1}, tmp_path / "other", group=None, seed=4)
    same, other = (read(tmp_path / name / "eval.jsonl") for name in ("same", "other"))
    assert [row["n"] for row in same] == parts["eval"] != [row["n"] for row in other]


def test_copies_of_a_question_stay_together(dataset, tmp_path):
    ask = [{"role": "user", "content": "q1"}]
    rows = [
        {"prompt": "q1", "completion": "a"},
        {"prompt": ask, "completion": "b"},
        {"messages": [*ask, {"role": "assistant", "content": "c"}]},
        {"prompt": "q1", "chosen": "d", "rejected": "e"},
    ]
    assert len({json.dumps(by_prompt(row)) for row in rows}) == 1
    split_dataset(dataset(*rows, {"prompt": "q2"}), {"eval": 1}, tmp_path / "out", group=by_prompt, seed=0)
    assert read(tmp_path / "out" / "eval.jsonl") == [{"prompt": "q2"}]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(1, 30), st.integers(0, 99))
def test_groups_are_never_divided_and_sizes_are_exact(groups, count, seed):
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "data.jsonl"
        source.write_text("".join(json.dumps({"meta": {"user": group}}) + "\n" for group in groups))
        sizes = Counter(groups)
        reachable = {0}
        for size in sizes.values():
            reachable |= {one + size for one in reachable}
        try:
            written = split_dataset(source, {"eval": count}, folder / "out", group=by_field("meta.user"), seed=seed)
        except DatasetError:
            written = None
        assert (written is not None) == (count in reachable)
        if written is None:
            return
        parts = [{row["meta"]["user"] for row in read(folder / "out" / f"{name}.jsonl")} for name in written]
        assert written["eval"] == count
        assert not parts[0] & parts[1]


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 60))
def test_subset_has_the_sum(sizes, total):
    try:
        found = _subset(range(len(sizes)), sizes, total, "eval")
    except DatasetError:
        return
    assert len(found) == len(set(found))
    assert sum(sizes[one] for one in found) == total


def test_what_cannot_be_split_is_said(dataset, tmp_path):
    source = dataset({"prompt": "a", "user": 1}, {"prompt": "b", "user": 1}, {"prompt": "c"})
    for sizes, group, said in [
        ({"eval": 4}, None, "4 rows are asked for, but there are 3"),
        ({"eval": 1}, by_field("user"), r"line 3: no field 'user' to group by \(it has 'prompt'\)"),
    ]:
        with pytest.raises(DatasetError, match=said):
            split_dataset(source, sizes, tmp_path / "out", group=group, seed=0)
    pairs = dataset(*({"user": n // 2} for n in range(6)))
    with pytest.raises(DatasetError, match="no groups have 3 rows together, for eval; the nearest below is 2"):
        split_dataset(pairs, {"eval": 3}, tmp_path / "out", group=by_field("user"), seed=0)
