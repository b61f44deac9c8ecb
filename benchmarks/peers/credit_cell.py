"""One run of `benchmarks/credit.py`: a world, a method, a learning rate, a seed, until its tokens are spent."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from peers.in_process_policy import InProcessPolicy, InProcessSampler
from worlds import chain

from palestra.chat import ChatTokenizer
from palestra.config.bundled import EPHEBE
from palestra.config.train import GrpoConfig, TrainModel
from palestra.data.conversations import Conversation
from palestra.endpoints.model_folders import model_folder
from palestra.engine.torch_backend import TorchBackend
from palestra.engine.torch_trainer import ModelImage, TorchConfig
from palestra.environments import EnvironmentSet
from palestra.environments.task_order import TaskOrder
from palestra.rollouts.group_metrics import is_counted
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.seeds import group_seeds
from palestra.runs.listener import Silence
from palestra.testing.random_model import make_random_model
from palestra.training.batches.grpo_batch import build_batch
from palestra.training.batches.sft_examples import encode_example
from palestra.training.collecting.sync_collector import Collector, RequestMaker
from palestra.training.loops.grpo_setup import open_source
from palestra.training.loops.lr_schedule import adam_at
from palestra.types import AdamParams, LoraConfig
from palestra.types.rollouts import Group, GroupRequest
from palestra.util.json_types import JsonObject

LOOKS = 16
"""How often a run is evaluated until its tokens are spent."""
RANK = 8
CHAIN_ROLLOUT: JsonObject = {"group_size": 8, "groups_per_step": 2, "max_tokens": 4, "max_context": 512}
FORM_STEPS = 80
"""Of imitation, after which a random model says a door's letter and a number drawn by a coin."""


class World(Struct, frozen=True):
    """What is played, by which model, for how many tokens."""

    environment: str
    rollout: JsonObject
    budget: int
    """Sampled tokens of a run, those of forks included."""
    eval_tasks: int
    success: float = 0.8
    """An evaluation with this mean reward has reached the world's aim."""

    @property
    def is_chain(self) -> bool:
        return self.environment.startswith("worlds.chain:")


WORLDS = {
    "chain": World("worlds.chain:Chain", CHAIN_ROLLOUT, budget=24_000, eval_tasks=32),
    "turn_rewards": World("worlds.chain:TurnRewardChain", CHAIN_ROLLOUT, budget=24_000, eval_tasks=32),
    "corridor": World("worlds.chain:Corridor", CHAIN_ROLLOUT, budget=24_000, eval_tasks=32),
    "locks": World("worlds.chain:Locks", CHAIN_ROLLOUT, budget=24_000, eval_tasks=32),
    "stockroom": World(
        environment="stockroom",
        rollout={"group_size": 8, "groups_per_step": 4, "max_tokens": 48, "max_context": 640},
        budget=32_000,
        eval_tasks=64,
    ),
}


class CreditJob(Struct, frozen=True):
    world: str
    method: str
    settings: JsonObject
    """The parts of a run's config that make the method."""
    lr: float
    seed: int


class CreditResult(Struct, frozen=True):
    curve: list[tuple[int, float]]
    """Sampled tokens so far, and the mean reward of an evaluation then."""
    steps: int
    tokens: int
    fork_tokens: int
    seconds: float

    def tokens_to(self, success: float) -> int | None:
        """The tokens after which evaluations reached it; None: never."""
        return next((tokens for tokens, reward in self.curve if reward >= success), None)

    def reward_after(self, tokens: float) -> float:
        """That of the last evaluation until then."""
        return [reward for at, reward in self.curve if at <= tokens][-1]


class Setting(Struct, frozen=True):
    """A loaded model, and the adapter that all runs in its world begin with."""

    backend: TorchBackend
    tokenizer: ChatTokenizer
    first: ModelImage | None


def setting_of(world: str) -> Setting:
    return chain_setting() if WORLDS[world].is_chain else ephebe_setting()


@cache
def ephebe_setting() -> Setting:
    folder = model_folder(TrainModel(name=EPHEBE))
    return Setting(TorchBackend(TorchConfig(model=str(folder))), ChatTokenizer.load(folder), None)


