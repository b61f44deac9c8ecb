"""One task through skyrl-gym's own registry; run in a Python that has it and msgspec."""

from __future__ import annotations

import json
import sys
from typing import Any

import skyrl_gym  # type: ignore[import-not-found]
from skyrl_gym.metrics import aggregate_for_environment  # type: ignore[import-not-found]

from palestra.environments.fleet.backends.embedded import live_instances
from palestra.environments.fleet.skyrl import register
from palestra.environments.platform import make_task
from tests.environments.fleet.scripted import DONE, next_word


def played(task_key: str, is_gold: bool) -> dict[str, Any]:
    config, extras = {"tasks_file": "platform:"}, {"task_key": task_key, "max_turns": 20}
    env = skyrl_gym.make("fleet_task", env_config=config, extras=extras)
    assert isinstance(env, skyrl_gym.Env)
    with env:
        history, facts = env.init([{"role": "user", "content": "x"}])
        response: list[str] = []
        while True:
            step = env.step(next_word(make_task(task_key), response) if is_gold else DONE)
            if step["done"]:
                break
            response.append(step["observations"][0]["content"])
        metrics = env.get_metrics()
    episodes = aggregate_for_environment("fleet_task", [metrics])[f"{facts['env_key']}/num_episodes"]
    return {
        "roles": [message["role"] for message in history],
        "env_key": facts["env_key"],
        "max_turns": env.max_turns,
        "reward": step["reward"],
        "episodes": episodes,
    }


if __name__ == "__main__":
    register()
    register()
    seen = [played(key, is_gold) for key in sys.argv[1:] for is_gold in (True, False)]
    print(json.dumps({"seen": seen, "live": live_instances()}))
