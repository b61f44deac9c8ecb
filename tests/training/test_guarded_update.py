"""Updates that move the policy too far are undone, and steps with little to learn from keep their gradient."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from palestra.config.train import GrpoConfig, load_train_config
from palestra.rollouts.policy_sampler import PolicyError
from palestra.runs.listener import Silence
from palestra.runs.reader import RunReader
from palestra.runs.record_files import read_records
from palestra.training.batches.grpo_batch import build_batch
from palestra.training.guarded_update import AppliedUpdate, PolicyUpdater
from palestra.training.policy import PolicyStart
from palestra.training.tinker_policy import TinkerPolicy
from palestra.types import AdamParams, SamplingParams, StopReason
from palestra.types.rollouts import Group, Rollout, RolloutStop, Task, TrainSequence, Turn
from tests.server.model_api.conftest import Ephebe
from tests.training.trainers import FEW, SMALL, kill, merged, start, train, wait_for_steps

COLLAPSE = Path(__file__).parents[1] / "fixtures" / "collapse"
"""The update of a real run that took it from 0.965 to 0.430 (its README)."""
WRECKING = AdamParams(learning_rate=2e-3, beta1=0.9, beta2=0.95, grad_clip_norm=1.0)
VERSION = 13
STATE_FILES = ("adapter_model.safetensors", "optimizer.safetensors")


def recorded_groups() -> list[Group]:
    tokens = {row["id"]: row for row in read_records(COLLAPSE / "step14_tokens.jsonl.zst")}
    groups: dict[str, Group] = {}
    for record in read_records(COLLAPSE / "step14_rollouts.jsonl.zst"):
        row, name = tokens[record["id"]], record["group"]
        turns = [Turn(**{**turn, "stop": StopReason(turn["stop"])}) for turn in row["turns"]]
        facts = {key: record[key] for key in ("id", "group", "index", "task", "environment", "seed", "reward")}
        rollout = Rollout(**facts, stop=RolloutStop(record["stop"]), prompt=row["prompt"], turns=turns)
        task = Task(id=record["task"], environment="stockroom", prompt=[])
        groups.setdefault(name, Group(id=name, task=task, step=VERSION)).rollouts.append(rollout)
    return list(groups.values())


def config_of(**settings: Any) -> GrpoConfig:
    base = {"environments": [{"name": "stockroom"}], "rollout": {"groups_per_step": 12}}
    config = load_train_config([], [], {**base, "data": {"zero_variance": "drop"}, **settings})
    assert isinstance(config, GrpoConfig)
    return config


Use = Callable[[TinkerPolicy, Path], Awaitable[Any]]


@pytest.fixture(scope="session")
def from_step_13(shared_ephebe: Callable[..., Ephebe]) -> Callable[[Use], Any]:
    """`from_step_13(use)`: with a policy that has the recorded weights and optimizer, and the server's folder of its
    checkpoints."""
    server = shared_ephebe()

    async def run(use: Use) -> Any:
        start = PolicyStart(rank=16, seed=0)
        async with TinkerPolicy.open(server.url, "ephebe", start) as policy:
            address = await policy.save("recorded")
            for name in STATE_FILES:
                shutil.copy(COLLAPSE / "step13" / name, saved_folder(server.folder, address) / name)
            await policy.restore(address)
            return await use(policy, server.folder)

    return lambda use: asyncio.run(run(use))


async def weights_of(policy: TinkerPolicy, folder: Path) -> dict[str, bytes]:
    """Everything that the next step depends on."""
    saved = saved_folder(folder, await policy.save(f"look-{secrets.token_hex(4)}"))
    files = [load_file(saved / file) for file in STATE_FILES]
    return {f"{n}/{name}": t.numpy().tobytes() for n, file in enumerate(files) for name, t in file.items()}


def saved_folder(root: Path, address: str) -> Path:
    model, _, name = address.removeprefix("tinker://").split("/")
    (folder,) = root.rglob(f"{model.replace(':', '_')}/weights/{name}@*")
    return folder


def wrecking_batch(config: GrpoConfig) -> Any:
    """The batch as it was then: divided by the tokens of the 16 rows that were trained."""
    batch = build_batch(recorded_groups(), config)
    trained, played = (sum(map(sum, (row.mask for row in rows))) for rows in (batch.sequences, all_sequences()))
    for sequence in batch.sequences:
        sequence.advantages = [advantage * played / trained for advantage in sequence.advantages]
    return batch


def all_sequences() -> list[TrainSequence]:
    return build_batch(recorded_groups(), config_of(data={"zero_variance": "keep"})).sequences


def test_the_recorded_collapse_is_undone_and_repeated_at_half_the_size(from_step_13):
    config = config_of(data={"zero_variance": "drop", "min_informative_groups": 1}, algorithm={"advantage": "grpo"})
    halved = replace(WRECKING, learning_rate=1e-3)

    async def guarded(policy: TinkerPolicy, folder: Path) -> tuple[AppliedUpdate, dict[str, bytes]]:
        updater = PolicyUpdater(config, policy, Silence())
        applied = await updater.update(recorded_groups(), wrecking_batch(config), WRECKING, VERSION)
        return applied, await weights_of(policy, folder)

    async def at_half_size(policy: TinkerPolicy, folder: Path) -> dict[str, bytes]:
        (rows,) = wrecking_batch(config).minibatches
        await policy.update(rows, "importance_sampling", {}, halved)
        return await weights_of(policy, folder)

    applied, weights = from_step_13(guarded)
    (undone,) = applied.undone
    assert undone > 2 * config.update_guard.max_kl
    assert applied.kl is not None
    assert applied.kl < config.update_guard.max_kl
    assert not applied.is_skipped
    assert weights == from_step_13(at_half_size), "bit for bit as if the large update had never been made"


def test_an_update_that_is_never_small_enough_is_skipped_and_leaves_the_bits_of_before(from_step_13):
    config = config_of(
        data={"zero_variance": "drop", "min_informative_groups": 1}, update_guard={"max_kl": 1e-12, "rows": 4}
    )

    async def use(policy: TinkerPolicy, folder: Path) -> None:
        before = await weights_of(policy, folder)
        groups, updater = recorded_groups(), PolicyUpdater(config, policy, Silence())
        updater.save_ahead()  # as while rollouts are played
        await policy.publish(VERSION)
        applied = await updater.update(groups, build_batch(groups, config), WRECKING, VERSION)
        assert (applied.is_skipped, len(applied.undone)) == (True, 4)
        assert applied.undone == sorted(applied.undone, reverse=True)
        assert await weights_of(policy, folder) == before

    from_step_13(use)


class FullDisk:
    """A policy at a server whose disk is full for its first saves."""

    def __init__(self, policy: TinkerPolicy, saves: int) -> None:
        self._policy, self._left = policy, saves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    async def save(self, name: str, *, ttl_s: int | None = None) -> str:
        self._left -= 1
        if self._left >= 0:
            raise PolicyError(f"the checkpoint {name} could not be written: no space left on device")
        return await self._policy.save(name, ttl_s=ttl_s)


def test_a_save_ahead_that_failed_is_tried_again_before_the_update(from_step_13):
    config = config_of(data={"zero_variance": "drop", "min_informative_groups": 1}, update_guard={"rows": 4})
    small = replace(WRECKING, learning_rate=1e-6)

    async def use(policy: TinkerPolicy, folder: Path) -> None:
        groups = recorded_groups()
        for failures in (1, 2):
            full: Any = FullDisk(policy, failures)
            updater = PolicyUpdater(config, full, Silence())
            updater.save_ahead()
            update = updater.update(groups, build_batch(groups, config), small, VERSION)
            if failures == 1:
                assert not (await update).undone
            else:
                with pytest.raises(PolicyError, match="no space left"):
                    await update

    from_step_13(use)


def test_a_step_that_is_not_made_leaves_no_save_behind(from_step_13):
    complaints: list[dict[str, Any]] = []

    async def use(policy: TinkerPolicy, folder: Path) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        for failures in (0, 1):
            full: Any = FullDisk(policy, failures)
            updater = PolicyUpdater(config_of(), full, Silence())
            updater.save_ahead()
            await asyncio.sleep(0)
            await updater.close()
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "save-before-update"]
            del updater
            gc.collect()
        assert await policy.publish(VERSION)

    from_step_13(use)
    assert not complaints


def test_what_an_undone_update_leaves_behind_is_freed_at_the_server(from_step_13, ephebe_url):
    async def use(policy: TinkerPolicy, folder: Path) -> None:
        sampler, address = await policy.publish(0), await policy.save("undo")
        await policy.restore(address)
        model = address.removeprefix("tinker://").partition("/")[0]
        async with httpx.AsyncClient(base_url=ephebe_url, headers={"x-api-key": "tml-local"}) as http:
            assert (await http.post("/api/v1/get_info", json={"model_id": model})).status_code == 404
        assert await sampler.sample([1, 2, 3], SamplingParams(max_tokens=2)), "its samplers stay"

    from_step_13(use)


def test_two_informative_groups_of_twelve_keep_their_gradient_for_the_next_step(from_step_13):
    """The recipe as it is now would not have made that step; what the gradient adds up to is what one request with
    both would give."""
    config = config_of()

    async def in_two_steps(policy: TinkerPolicy, folder: Path) -> dict[str, bytes]:
        groups, updater = recorded_groups(), PolicyUpdater(config, policy, Silence())
        batch = build_batch(groups, config)
        before = await weights_of(policy, folder)
        first = await updater.update(groups, batch, WRECKING, VERSION)
        assert (first.is_kept, first.informative, updater.has_kept_gradient) == (True, 2, True)
        assert await weights_of(policy, folder) == before
        teaching = [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1]
        second = await updater.update([*teaching, *teaching], batch, WRECKING, VERSION)
        assert (second.is_kept, second.informative, updater.has_kept_gradient) == (False, 4, False)
        return await weights_of(policy, folder)

    async def at_once(policy: TinkerPolicy, folder: Path) -> dict[str, bytes]:
        (rows,) = build_batch(recorded_groups(), config).minibatches
        await policy.update(rows, "importance_sampling", {}, None)
        await policy.update(rows, "importance_sampling", {}, WRECKING)
        return await weights_of(policy, folder)

    assert from_step_13(in_two_steps) == from_step_13(at_once)


def test_an_undone_update_repeats_the_gradient_that_was_kept(from_step_13):
    config = config_of(data={"zero_variance": "drop", "min_informative_groups": 3})
    small = replace(WRECKING, learning_rate=1e-4)

    def kept_then_stepped(max_kl: float, adam: AdamParams) -> Use:
        guarded = config.model_copy(update={"update_guard": config.update_guard.model_copy(update={"max_kl": max_kl})})

        async def use(policy: TinkerPolicy, folder: Path) -> tuple[AppliedUpdate, dict[str, bytes]]:
            groups = recorded_groups()
            teaching = [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1]
            updater, batch = PolicyUpdater(guarded, policy, Silence()), build_batch(groups, guarded)
            await updater.update(groups, batch, adam, VERSION)
            applied = await updater.update([*teaching, *teaching], batch, adam, VERSION)
            return applied, await weights_of(policy, folder)

        return use

    free, straight = from_step_13(kept_then_stepped(1e9, small))
    assert free.kl is not None
    twice = replace(small, learning_rate=2e-4)
    applied, repeated = from_step_13(kept_then_stepped(free.kl * 1.01, twice))
    assert len(applied.undone) == 1
    assert repeated == straight


# Whole runs

KEPT = {"data": {"zero_variance": "drop", "min_informative_groups": 3}, "rollout": {"group_size": 2}}
"""About half of such small groups have rewards that differ."""


def test_an_undone_update_is_an_event_and_metrics(run_training):
    run = run_training("guarded", steps=2, rollout=FEW, update_guard={"max_kl": 1e-4})
    rows = run.read_metrics()
    assert all(row["guard/kl"] <= 1e-4 for row in rows)
    assert any(row["guard/undone"] for row in rows)
    assert all(row["guard/kl_first"] >= row["guard/kl"] for row in rows)
    events = [event for event in run.read_events() if event["event"] == "undone"]
    assert [event["step"] for event in events] == [row["step"] for row in rows if row["guard/undone"]]
    assert "was undone" in events[0]["message"]


def test_the_guard_changes_nothing_where_updates_are_small(run_training):
    curves = []
    for name, enabled in (("with", True), ("without", False)):
        settings = {"steps": 2, "rollout": FEW, "optimizer": {"lr": 1e-4}}
        rows = run_training(name, update_guard={"enabled": enabled}, **settings).read_metrics()
        curves.append([(row["reward/mean"], row["optim/grad_norm"]) for row in rows])
    assert curves[0] == curves[1]


def test_schedules_count_optimizer_steps(run_training):
    run = run_training("kept", steps=4, optimizer={"lr": 1e-3, "schedule": "linear"}, **KEPT)
    rows, made = run.read_metrics(), 0
    assert any(row["optim/kept"] for row in rows)
    for row in rows:
        assert row["optim/lr"] == pytest.approx(1e-3 * (1 - made / 4))
        made += not row["optim/kept"]


def test_a_run_that_is_killed_while_a_gradient_is_kept_ends_at_the_same_bits(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = merged(SMALL, {**KEPT, "server": ephebe_url, "steps": 4, "checkpoint": {"every": 1}})
    (tmp_path / "run.json").write_text(json.dumps(settings))
    code, said = train("run.json", "--name", "whole")
    assert code == 0, said
    whole = RunReader(tmp_path / "runs" / "whole").read_metrics()
    first_kept = next(row["step"] for row in whole if row["optim/kept"])
    assert first_kept < 4
    assert not (tmp_path / "runs" / "whole" / "checkpoints" / f"step_{first_kept:06d}.json").exists()
    process = start(tmp_path, "run.json", "--name", "cut")
    wait_for_steps(tmp_path, "cut", first_kept, process)
    kill(process)
    code, said = train("--resume", "cut")
    assert code == 0, said
    cut = RunReader(tmp_path / "runs" / "cut").read_metrics()
    figures = ("optim/grad_norm", "optim/kept", "reward/mean", "loss/sum")
    assert [[row.get(name) for name in figures] for row in cut] == [
        [row.get(name) for name in figures] for row in whole
    ]
