"""Rollouts that go on when weights change: each token is of the weights that drew it, and is trained by its own age."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from palestra.environments import BaseTextEnv
from palestra.rollouts.continued_samples import ContinuedSamples
from palestra.runs.listener import Silence
from palestra.runs.reader import RunReader
from palestra.training.batches.grpo_batch import DropReason, build_batch
from palestra.training.policy import PolicyStart
from palestra.training.tinker_policy import TinkerPolicy
from palestra.types import AdamParams, SampledSequence, SamplingParams
from palestra.types.rollouts import TrainSequence
from palestra.types.sampling import VersionSegment
from tests.training.records import group_of, make_config, make_rollout, make_turn
from tests.training.trainers import FEW, SMALL, TOOLS, finish, kill, merged, start, wait_for_steps

EQUAL = 1e-4  # float32, summed in another order
PROMPT = list(range(300, 330))
LONG = SamplingParams(max_tokens=300, seed=5, stop_token_ids=())


async def moved(policy: TinkerPolicy) -> None:
    tokens = list(range(400, 440))
    sequence = TrainSequence(tokens=tokens, mask=[True] * 40, logprobs=[0.0] * 40, advantages=[0.01] * 40)
    await policy.update([sequence], "cross_entropy", {}, AdamParams(learning_rate=5e-3))


async def sampled_over_an_update(url: str, keys: bool) -> tuple[list[SampledSequence], list[list[list[float]]]]:
    """Samples that an update overtakes, and the logprobs of each under the version before and the one after."""
    async with (
        ContinuedSamples.open(url, pytest.fail, keeps_keys=keys) as continued,
        TinkerPolicy.open(url, "ephebe", PolicyStart(rank=4, seed=1), continued=continued) as policy,
    ):
        old = await policy.publish(7)
        sampling = asyncio.create_task(old.sample(PROMPT, LONG, 2))
        short = await old.sample(PROMPT, SamplingParams(max_tokens=20, seed=1, stop_token_ids=()))
        assert short[0].segments == [VersionSegment(0, 7)]
        await moved(policy)
        new = await policy.publish(8)
        await policy.go_on(new)
        sequences = await sampling
        rows = [PROMPT + sequence.tokens for sequence in sequences]
        return sequences, [[(await one.score(row))[len(PROMPT) :] for one in (old, new)] for row in rows]


@pytest.mark.parametrize("keeps_keys", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["recompute", "keep"])
def test_a_sample_goes_on_with_new_weights(ephebe_url, keeps_keys):
    sequences, scored = asyncio.run(sampled_over_an_update(ephebe_url, keeps_keys))
    for sequence, (before, after) in zip(sequences, scored, strict=True):
        first, second = sequence.segments
        assert (first, second.version, second.is_exact) == (VersionSegment(0, 7), 8, not keeps_keys)
        assert 0 < second.start < len(sequence.tokens) == 300
        gaps = np.abs(np.array([before, after]) - sequence.logprobs)
        assert gaps[0, : second.start].max() < EQUAL
        assert gaps[0, second.start :].max() > 0.01  # the versions differ
        assert (gaps[1, second.start :].max() < EQUAL) is not keeps_keys


class Tortoise(BaseTextEnv):
    """Two turns; the first rollout that is there is answered between them only when some steps are over."""

    max_turns = 2
    steps_over = 0
    slow: Tortoise | None = None

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        return [{"id": str(number), "prompt": f"Say {number}."} for number in range(40)]

    async def step_async(self, action: str) -> dict[str, Any]:
        self.turns += 1
        Tortoise.slow = Tortoise.slow or self
        while Tortoise.slow is self and Tortoise.steps_over < 3:  # noqa: ASYNC110 - steps tell no environment
            await asyncio.sleep(0.01)
        observations = [] if self.turns == 2 else [{"role": "user", "content": "Again."}]
        reward = float(len(action) % 2)
        return {"observations": observations, "reward": reward, "done": self.turns == 2, "metadata": {}}


class Steps(Silence):
    def step(self, step: int, metrics: dict[str, float]) -> None:
        Tortoise.steps_over = step


def test_a_slow_rollout_goes_on_with_newer_weights_and_holds_up_no_step(run_training):
    Tortoise.steps_over, Tortoise.slow = 0, None
    run = run_training(
        "slow",
        Steps(),
        environments=[{"name": f"{__name__}:Tortoise"}],
        rollout={**FEW, "max_tokens": 24, "endings": {"length": "grade"}},
        data={"zero_variance": "keep"},
        steps=6,
        asynchronous={"enabled": True, "max_staleness": 1, "in_flight": "continue"},
    )
    rows = run.read_metrics()
    records = {one["id"]: one for step in range(1, 7) for one in run.read_rollouts(step)}
    tokens = {one["id"]: one for step in range(1, 7) for one in run.read_tokens(step)}
    (slow,) = [one for one in records.values() if len(dict(one.get("versions", []))) > 1 and one["version"] == 0]
    (old, of_old), (new, of_new) = slow["versions"]
    assert (old, new >= 3) == (0, True)
    first, second = tokens[slow["id"]]["turns"]
    assert (len(first["tokens"]), len(second["tokens"])) == (of_old, of_new)
    # A step is of one version less than its number: the first turn was too old by then, the second was not.
    advantages = tokens[slow["id"]]["advantages"]
    assert len(tokens[slow["id"]]["trainer_logprobs"]) == of_old + of_new
    assert not any(advantages[: -of_new - 1])
    assert sum(row["batch/stale_tokens"] for row in rows) >= of_old
    assert max(row["segments/max"] for row in rows) == 2
    assert max(row["segments/continued_share"] for row in rows) > 0
    assert {row["segments/inexact_share"] for row in rows} == {0}
    positions = [one.rpartition("-")[0] for one in records]
    assert set(map(positions.count, positions)) == {4}  # every group was used once


def of_versions(*versions: int, tokens: int = 4) -> list[VersionSegment]:
    return [VersionSegment(tokens * place, version) for place, version in enumerate(versions)]


def test_tokens_that_are_too_old_are_context_to_the_rest():
    config = make_config(asynchronous={"enabled": True, "in_flight": "continue", "max_staleness": 1})
    mixed = make_turn(12, version=3, segments=of_versions(3, 4, 6))
    old = make_turn(5, version=3)
    rollouts = [
        make_rollout("g-0", 1.0, [mixed, make_turn(2, 3, version=6)]),
        make_rollout("g-1", 0.0, [old]),
        make_rollout("g-2", 0.0, [make_turn(4, version=5)]),
    ]
    batch = build_batch([group_of("g", rollouts)], config, oldest=5)
    assert batch.dropped == {DropReason.STALE: 1}
    assert batch.stale_tokens == 8
    first, second = sorted(batch.sequences, key=lambda one: one.rollout)
    assert first.mask == [False] * 10 + [True] * 4 + [False] * 3 + [True] * 2
    assert [bool(one) for one in first.advantages] == first.mask
    assert first.sampled == [False] * 2 + [True] * 12 + [False] * 3 + [True] * 2
    assert second.mask == [False] * 2 + [True] * 4
    # The reward of what is too old still counts in the baseline: 1 - 1/3.
    assert first.advantages[-1] * first.divisor == pytest.approx(2 / 3)


def test_a_mask_of_whole_sequences_is_one_of_segments():
    correction = {"sequence_mask": [0.5, 2.0]}
    config = make_config(algorithm={"correction": correction})
    rollouts = [
        make_rollout("g-0", 1.0, [make_turn(8, version=3, segments=of_versions(3, 4))]),
        make_rollout("g-1", 0.0, [make_turn(8, version=4)]),
    ]
    far = {"g-0": [0.0] * 2 + [-3.5] * 4 + [-0.4] * 4, "g-1": [0.0] * 2 + [-0.5] * 8}
    batch = build_batch([group_of("g", rollouts)], config, own_logprobs=far)
    first = next(one for one in batch.sequences if one.rollout == "g-0")
    assert [bool(one) for one in first.advantages] == [False] * 6 + [True] * 4
    assert batch.correction is not None
    assert batch.correction.masked_sequences_share == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rollout": {"style": "batched"}}, "rollout.style=async"),
        ({"algorithm": {"loss": "gspo"}}, "use ppo, cispo or sapo"),
        (
            {"environments": [{"name": "gym:sums", "config": {"head": "http://127.0.0.1:1"}}]},
            "servers of a gym do not say",
        ),
        ({"algorithm": {"replay_routing": True}}, "asynchronous.older_keys=keep"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        make_config(asynchronous={"enabled": True, "in_flight": "continue"}, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("has_own_server", [False, True])
def test_a_run_that_is_killed_uses_every_group_once(ephebe_url, tmp_path, has_own_server):
    """Again and again, with rollouts under way that have outlived their weights."""
    rng = random.Random(has_own_server)
    asynchronous = {"enabled": True, "max_staleness": 2, "in_flight": "continue"}
    server = {} if has_own_server else {"server": ephebe_url}
    few = {"concurrency": 8}  # of 48: some are under way whenever weights change
    options = {"asynchronous": asynchronous, "rollout": few, "data": {"zero_variance": "keep"}, "steps": 8}
    settings = {**TOOLS, **options, **server}
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    process = start(tmp_path, "run.json", "--name", "cut")
    for steps in (3, 5):
        wait_for_steps(tmp_path, "cut", steps, process)
        time.sleep(rng.uniform(0, 2))
        kill(process)
        process = start(tmp_path, "--resume", "cut")
    finish(process)
    run = RunReader(tmp_path / "runs" / "cut")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, 9))
    records = [record for step in range(1, 9) for record in run.read_rollouts(step)]
    ids = [record["id"] for record in records]
    assert len(ids) == len(set(ids))
    assert set(Counter(one.rpartition("-")[0] for one in ids).values()) == {4}
    state = json.loads((run.path / "checkpoints" / "step_000008.json").read_text())
    assert {int(one[1:7]) for one in ids} == set(range(state["position"])) - set(state["pending"])
    assert any(row["segments/continued_share"] for row in rows)
    for record in records:  # no version that had not been published when the step was taken
        assert sum(tokens for _, tokens in record.get("versions", [])) in (0, record["tokens"])
    for step in range(1, 9):
        assert all(record["version"] < step for record in run.read_rollouts(step))
