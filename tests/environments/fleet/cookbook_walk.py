"""Groups of rollouts by tinker-cookbook's own code; run in a Python that has it and msgspec. The policy is a script."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tinker import ModelInput  # type: ignore[import-not-found]
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs  # type: ignore[import-not-found]
from tinker_cookbook.rl.data_processing import trajectory_to_data  # type: ignore[import-not-found]
from tinker_cookbook.rl.rollouts import do_group_rollout  # type: ignore[import-not-found]
from tinker_cookbook.tokenizer_utils import get_tokenizer  # type: ignore[import-not-found]

from palestra.environments.fleet.backends.embedded import live_instances
from palestra.environments.fleet.cookbook import FleetDatasetBuilder
from palestra.environments.platform import make_task
from tests.environments.fleet.scripted import DONE, call, next_word

MODEL = "Qwen/Qwen3-8B"
USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)

Policy = Callable[[list[str]], str]
"""From all that was told, the task first, to the next message."""


class Scripted(TokenCompleter):
    def __init__(self, policy: Policy, cut_after: int = 1000) -> None:
        self._policy, self._cut_after = policy, cut_after
        self._tokenizer = get_tokenizer(MODEL)

    async def __call__(self, model_input: ModelInput, stop: Any, *, max_tokens: int | None = None) -> Any:
        response = USER.findall(self._tokenizer.decode(model_input.to_ints()))
        said = self._tokenizer.encode(self._policy(response), add_special_tokens=False)
        is_cut = len(response) > self._cut_after
        tokens = said if is_cut else [*said, *stop]
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "length" if is_cut else "stop")


def builder(tasks_file: str, **fields: Any) -> FleetDatasetBuilder:
    given = {"model_name_for_tokenizer": MODEL, "batch_size": 2, "group_size": 2, **fields}
    return FleetDatasetBuilder(tasks_file=tasks_file, **given)


async def rolled(group: Any, policy: TokenCompleter) -> dict[str, Any]:
    found = await do_group_rollout(pickle.loads(pickle.dumps(group)), policy)  # noqa: S301 - our own, a line before
    rows = [trajectory_to_data(one, 1.0) for one in found.trajectories_G]
    return {
        "key": group.task.id,
        "rewards": found.get_total_rewards(),
        "stops": [one.stop_reason for one in found.trajectories_G],
        "turns": [one.transitions[-1].metrics["turns"] for one in found.trajectories_G],
        "rows": [len(row) for row in rows],
        "tags": group.logging_tags(),
        "live": live_instances(),
    }


async def walked(tasks_file: str, broken_file: str) -> dict[str, Any]:
    train, kept = await builder(tasks_file, eval_tasks=2)()
    assert kept is not None
    groups = [*train.get_batch(0), *kept.get_batch(0)]
    tasks = {str(one.task.id): make_task(one.task.id) for one in groups}

    def gold(key: str) -> Policy:
        return lambda told: next_word(tasks[key], told[1:])

    words = turns_of(["<done>", call("put", value=1) + DONE, call("put", value=2) + DONE])
    (broken,) = (await builder(broken_file, batch_size=1, group_size=3)())[0].get_batch(0)
    tight = (await builder(tasks_file, max_trajectory_tokens=50)())[0].get_batch(0)[0]
    return {
        "batches": [len(train), len(kept)],
        "gold": [await rolled(one, Scripted(gold(one.task.id))) for one in groups],
        "null": [await rolled(one, Scripted(lambda _: DONE)) for one in groups],
        "cut": await rolled(groups[0], Scripted(gold(groups[0].task.id), cut_after=1)),
        "tight": await rolled(tight, Scripted(lambda _: DONE)),
        "unknown": await rolled(broken, Scripted(lambda _: next(words))),
    }


def turns_of(words: list[str]) -> Iterator[str]:
    yield from words


if __name__ == "__main__":
    print(json.dumps(asyncio.run(walked(sys.argv[1], sys.argv[2]))))
