"""The rows of `time_to_reward`: what is kept, what is done again, which learning rate counts. Nothing is trained."""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def rows() -> ModuleType:
    return importlib.import_module("peers.reward_rows")


def cell(rows: ModuleType, who: str, lr: float = 1e-3, seed: int = 0) -> Any:
    return rows.Cell(task="arithmetic", model="ephebe", device="cpu", who=who, lr=lr, seed=seed)


def point(rows: ModuleType, of: Any, step: int, success: float, seconds: float) -> Any:
    counts = {"start_s": 5.0, "sampled": step * 1000, "trained": step * 3000, "reward": success}
    return rows.Point(cell=of, step=step, success=success, train_s=seconds, **counts)


def write(rows: ModuleType, file: Path, who: str, lr: float, seed: int, seconds: float | None) -> None:
    """A cell that took so long to the goal; None: it never got there."""
    one, opened = cell(rows, who, lr, seed), rows.RowFile(file)
    opened.append(point(rows, one, 2, 0.7, 1.0))
    opened.append(point(rows, one, 4, 0.8 if seconds is None else 0.93, seconds or 9.0))
    opened.append(rows.End(cell=one, reached=seconds is not None))
    opened.close()


def test_a_cell_that_was_cut_off_is_begun_again_and_the_others_are_kept(rows: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write(rows, file, "ours", 1e-3, 0, 4.0)
    half = cell(rows, "trl")
    opened = rows.RowFile(file)
    opened.append(point(rows, half, 2, 0.6, 3.0))
    opened.close()
    with file.open("ab") as stream:
        stream.write(b'{"type": "point", "cell": {"ta')  # killed while it wrote

    again = rows.RowFile(file)
    again.close()
    assert again.is_done(cell(rows, "ours"))
    assert not again.is_done(half)
    assert rows.points_of(again.rows, half) == []
    assert len(file.read_text().splitlines()) == 3


def test_the_learning_rate_that_most_seeds_reach_the_goal_with_counts_even_if_another_was_faster_once(
    rows: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    for lr, seconds in ((1e-3, (9.0, 8.0)), (4e-3, (2.0, None))):
        for seed, taken in enumerate(seconds):
            write(rows, file, "ours", lr, seed, taken)
    found = rows.RowFile(file)
    found.close()
    assert rows.best_rate(found.rows, rows.cells_of(found.rows, who="ours")) == 1e-3
    assert rows.best_rate(found.rows, rows.cells_of(found.rows, who="trl")) is None


def test_the_table_and_the_picture_come_from_the_rows_alone(rows: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for who, seconds in (("ours", 3.0), ("trl", 12.0)):
        for seed in range(3):
            write(rows, file, who, 2e-3, seed, seconds + seed)
    found = rows.RowFile(file)
    found.close()
    benchmark, curves = importlib.import_module("time_to_reward"), importlib.import_module("peers.reward_curves")
    args = SimpleNamespace(model=Path("ephebe"), device="cpu", goal=0.9, who=["ours", "trl"])
    first, *_ = benchmark.table_rows(found, args, "arithmetic")
    assert (first.ours.median, first.peer_value.median, first.ratio) == (4.0, 13.0, 3.25)
    assert first.is_met
    curves.draw(found.rows, ["arithmetic"], 0.9, {}, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_without_trl_the_target_that_makes_it_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["time_to_reward.py", "--quick", "--trl-python", str(tmp_path / "python")])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("time_to_reward").main()
    assert ended.value.code == (
        f"error: there is no program {tmp_path / 'python'}; to make it: make trl, or leave TRL out: --who ours"
    )


def test_a_contenders_clock_stands_still_while_its_weights_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    job = importlib.import_module("peers.reward_job")
    answers = b'{"go_on": true}\n{"go_on": false}\n'

    class SlowAnswers(io.BytesIO):
        def readline(self, *_: Any) -> bytes:
            time.sleep(0.5)
            return super().readline()

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SlowAnswers(answers)))
    read, write_end = os.pipe()
    reporter = job.Reporter(write_end)
    reporter.begin()
    goes_on = [
        reporter.report(step, Path("a"), paused_at=time.monotonic(), sampled=1, trained=2, reward=0.5)
        for step in (1, 2)
    ]
    assert goes_on == [True, False]
    saved = [msgspec.json.decode(line, type=job.Saved) for line in os.read(read, 1 << 16).splitlines()]
    assert saved[1].train_s < 0.4


def test_both_contenders_are_given_the_same_tasks_in_the_same_order() -> None:
    job = importlib.import_module("peers.reward_job")
    shared = {"model": "", "device": "cpu", "lr": 1e-3, "steps": 3, "every": 1, "folder": "", "micro_batch": 8}
    one, same, other = (job.Job(task="stockroom", seed=seed, **shared).tasks() for seed in (0, 0, 1))
    assert len(one) == 48
    assert [task.id for task in one] == [task.id for task in same]
    assert [task.id for task in one] != [task.id for task in other]


def test_episodes_that_trl_plays_are_graded_and_masked_as_ours() -> None:
    from palestra.chat import ChatTokenizer
    from palestra.config.bundled import BUNDLED, EPHEBE
    from palestra.environments.bundled.stockroom_tasks import solve

    jobs, peer = importlib.import_module("peers.reward_job"), importlib.import_module("peers.trl_grpo")
    shared = {"device": "cpu", "lr": 1e-3, "steps": 1, "every": 1, "folder": "", "micro_batch": 8, "seed": 0}
    job = jobs.Job(task="stockroom", model=str(BUNDLED / EPHEBE), **shared)
    tasks, tokenizer = list(job.tasks()), ChatTokenizer.load(BUNDLED / EPHEBE)

    class PerfectPolicy:
        """Says in each turn what solves the task; the last episode is cut in its first turn."""

        def __init__(self) -> None:
            self.turn = 0

        def _generate_single_turn(self, contexts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            playing = [task for task in tasks[:4] if self.turn < len(solve(task))]
            said = [[*tokenizer.encode_text(solve(task)[self.turn]), tokenizer.turn_end] for task in playing]
            if self.turn == 0:
                said.append(tokenizer.encode_text("How"))
            assert len(said) == len(contexts)
            self.turn += 1
            return said, None

    rollouts = peer.Rollouts(job, tasks)
    prompts = [[{**message, peer.TASK: place} for message in tasks[place].prompt] for place in range(5)]
    played = rollouts(prompts, PerfectPolicy())
    assert played["episode_reward"] == [1.0, 1.0, 1.0, 1.0, 0.0]
    for task, said, mask in zip(tasks[:4], played["completion_ids"], played["env_mask"], strict=False):
        spoken = [token for token, own in zip(said, mask, strict=True) if own]
        assert tokenizer.decode(spoken) == "".join(solve(task))
        assert "Tool result: " in tokenizer.decode([token for token, own in zip(said, mask, strict=True) if not own])
    assert rollouts.sampled == sum(map(sum, played["env_mask"]))
