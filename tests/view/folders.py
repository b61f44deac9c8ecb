"""Run folders as trainers write them, and as accidents leave them."""

from __future__ import annotations

import math
from pathlib import Path

from palestra.runs.reader import RunStatus
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
