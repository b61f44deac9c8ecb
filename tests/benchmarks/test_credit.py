"""The credit benchmark: its frozen world, which rate counts, what a run is known by. Nothing is trained."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def credit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("credit")


def row(credit: ModuleType, method: str, lr: float, seed: int, rewards: list[float]) -> Any:
    job = credit.CreditJob("chain", method, credit.METHODS["chain"][method], lr, seed)
    curve = [(100 * place, reward) for place, reward in enumerate(rewards)]
    result = credit.CreditResult(curve, 1, 100 * len(rewards), 50, 1.0)
    return credit.CreditRow(credit.key_of(job), job, result)


def test_a_method_counts_at_the_rate_with_which_most_seeds_arrive_soonest(credit: ModuleType):
    rows = [
        *(row(credit, "grpo", 1e-3, seed, [0.5, 0.6, 0.85]) for seed in range(3)),
        *(row(credit, "grpo", 3e-3, seed, [0.5, 0.9, 0.9] if seed else [0.5, 0.5, 0.5]) for seed in range(3)),
        *(row(credit, "late", 1e-3, seed, [0.5, 0.8, 0.9]) for seed in range(3)),
    ]
    grpo, late = credit.summaries(rows)
    assert (grpo["rate"], grpo["arrived"], grpo["tokens to the aim"], grpo["of grpo's"]) == (1e-3, 3, 200, 1.0)
    assert (late["tokens to the aim"], late["of grpo's"]) == (100, 0.5)
    assert [cell.strip() for cell in credit.curves(rows).splitlines()[-1].split("|")][2:5] == ["late", "0.50", "0.90"]


def test_rows_are_known_by_all_that_a_run_depends_on(credit: ModuleType, tmp_path: Path):
    rows = [
        row(credit, name, lr, seed, [0.5]) for name in credit.METHODS["chain"] for lr in (1e-3, 3e-3) for seed in (0, 1)
    ]
    assert len({one.key for one in rows}) == len(rows)
    file = credit.RowFile(tmp_path / "rows.jsonl")
    for one in rows:
        file.add(one)
    assert credit.RowFile(tmp_path / "rows.jsonl").rows == {one.key: one for one in rows}


def test_the_chains_reward_at_the_end_but_for_the_one_that_tells(credit: ModuleType):
    chain = importlib.import_module("worlds.chain")

    async def play(world: str, numbers: str) -> list[float]:
        env, rewards = getattr(chain, world)(), []
        for door, number in zip(chain.DOORS, numbers, strict=True):
            step = await env.step_async(door + number)
            rewards.append(step["reward"])
            if step["done"]:
                break
        return rewards

    wrong = "".join("10"[int(number)] for number in chain.RIGHT)
    assert asyncio.run(play("Chain", chain.RIGHT)) == [0.0] * 11 + [1.0]
    assert asyncio.run(play("Chain", "x" + chain.RIGHT[1:])) == [0.0] * 11 + [pytest.approx(11 / 12)]
    assert asyncio.run(play("Chain", "0" * 12))[-1] == 0.5
    assert asyncio.run(play("TurnRewardChain", wrong[:3] + chain.RIGHT[3:])) == [0.0] * 3 + [1 / 12] * 9
    assert asyncio.run(play("Corridor", chain.RIGHT[:4] + wrong[4:])) == [0.0] * 4 + [pytest.approx(4 / 12)]
    assert asyncio.run(play("Corridor", chain.RIGHT))[-1] == 1.0
    locked = [chain.RIGHT[n] if n in chain.LOCKED else wrong[n] for n in range(12)]
    assert asyncio.run(play("Locks", "".join(locked))) == [0.0] * 11 + [1.0]
    assert asyncio.run(play("Locks", wrong[:3] + chain.RIGHT[3:]))[-1] == 0.0


def test_the_coin_that_is_imitated_knows_the_form_and_nothing_else(credit: ModuleType):
    chain = importlib.import_module("worlds.chain")
    said = [one["content"] for talk in chain.answers(64) for one in talk if one["role"] == "assistant"]
    assert len(said) == 64 * 12
    for place, door in enumerate(chain.DOORS):
        at_door = said[place::12]
        assert {one[0] for one in at_door} == {door}
        assert 0.25 < sum(one[1] == "1" for one in at_door) / 64 < 0.75
