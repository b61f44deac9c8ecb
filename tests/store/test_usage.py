"""Usage is added up by whatever one asks for; the log gives back what the database lacks, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from palestra.store import Store
from palestra.store.queries.usage import UsageGrouping, add_usage, read_usage, tokens_of_day
from palestra.store.records import UsageCounts, UsageKey
from palestra.store.usage_log import UsageEntry, UsageLog

G = UsageGrouping


def counts(n: int) -> UsageCounts:
    return UsageCounts(prompts=1, prompt_tokens=n, sampled_tokens=2 * n, trained_tokens=3 * n, engine_s=0.5)


def test_usage_is_added_up_by_owner_run_and_day(tables_store: Store) -> None:
    for day, owner, run, n in (("1", "a", "x", 1), ("1", "a", "y", 10), ("2", "a", "x", 100), ("2", "b", "z", 1000)):
        key = UsageKey(f"2026-01-0{day}", owner, run)
        for _ in range(2):
            tables_store.write_now(lambda c, key=key, n=n: add_usage(c, {key: counts(n)}))

    def read(*by: UsageGrouping, **where: str) -> dict[tuple[str, ...], int]:
        found = tables_store.read_now(lambda c: read_usage(c, by, **where))
        assert all((one.sampled_tokens, one.tokens) == (2 * one.prompt_tokens, 6 * one.prompt_tokens) for one in found)
        assert all(type(one.prompts) is int and one.engine_s == one.prompts / 2 for one in found)
        return {tuple(getattr(one, name) for name in by): one.prompt_tokens for one in found}

    assert read(G.OWNER) == {("a",): 222, ("b",): 2000}
    assert read(G.DAY) == {("2026-01-01",): 22, ("2026-01-02",): 2200}
    assert read(G.RUN, owner="a") == {("x",): 202, ("y",): 20}
    assert read(G.DAY, G.RUN, since="2026-01-02") == {("2026-01-02", "x"): 200, ("2026-01-02", "z"): 2000}
    assert read(G.OWNER, until="2026-01-01") == {("a",): 22}
    assert tables_store.read_now(lambda c: tokens_of_day(c, "2026-01-02")) == {"a": 1200, "b": 12000}


def entry(n: int) -> UsageEntry:
    return UsageEntry(UsageKey("2026-01-01", "a", "x"), counts(n), "x", n)


def test_the_log_gives_back_what_came_after_a_position(tmp_path: Path) -> None:
    log = UsageLog(tmp_path / "usage.log")
    log.append(entry(1))
    middle = log.position
    log.append(entry(2))
    log.close()
    with (tmp_path / "usage.log").open("ab") as file:
        file.write(b"00000000 {half of a li")  # it was killed in the middle of a line
    again = UsageLog(tmp_path / "usage.log")
    again.append(entry(3))
    assert [one.seq_id for one in again.after(None)] == [1, 2, 3]
    assert [one.seq_id for one in again.after(middle)] == [2, 3]
    assert list(again.after(again.position)) == []
    assert next(again.after(middle)) == entry(2)


def test_a_long_log_starts_anew_with_what_is_not_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("palestra.store.usage_log.MAX_BYTES", 100)
    log = UsageLog(tmp_path / "usage.log")
    log.append(entry(1))
    log.append(entry(2))
    written = log.position
    log.append(entry(3))
    log.forget(written)
    log.append(entry(4))
    log.close()
    assert [one.seq_id for one in UsageLog(tmp_path / "usage.log").after(written)] == [3, 4]


def test_a_log_that_cannot_start_anew_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("palestra.store.usage_log.MAX_BYTES", 100)
    log = UsageLog(tmp_path / "usage.log")
    log.append(entry(1))
    in_the_way = tmp_path / f".usage.log.{os.getpid()}.partial"
    in_the_way.mkdir()
    with pytest.raises(IsADirectoryError):
        log.forget(log.position)
    log.append(entry(2))
    written = log.position
    log.append(entry(3))
    log.close()
    assert [one.seq_id for one in UsageLog(tmp_path / "usage.log").after(written)] == [3]
