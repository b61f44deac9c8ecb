"""Run folders as trainers write them, and as accidents leave them."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.runs.reader import RunStatus
from palestra.runs.record_files import read_records, write_records
from palestra.runs.writer import RunFolder
from palestra.training.batches.grpo_batch import build_batch
from palestra.types.rollouts import Group, RolloutStop
from tests.training.records import group_of, make_config, make_rollout, make_turn

HOSTILE = "<script>alert(1)</script> \x1b[31mred \u202edesrever <img src=x onerror=alert(2)> {{ 7*7 }}"


def write_run(root: Path, name: str = "first", *, steps: int = 4, done: bool = True, text: str = "4", **more) -> Path:
    """A run with groups of four rollouts in each step, two of them right, and an evaluation at its end."""
    config = make_config(steps=steps, **more)
    with RunFolder.create(root, name, config) as folder:
        for step in range(1, steps + 1):
            groups = [make_step_group(f"g{step}{part}", text, rewards) for part, rewards in SPREADS.items()]
            folder.write_rollouts(step, groups, build_batch(groups, config).sequences)
            folder.write_metrics(step, figures(step))
        folder.write_eval(steps, [make_step_group("e", text, (1.0, 0.0))], {"eval/success": 0.5})
        (folder.path / "logs" / "server.log").write_text(f"started\n{text}\nlast line\n")
        if done:
            folder.finish(RunStatus.DONE)
    return root / name


SPREADS = {"a": (1.0, 0.0, 0.0, 0.0), "b": (1.0, 1.0, 1.0, 1.0), "c": (0.5, 0.0, 1.0, None)}


def make_step_group(name: str, text: str, rewards: tuple[float | None, ...]) -> Group:
    rollouts = [
        make_rollout(
            f"{name}-{i}",
            reward,
            [make_turn(5 + i, logprob=-0.1 * (i + 1)), make_turn(3, observation=2, logprob=-2.0)],
            messages=[
                {"role": "system", "content": "Use tools."},
                {"role": "user", "content": f"What is 2 + 2? {text}"},
                {
                    "role": "assistant",
                    "content": "<think>easy</think>4",
                    "tool_calls": [{"name": "sum", "arguments": text}],
                },
                {"role": "tool", "content": text},
                {"role": "assistant", "content": f"{text} {i}"},
            ],
            metrics={"parse_error": float(i == 3)},
            error=None if reward is not None else f"broke: {text}",
            **({} if reward is not None else {"stop": RolloutStop.ENV_FAILED}),
        )
        for i, reward in enumerate(rewards)
    ]
    return group_of(name, rollouts)


def figures(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.2 + step / 100,
        "reward/p10": 0.0,
        "reward/p90": 1.0,
        "policy/entropy_estimate": 1.0 / step,
        "kl/base": math.nan if step % 2 else 0.01,
        "stop/done": 0.75,
        "stop/length": 0.25,
        "stop/timeout": 0.0,
        "time/collect_s": 2.0,
        "time/update_s": 1.0,
        "batch/sampled_tokens": 100.0,
        "env/math/own_metric": 3.0,
    }


def break_config(path: Path) -> None:
    (path / "config.json").write_text('{"name": ')


def break_metrics(path: Path) -> None:
    with (path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 5, "reward/me')


def remove_metrics(path: Path) -> None:
    (path / "metrics.jsonl").unlink()
    (path / "events.jsonl").unlink()


def break_rollouts(path: Path) -> None:
    for file in (path / "rollouts").iterdir():
        file.write_bytes(file.read_bytes()[:-9])


def empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name != "config.json":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def write_nan(path: Path) -> None:
    with (path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 5, "attempt": 1, "reward/mean": NaN}\n{"step": 6, "attempt": 1, "reward/mean": null}\n')


def of_an_older_version(path: Path) -> None:
    about = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"config": {"model": "old"}, "kind": about["kind"]}))
    for file in (path / "rollouts").iterdir():
        kept = [{name: one[name] for name in ("id", "group", "messages")} for one in read_records(file)]
        write_records(file, kept)


def write_huge_numbers(path: Path) -> None:
    with (path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 5, "attempt": 1, "reward/mean": %s}\n' % (b"9" * 400))
        stream.write(b'{"step": %s, "attempt": 1, "reward/mean": 1}\n' % (b"9" * 400))
        stream.write(b'{"step": 6, "attempt": 1, "a": ' + b"[" * 100_000 + b"\n")
    with (path / "events.jsonl").open("ab") as stream:
        stream.write(b'{"event": "odd", "time": 1e300, "attempt": "first"}\n')


def change_about(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        about = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**about, **changes}))

    change.__name__ = f"change_{'_'.join(changes)}"
    return change


ACCIDENTS = (
    break_config,
    break_metrics,
    remove_metrics,
    break_rollouts,
    empty,
    write_nan,
    of_an_older_version,
    write_huge_numbers,
    change_about(kind={"a": 1}),
    change_about(created="yesterday"),
    change_about(created=1e300),
    change_about(config={"model": {"name": ["a", "b"]}, "steps": "many"}),
    change_about(facts=["here"]),
)


CAP_DAC_OVERRIDE = 1
CAPABILITY_VERSION = 0x20080522


@contextmanager
def made_read_only(folder: Path) -> Iterator[None]:
    """Nobody may write into the folder and what is in it: also not root, as long as the work is done by this thread or
    one that it starts."""
    entries = [folder, *folder.rglob("*")]
    modes = {entry: entry.stat().st_mode for entry in entries}
    for entry, mode in modes.items():
        entry.chmod(mode & 0o555)
    libc = ctypes.CDLL(None)
    header, rights = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, rights)
    before = rights[0]
    rights[0] = before & ~(1 << CAP_DAC_OVERRIDE)
    libc.capset(header, rights)
    try:
        assert not os.access(folder, os.W_OK, effective_ids=True)
        yield
    finally:
        rights[0] = before
        libc.capset(header, rights)
        for entry, mode in modes.items():
            entry.chmod(mode)
