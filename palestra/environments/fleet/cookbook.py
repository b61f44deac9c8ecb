"""Fleet tasks for the loops of tinker-cookbook, where that is installed.

For example:

    from palestra.environments.fleet.cookbook import FleetDatasetBuilder
    builder = FleetDatasetBuilder(
        tasks_file="platform:keys?difficulty=0b", model_name_for_tokenizer=model, batch_size=8, group_size=8
    )
    train.Config(model_name=model, dataset_builder=builder, ...)    # tinker_cookbook.rl.train
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.environments.fleet.env import FleetTaskEnv
from palestra.environments.guarded_calls import error_text
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonMapping

try:
    import chz
    from tinker import ModelInput
    from tinker_cookbook.model_info import get_recommended_renderer_name
    from tinker_cookbook.renderers import Message, Renderer, get_renderer
    from tinker_cookbook.rl.types import (
        STOP_METRIC_PREFIX,
        Env,
        EnvGroupBuilder,
        InitialObservationOverflow,
        RLDataset,
        RLDatasetBuilder,
        StepResult,
        StopReason,
        Trajectory,
    )
    from tinker_cookbook.tokenizer_utils import get_tokenizer
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"this module needs {e.name}; to install: pip install tinker-cookbook", name=e.name
    ) from None

log = logging.getLogger(__name__)


class FleetEnv(Env):
    """One episode. However it ends, the verifier runs once; the instance is closed at the end."""

    def __init__(self, env: FleetTaskEnv, renderer: Renderer, max_trajectory_tokens: int | None = None) -> None:
        self._env, self._renderer = env, renderer
        self._max_tokens = max_trajectory_tokens
        self._messages: list[Message] = []
        self.is_unknown = False
        """Whether the verifier failed: its 0 is not a reward. The group's builder corrects it."""

    async def initial_observation(self) -> Any:
        messages, _ = await self._env.init_async([])
        self._messages = [Message(role=one["role"], content=one["content"]) for one in messages]
        observation = self._rendered()
        if self._is_too_long(observation):
            reason = (
                f"the prompt of {self._env.task_key} has {observation.length} tokens, but the limit is "
                f"{self._max_tokens}"
            )
            reward, metrics = await self._end(StopReason.MAX_TOKENS, await self._env.grade_async())
            return InitialObservationOverflow(reward=reward, metrics=metrics, logs={"overflow": reason})
        return observation, self._renderer.get_stop_sequences()

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        is_cut = (extra or {}).get("stop_reason") == "length"
        message, termination = self._renderer.parse_response(action)
        if is_cut or not termination.is_clean:
            return await self._ended(StopReason.MAX_TOKENS if is_cut else StopReason.PARSE_ERROR)
        step = await self._env.step_async(text_of(message))
        if step["done"]:
            is_last = step["metadata"]["done_reason"] == "max_turns"
            reward, metrics = await self._end(StopReason.MAX_TURNS if is_last else StopReason.COMPLETED, step["reward"])
            return self._result(reward, metrics)
        # After the model's context tools dropped turns, the history differs from what was sampled.
        kept = step["metadata"].get("modified_chat_history")
        messages = [Message(role=one["role"], content=one["content"]) for one in kept or step["observations"]]
        self._messages = messages if kept else [*self._messages, message, *messages]
        observation = self._rendered()
        if self._is_too_long(observation):
            return await self._ended(StopReason.CONTEXT_OVERFLOW)
        stop = self._renderer.get_stop_sequences()
        return StepResult(reward=0.0, episode_done=False, next_observation=observation, next_stop_condition=stop)

    async def close(self) -> None:
        """May be called at any time, and repeatedly."""
        await self._env.close_async()

    async def _ended(self, reason: StopReason) -> StepResult:
        """Ends the episode from our side: what was done so far counts."""
        return self._result(*await self._end(reason, await self._env.grade_async()))

    async def _end(self, reason: StopReason, reward: float | None) -> tuple[float, dict[str, float]]:
        self.is_unknown = reward is None
        await self.close()
        counted = {k: v for k, v in self._env.get_metrics().items() if isinstance(v, int | float)}
        return reward or 0.0, {**counted, f"{STOP_METRIC_PREFIX}{reason}": 1.0}

    def _result(self, reward: float, metrics: dict[str, float]) -> StepResult:
        stop = self._renderer.get_stop_sequences()
        return StepResult(
            reward=reward,
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=stop,
            metrics=metrics,
            logs={"task_key": self._env.task_key},
        )

    def _rendered(self) -> ModelInput:
        """Renders in this thread: episodes share the renderer, and its tokenizer is not thread-safe."""
        return self._renderer.build_generation_prompt(self._messages)

    def _is_too_long(self, observation: ModelInput) -> bool:
        return self._max_tokens is not None and observation.length >= self._max_tokens