@cache
def chain_setting() -> Setting:
    """A random model that has imitated conversations in which a coin answers."""
    folder = Path(tempfile.mkdtemp(prefix="palestra-credit-"))
    make_random_model(folder, shape="micro", seed=3)
    backend, tokenizer = TorchBackend(TorchConfig(model=str(folder))), ChatTokenizer.load(folder)
    policy = InProcessPolicy(backend, LoraConfig(rank=RANK, seed=0))
    examples = [encode_example(tokenizer, Conversation(one), 2048).sequence for one in chain.answers(256)]
    for sequence in examples:
        sequence.advantages = [one / sum(sequence.mask) / 16 for one in sequence.advantages]
    for step in range(FORM_STEPS):
        batch, rate = examples[16 * step % 256 :][:16], 0.01 * (1 - step / FORM_STEPS)
        asyncio.run(policy.update(batch, "cross_entropy", {}, AdamParams(learning_rate=rate)))
    image = backend.image(policy.adapter)
    backend.free(policy.adapter)
    return Setting(backend, tokenizer, ModelImage({"weights": image.tensors["weights"]}, 0))


def config_of(job: CreditJob) -> GrpoConfig:
    world = WORLDS[job.world]
    parts: dict[str, Any] = {
        "environments": [{"name": world.environment}],
        "rollout": world.rollout,
        "data": {"zero_variance": "drop", "max_sequence_length": world.rollout["max_context"]},
        "optimizer": {"lr": job.lr, "schedule": "constant", "warmup_steps": 0},
        "seed": job.seed,
    }
    for name, section in job.settings.items():
        parts[name] = {**parts.get(name, {}), **section}
    return GrpoConfig.model_validate(parts)


async def run_cell(job: CreditJob, setting: Setting) -> CreditResult:
    began_s = time.perf_counter()
    config, world = config_of(job), WORLDS[job.world]
    lora = LoraConfig(rank=RANK, seed=job.seed)
    policy = InProcessPolicy(setting.backend, lora)
    if setting.first is not None:
        setting.backend.free(policy.adapter)
        policy.adapter = setting.backend.restore(lora, setting.first)
    with EnvironmentSet(config.environments, env_threads=4, env_timeout_s=60) as environments:
        source = open_source(config, setting.tokenizer, environments)
        watching = open_source(config, setting.tokenizer, environments, RolloutSettings.of(config.rollout, 1.0))
        ((_, train_tasks),) = environments.tasks("train")
        ((_, eval_tasks),) = environments.tasks("eval")
        requests = RequestMaker(TaskOrder([(1.0, train_tasks)], job.seed), job.seed, config.rollout.group_size)
        collector = Collector(config, source, requests, Silence())
        looked_at = [
            GroupRequest(id=f"e{place}", task=task, step=0, seeds=group_seeds(1, "look", job.seed, place))
            for place, task in enumerate(islice(cycle(eval_tasks), world.eval_tasks))
        ]

        async def look(sampler: InProcessSampler) -> float:
            return mean_reward([group async for group in watching.play(looked_at, sampler)])

        sampler = await policy.publish(0)
        tokens = fork_tokens = step = 0
        curve = [(0, await look(sampler))]
        while tokens < world.budget:
            groups = await collector.collect(step, sampler)
            tokens += sum(one.response_length for group in groups for one in group.all_rollouts)
            fork_tokens += sum(f.response_length for group in groups for one in group.rollouts for f in one.forks)
            adam = adam_at(config.optimizer, step, config.steps)
            for minibatch in build_batch(groups, config).minibatches:
                await policy.update(minibatch, config.algorithm.loss, {}, adam)
            step += 1
            sampler = await policy.publish(step)
            if tokens >= len(curve) * world.budget / LOOKS:
                curve.append((tokens, await look(sampler)))
        await source.close()
        await watching.close()
    setting.backend.free(sampler.weights)
    setting.backend.free(policy.adapter)
    return CreditResult(curve, step, tokens, fork_tokens, time.perf_counter() - began_s)


def mean_reward(groups: Sequence[Group]) -> float:
    rewards = [one.reward or 0.0 for group in groups for one in group.rollouts if is_counted(one)]
    return sum(rewards) / max(1, len(rewards))
