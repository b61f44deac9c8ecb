"""Pointer files to what the server keeps."""

from __future__ import annotations

import asyncio

import pytest

from palestra.rollouts.policy_sampler import PolicyError
from palestra.runs.run_state import RunState, StateError
from palestra.training.run_checkpoints import RunCheckpoints


class Shelf:
    """Keeps names, as a server keeps weights."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    async def save(self, name: str, *, ttl_s: int | None = None) -> str:
        self.kept.append(f"tinker://x/weights/{name}")
        return self.kept[-1]

    async def delete(self, address: str) -> None:
        if address not in self.kept:
            raise PolicyError("no such checkpoint")
        self.kept.remove(address)


def save(checkpoints: RunCheckpoints, shelf: Shelf, *steps: int) -> None:
    for step in steps:
        asyncio.run(checkpoints.save(RunState(step=step, position=step * 10), shelf))  # type: ignore[arg-type]


def test_the_newest_few_are_kept_on_both_sides(tmp_path):
    checkpoints, shelf = RunCheckpoints(tmp_path, keep=2), Shelf()
    assert checkpoints.newest() is None
    save(checkpoints, shelf, 5, 10, 15)
    assert shelf.kept == ["tinker://x/weights/step_000010", "tinker://x/weights/step_000015"]
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.step, newest.position, newest.address) == (15, 150, shelf.kept[-1])


def test_a_server_that_forgot_an_old_one_is_no_reason_to_stop(tmp_path):
    checkpoints, shelf = RunCheckpoints(tmp_path, keep=1), Shelf()
    save(checkpoints, shelf, 5)
    shelf.kept.clear()
    save(checkpoints, shelf, 10)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 10


def test_a_damaged_pointer_says_what_to_do(tmp_path):
    (tmp_path / "step_000005.json").write_text('{"step": ')
    with pytest.raises(StateError, match=r"step_000005\.json cannot be read.*remove it to resume from an older one"):
        RunCheckpoints(tmp_path, keep=1).newest()


def test_the_best_is_kept_until_a_better_one_comes(tmp_path):
    checkpoints, shelf = RunCheckpoints(tmp_path, keep=1, keep_best="eval/success"), Shelf()
    for step, value in ((0, 0.3), (5, 0.9), (10, 0.4)):
        checkpoints.rate(step, value)
        save(checkpoints, shelf, step)
    assert shelf.kept == ["tinker://x/weights/step_000005", "tinker://x/weights/step_000010"]
    checkpoints.rate(12, 0.8)
    assert not checkpoints.is_best(12)
    checkpoints.rate(12, 0.9)
    assert checkpoints.is_best(12)  # the newest of equal ones
    save(checkpoints, shelf, 12)
    assert shelf.kept == ["tinker://x/weights/step_000012"]
    checkpoints.rate(15, float("nan"))
    assert not checkpoints.is_best(15)


def test_values_of_steps_that_are_done_again_do_not_count(tmp_path):
    save(RunCheckpoints(tmp_path, keep=1), Shelf(), 5)
    checkpoints = RunCheckpoints(tmp_path, 1, "eval/loss", {5: 2.0, 7: 0.1})
    checkpoints.rate(6, 1.0)
    assert checkpoints.is_best(6)
    save(checkpoints, Shelf(), 7)  # saved before it is evaluated again
    assert checkpoints.is_best(6)
