"""How good Ephebe is before any reinforcement learning: the table of its model card.

python recipes/ephebe/evaluate.py [--model DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from palestra.chat import ChatTokenizer
from palestra.config.bundled import BUNDLED, EPHEBE
from palestra.config.train import EnvironmentEntry, EvalConfig, RolloutConfig
from palestra.endpoints.own_server import own_server
from palestra.environments.environment_set import EnvironmentSet
from palestra.rollouts.local.player import LocalRollouts
from palestra.rollouts.local.token_turns import PlayerContext
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.runs.listener import Silence
from palestra.training.loops.evaluation import Evaluator
from palestra.training.policy import PolicyStart
from palestra.training.tinker_policy import TinkerPolicy

TASKS = 256


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED / EPHEBE)
    folder = parser.parse_args().model
    with tempfile.TemporaryDirectory() as scratch:
        state, log = Path(scratch, "state"), Path(scratch, "log")
        async with (
            own_server(str(folder), EPHEBE, state, log, print, device="cpu") as url,
            TinkerPolicy.open(url, EPHEBE, PolicyStart(rank=1, seed=0)) as policy,
        ):
            for name in ("stockroom", "arithmetic"):
                shares = [await success(folder, policy, name, temperature) for temperature in (1.0, 0.0)]
                print(f"| {name} | {shares[0]:.0%} | {shares[1]:.0%} |")


async def success(folder: Path, policy: TinkerPolicy, name: str, temperature: float) -> float:
    config = RolloutConfig(max_tokens=64, max_context=1024)
    with EnvironmentSet([EnvironmentEntry(name=name)], env_threads=4, env_timeout_s=10) as environments:
        settings = RolloutSettings.of(config, temperature)
        source = LocalRollouts(PlayerContext(ChatTokenizer.load(folder), environments, settings))
        ((_, tasks),) = environments.tasks("eval")
        evaluator = Evaluator(EvalConfig(), tasks[:TASKS], source, 0, Silence())
        _, metrics = await evaluator.evaluate(0, await policy.base())
    return metrics["eval/success"]


if __name__ == "__main__":
    asyncio.run(main())
