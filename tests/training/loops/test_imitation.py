"""A GRPO run that imitates solutions first, and one whose groups teach nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.config import ConfigError
from palestra.config.train import load_train_config
from palestra.runs.listener import Silence
from palestra.runs.reader import RunReader, RunStatus
from palestra.training.launch import check
from tests.training.trainers import finish, kill, start, wait_for_steps

SOLUTIONS = "platform:keys?difficulty=0a&count=8"
KEYS = {"name": "fleet_task", "config": {"tasks_file": "platform:keys?difficulty=0a", "prompt_style": "compact"}}
SUMS = Path(__file__).parents[3] / "examples" / "data" / "sums.jsonl"
SCRIPTED = "tests.training.scripted:ScriptedEnv"


class Notes(Silence):
    """Remembers what a person would have read."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def settings(**imitation: Any) -> dict[str, Any]:
    """Of a run that imitates for a few steps."""
    imitation = {"data": [SOLUTIONS], "steps": 2, "batch_size": 1, "optimizer": {"lr": 5e-3}} | imitation
    rollout = {"group_size": 2, "groups_per_step": 1, "max_tokens": 8, "endings": {"length": "grade"}}
    data = {"zero_variance": "keep"}
    return {"environments": [KEYS], "imitation": imitation, "rollout": rollout, "data": data, "steps": 1}


def test_a_run_learns_from_solutions_before_its_first_step(run_training, tmp_path: Path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "2 + 2?\u2028", "completion": "4"}\n\n', encoding="utf-8-sig")  # one line of JSONL
    listener = Notes()
    run = run_training("warm", listener, **settings(data=[SOLUTIONS, str(own)]))
    within = RunReader(run.path / "imitation")
    assert within.status() is RunStatus.DONE
    assert [row["step"] for row in within.read_metrics()] == [1, 2]
    lines = (within.path / "data.jsonl").read_bytes().splitlines()
    assert [len(json.loads(line).get("messages", [])) for line in lines] == [5] * 8 + [0]
    assert [note[: note.index("  ")] for note in listener.notes if note.startswith("imitation step")] == [
        "imitation step 1/2",
        "imitation step 2/2",
    ]
    (event,) = [event for event in run.read_events() if event["event"] == "imitated"]
    assert (event["steps"], event["address"][:9]) == (2, "tinker://")
    (row,) = run.read_metrics()  # its own first step, by weights that are the base model's no more
    assert row["step"] == 1
    assert abs(row["kl/base"]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": ["platform:kyes"]}, "kyes"),
        ({"data": ["no-such.jsonl"]}, "no-such.jsonl"),
        ({"data": ["bad.jsonl"]}, "bad.jsonl, line 2: .*unknown role 'asistant'; did you mean assistant"),
        ({"environments": [{"name": "arithmetic"}]}, "needs the environment fleet_task"),
    ],
)
def test_what_cannot_be_imitated_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
):
    monkeypatch.chdir(tmp_path)
    rows = [[{"role": "user", "content": "?"}, {"role": role, "content": "!"}] for role in ("assistant", "asistant")]
    Path("bad.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    saved = settings()
    saved["imitation"] |= {key: value for key, value in changes.items() if key == "data"}
    saved |= {key: value for key, value in changes.items() if key != "data"}
    with pytest.raises(ValueError, match=said):
        check(load_train_config([], [], saved))


def test_a_setting_of_imitation_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"imitation.batchsize.*did you mean imitation.batch_size"):
        load_train_config([], [], settings(batchsize=3))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["imitation", "grpo"])
def test_killed_in_either_stage_it_resumes_on_the_undisturbed_curve(tmp_path: Path, stage: str):
    """Trainer and server both die: what was imitated is on the disk."""
    rollout = {"group_size": 8, "groups_per_step": 4, "max_tokens": 48, "max_context": 256}
    sums = {"data": [str(SUMS)], "steps": 6, "batch_size": 4, "optimizer": {"lr": 1e-3}}  # GRPO must have some left
    saved = settings(**sums) | {"environments": [{"name": "arithmetic"}], "steps": 4}
    saved |= {"rollout": rollout, "optimizer": {"lr": 2e-3}, "eval": {"every": 0}, "checkpoint": {"every": 2}}
    (tmp_path / "run.json").write_text(json.dumps(saved))
    finish(start(tmp_path, "run.json", "--name", "whole"))
    process = start(tmp_path, "run.json", "--name", "cut")
    wait_for_steps(tmp_path, "cut/imitation" if stage == "imitation" else "cut", 3, process)
    kill(process)
    said = finish(start(tmp_path, "--resume", "cut")).splitlines()
    assert ("imitation: continuing after step 2" in said) == (stage == "imitation")
    assert ("continuing after step 2" in said) == (stage == "grpo")
    for part in ("imitation", "."):
        whole, cut = (curve(tmp_path / "runs" / name / part) for name in ("whole", "cut"))
        assert cut == pytest.approx(whole, rel=1e-4, abs=1e-6)  # others in a batch move the last bits
        assert all(whole[1::2])


def curve(run: Path) -> list[float]:
    """The loss and the norm of the gradient of each step."""
    rows = RunReader(run).read_metrics()
    return [number for row in rows for number in (row.get("loss/mean", row.get("loss/sum")), row["optim/grad_norm"])]


# Groups that teach nothing


def test_a_run_whose_first_groups_teach_nothing_says_what_to_do(run_training, tmp_path: Path):
    task = {"prompt": [{"role": "user", "content": "?"}], "steps": [{"reward": 0.0, "done": True}]}
    (tasks := tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    listener = Notes()
    run = run_training(
        "barren",
        listener,
        environments=[{"name": SCRIPTED, "tasks": str(tasks)}],
        rollout={"group_size": 2, "groups_per_step": 1, "max_tokens": 4, "endings": {"length": "grade"}},
        data={"zero_variance": "drop"},
        steps=2,
    )
    (note,) = [note for note in listener.notes if "has nothing to train on" in note]  # once, not at every step
    assert note.startswith(
        "warning after step 1: Step 1 has nothing to train on: within each group its 2 rollouts have"
    )
    assert "use easier tasks or larger groups (rollout.group_size, now 2)" in note
    (warning,) = [event for event in run.read_events() if event["event"] == "warning"]
    assert (warning["step"], warning["advisory"]) == (1, "nothing_to_train")
    assert warning["message"] in note
