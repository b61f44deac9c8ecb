"""SFT runs learn what the assistant says, and go on after a resume as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from palestra.chat import ChatTokenizer
from palestra.config.bundled import BUNDLED
from palestra.config.train import RunConfig, SftConfig, load_train_config
from palestra.data.errors import DatasetError
from palestra.runs.listener import Silence
from palestra.runs.reader import RunStatus
from palestra.runs.record_files import read_lines
from palestra.runs.writer import RunFolder
from palestra.training.launch import train
from palestra.training.loops.sft import check_sft, loss_per_token, weigh
from palestra.types.rollouts import TrainSequence

EXAMPLES = Path(__file__).parents[3] / "examples"
FAST = ("optimizer.lr=4e-3", "optimizer.warmup_steps=0")


class Told(Silence):
    """Remembers what a person would have seen."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evals: list[int] = []
        self.stages: set[str] = set()

    def stage(self, stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.stages.add(stage)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        self.evals.append(step)


def load(name: str, *overrides: str, **paths: Path) -> RunConfig:
    given = [f"{key}={value}" for key, value in paths.items()]
    return load_train_config([EXAMPLES / name], [*given, *overrides])


def run(config: RunConfig, folder: RunFolder, listener: Silence | None = None) -> dict[str, Any]:
    with folder:
        return asyncio.run(train(config, folder, listener or Told()))


def start(config: RunConfig, tmp_path: Path, listener: Silence | None = None) -> tuple[RunFolder, dict[str, Any]]:
    folder = RunFolder.create(tmp_path, "first", config)
    return folder, run(config, folder, listener)


def an_sft_config(server: str, *overrides: str) -> RunConfig:
    data = EXAMPLES / "data"
    paths = {"data": data / "sums.jsonl", "eval_data": data / "sums-eval.jsonl"}
    return load("sft.yaml", f"server={server}", "batch_size=8", *overrides, **paths)


def test_a_run_learns_and_says_so(ephebe_url, tmp_path):
    config, response = an_sft_config(ephebe_url, "steps=8", "eval_every=4", *FAST), Told()
    folder, summary = start(config, tmp_path, response)
    rows = folder.read_metrics()
    assert summary["status"] == RunStatus.DONE
    assert [row["step"] for row in rows] == list(range(9))
    assert rows[-1]["loss/mean"] < rows[1]["loss/mean"] / 2
    assert rows[8]["eval/loss"] < rows[0]["eval/loss"] / 2
    assert {row["step"] for row in rows if "eval/loss" in row} == {0, 4, 8}
    assert rows[1]["loss/mean"] == pytest.approx(rows[0]["eval/loss"], rel=0.7)  # per token, both
    assert (response.steps, response.evals) == (list(range(1, 9)), [0, 4, 8])
    assert response.stages == {"start", "collect", "update", "eval", "save", "end"}
    first = rows[1]
    assert (first["batch/sequences"], first["batch/skipped"], first["batch/truncated"]) == (8, 0, 0)
    assert 0 < first["batch/trained_tokens"] < first["batch/tokens"]
    assert first["data/epoch"] == 8 / 64
    assert rows[-1]["optim/lr"] < first["optim/lr"] == 4e-3
    assert {"time/collect_s", "time/update_s", "time/total_s", "throughput/update_tokens_per_s"} <= first.keys()


def test_a_resumed_run_repeats_the_steps_it_lost(ephebe_url, tmp_path):
    config = an_sft_config(ephebe_url, "steps=4", "checkpoint.every=2", "eval_every=0")
    folder, _ = start(config, tmp_path)
    (folder.path / "checkpoints" / "step_000004.json").unlink()  # as if killed before it was written
    response = Told()
    run(config, RunFolder.open(folder.path), response)
    losses = {1: {}, 2: {}}
    for row in read_lines(folder.metrics_file):
        losses[row["attempt"]][row["step"]] = row["loss/mean"], row["data/epoch"], row["optim/lr"]
    assert response.steps == [3, 4]
    assert losses[2] == {step: pytest.approx(losses[1][step], rel=1e-6) for step in (3, 4)}


def test_rows_with_nothing_to_learn_are_passed_over_and_counted(ephebe_url, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Hello?"}]}] * 3
    rows += [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day. " * 50}]}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    config = load(
        "sft.yaml", f"server={ephebe_url}", "batch_size=2", "steps=1", "eval_data=null", "max_sequence_length=32",
        data=data,
    )  # fmt: skip
    folder, _ = start(config, tmp_path / "runs")
    (row,) = folder.read_metrics()
    assert row["batch/sequences"] == row["batch/truncated"] == 2
    assert row["batch/tokens"] == 64
    assert row["batch/skipped"] == row["data/epoch"] * 4 - 2 >= 3


def test_the_shipped_example_is_in_order(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = load("sft.yaml")
    assert isinstance(config, SftConfig)
    check_sft(config, ChatTokenizer.load(BUNDLED / "ephebe"))


@pytest.mark.parametrize("key", ["data", "eval_data"])
def test_bad_data_is_found_before_a_run_begins(tmp_path, key):
    tokenizer = ChatTokenizer.load(BUNDLED / "ephebe")
    good, bad = EXAMPLES / "data" / "sums.jsonl", tmp_path / "bad.jsonl"
    bad.write_text(good.read_text() + '{"messages": [{"role": "robot", "content": "Hi"}]}\n')
    config = load("sft.yaml", **{"data": good, "eval_data": good, key: bad})
    assert isinstance(config, SftConfig)
    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 65: messages\[0\]: unknown role 'robot'"):
        check_sft(config, tokenizer)


def test_what_a_template_refuses_is_named_by_its_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "assistant", "content": null, "tool_calls": [3]}]}\n')
    config = load("sft.yaml", "eval_data=null", data=bad)
    assert isinstance(config, SftConfig)
    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 1: the chat template of .* refuses a conversation"):
        check_sft(config, ChatTokenizer.load(BUNDLED / "ephebe"))


def test_weights_make_the_sum_a_mean_over_learned_tokens():
    batch = [
        TrainSequence(tokens=[1, 2, 3], mask=[False, True, True], logprobs=[0.0] * 3, advantages=[0.0] * 3),
        TrainSequence(tokens=[1, 2], mask=[False, True], logprobs=[0.0] * 2, advantages=[0.0] * 2),
    ]
    weigh(batch)
    assert [sequence.advantages for sequence in batch] == [[0, 1 / 3, 1 / 3], [0, 1 / 3]]
    assert loss_per_token(batch, [[-1.0, -2.0], [-3.0]]) == 2.0