def text_of(message: Message) -> str:
    """Returns the text as `fleet_task` reads it: renderers separate reasoning and calls, some of them in their own
    format."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [
        f"<think>{part['thinking']}</think>" if part["type"] == "thinking" else part.get("text", "") for part in parts
    ]
    for call in message.get("tool_calls") or []:
        named = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        texts.append(f"<tool_call>{json.dumps(named, ensure_ascii=False)}</tool_call>")
    return "".join([*texts, *(call.raw_text for call in message.get("unparsed_tool_calls") or [])])


@dataclass
class FleetGroupBuilder(EnvGroupBuilder):
    """Everything it holds before `make_envs` can be pickled."""

    task: Task
    env_config: JsonMapping
    renderer: Renderer
    group_size: int
    max_turns: int | None = None
    max_trajectory_tokens: int | None = None
    _made: list[FleetEnv] = field(default_factory=list, init=False, repr=False)

    async def make_envs(self) -> Sequence[FleetEnv]:
        turns = {} if self.max_turns is None else {"max_turns": self.max_turns}
        made = [
            FleetEnv(
                FleetTaskEnv(dict(self.env_config), {**self.task.extras, **turns}),
                self.renderer,
                self.max_trajectory_tokens,
            )
            for _ in range(self.group_size)
        ]
        self._made += made
        return made

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, dict[str, float]]]:
        """Gives an episode with an unknown grade the mean of the others: then it has no advantage, and does not change
        the mean."""
        pairs = list(zip(trajectory_group, env_group, strict=True))
        known = [sum(step.reward for step in one.transitions) for one, env in pairs if not env.is_unknown]
        mean = sum(known) / len(known) if known else 0.0
        return [(mean if env.is_unknown else 0.0, {}) for _, env in pairs]

    async def cleanup(self) -> None:
        made, self._made = self._made, []
        for problem in await asyncio.gather(*(env.close() for env in made), return_exceptions=True):
            if problem is not None:
                log.warning("an instance of %s did not close: %s", self.task.id, error_text(problem))

    def logging_tags(self) -> list[str]:
        """Returns tags by which their metrics are split: the app, and the level if the task has one."""
        named = (self.task.extras.get(name) for name in ("data_source", "level"))
        return ["fleet_task", *(str(name) for name in named if name)]


class FleetDataset(RLDataset):
    """Tasks in an order that depends on the seed; what is left over at the end of an epoch is left out."""

    def __init__(self, tasks: Sequence[Task], batch_size: int, seed: int, group: JsonMapping) -> None:
        if len(tasks) < batch_size:
            raise ValueError(f"there are {len(tasks)} tasks, fewer than a batch of {batch_size}")
        self._tasks, self._batch_size, self._group = tasks, batch_size, group
        self._order = random.Random(seed).sample(range(len(tasks)), len(tasks))

    def get_batch(self, index: int) -> Sequence[FleetGroupBuilder]:
        chosen = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return [FleetGroupBuilder(task=self._tasks[place], **self._group) for place in chosen]

    def __len__(self) -> int:
        return len(self._tasks) // self._batch_size


@chz.chz
class FleetDatasetBuilder(RLDatasetBuilder):
    """Fleet tasks as a dataset of the Tinker cookbook's training loop."""

    tasks_file: str
    """As in env_config: a file, or `platform:mail?difficulty=0,1&count=200`."""
    model_name_for_tokenizer: str
    batch_size: int
    """Number of groups."""
    group_size: int
    renderer_name: str | None = None
    env_config: JsonMapping = chz.field(default_factory=dict)
    max_turns: int | None = None
    """By default each task's own."""
    max_trajectory_tokens: int | None = None
    """A longer conversation ends, and is graded as it stands."""
    eval_tasks: int = 0
    """Number of tasks that are held out, each played once; 0: no evaluation."""
    seed: int = 0

    async def __call__(self) -> tuple[FleetDataset, FleetDataset | None]:
        """Raises ValueError if there are too few tasks."""
        config = {**self.env_config, "tasks_file": self.tasks_file}
        name = self.renderer_name or get_recommended_renderer_name(self.model_name_for_tokenizer)
        group = {
            "env_config": config,
            "renderer": get_renderer(name, get_tokenizer(self.model_name_for_tokenizer)),
            "group_size": self.group_size,
            "max_turns": self.max_turns,
            "max_trajectory_tokens": self.max_trajectory_tokens,
        }
        train = FleetDataset(FleetTaskEnv.tasks("train", config), self.batch_size, self.seed, group)
        if not self.eval_tasks:
            return train, None
        kept = FleetTaskEnv.tasks("eval", config)[: self.eval_tasks]
        if len(kept) < self.eval_tasks:
            raise ValueError(f"{self.tasks_file} has {len(kept)} tasks for evaluation, not {self.eval_tasks}")
        return train, FleetDataset(kept, len(kept), self.seed, {**group, "group_size": 1})
