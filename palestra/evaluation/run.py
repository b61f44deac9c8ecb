"""An evaluation from its config to its folder, which has the form of a training run's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from palestra.config.environment_entries import EnvironmentEntry
from palestra.config.evaluate import EvaluationConfig
from palestra.endpoints.models import ModelPlace, checkpoint_of, open_models
from palestra.environments.bundled.answers import Answers
from palestra.environments.environment_set import EnvironmentSet
from palestra.environments.errors import JudgeError, TaskFileError
from palestra.environments.judging import Judges
from palestra.evaluation.players import open_players
from palestra.rollouts.agents.setup import check_agent
from palestra.rollouts.endpoint.player import EndpointPlayer
from palestra.rollouts.eval_metrics import eval_metrics
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.score_metrics import score_metrics
from palestra.rollouts.seeds import group_seeds
from palestra.rollouts.sources import RolloutSourceError
from palestra.runs.listener import RunListener, Stage
from palestra.runs.reader import Part, RunStatus
from palestra.runs.record_files import LineFile, read_lines
from palestra.runs.writer import EventKind, RunFolder
from palestra.types.rollouts import PROMPT_TOKENS, SAMPLED_TOKENS, Group, GroupRequest, Rollout, Task
from palestra.util.json_types import JsonObject

STEP = 0
PLAYED = "played.jsonl"
"""Rollouts that have ended, in the order in which they did; a resume plays the others."""
ANSWERS = "answers"
"""The environment of files of questions."""
KS = (1, 2, 4, 8, 16, 32, 64)


def open_environments(config: EvaluationConfig) -> EnvironmentSet:
    return EnvironmentSet(config.environments, env_threads=16, env_timeout_s=config.env_timeout_s)


def model_place(config: EvaluationConfig, key: str | None) -> ModelPlace:
    return ModelPlace(server=config.server, api=config.api, key=key, runs=config.runs, device=config.device)


def checkpoint_facts(config: EvaluationConfig, key: str | None) -> JsonObject:
    """Returns which checkpoint of which run a model's name means now, for its record: `RUN@best` means another one
    later. Empty for a model that is no run's."""
    saved = checkpoint_of(config.model, model_place(config, key))
    return {} if saved is None else {"checkpoint": {"run": saved.run.name, "step": saved.step}}


def tasks_of(config: EvaluationConfig, environments: EnvironmentSet) -> list[Task]:
    """Held-out tasks; of an environment that has none, those it trains on; or those that the config names. Raises
    TaskFileError if there is no task of a name."""
    if config.task_ids is not None:
        return _named_tasks(config.task_ids, environments)
    return [task for _, tasks in _all_tasks(config, environments) for task in tasks[: config.tasks]]


def _all_tasks(
    config: EvaluationConfig, environments: EnvironmentSet
) -> Iterator[tuple[EnvironmentEntry, Sequence[Task]]]:
    held_out = {entry.name: tasks for entry, tasks in environments.tasks("eval")}
    for entry in config.environments:
        yield entry, held_out.get(entry.name) or _training_tasks(environments, entry)


def _named_tasks(names: Sequence[str], environments: EnvironmentSet) -> list[Task]:
    found: dict[str, Task] = {}
    everything = (task for split in ("eval", "train") for _, tasks in environments.tasks(split) for task in tasks)
    for task in everything:
        for name in (task.id, f"{task.environment}/{task.id}"):
            if name in names:
                found.setdefault(name, task)
        if len(found) == len(set(names)):
            return [found[name] for name in dict.fromkeys(names)]
    missing = next(name for name in names if name not in found)
    raise TaskFileError(f"no environment of this config has a task {missing!r} (task_ids)")


def check_tasks(config: EvaluationConfig, environments: EnvironmentSet) -> None:
    """Raises ValueError if there are no tasks, or if questions of a file have no answers to compare with, and
    RolloutSourceError if the agent that is to play them cannot do so here."""
    if config.agent is not None:
        check_agent(config.agent, config.environments)
    if not (tasks := tasks_of(config, environments)):
        raise ValueError("these environments have no tasks; name a file: environments.0.eval_tasks=FILE")
    for number, task in enumerate(tasks, 1):
        if task.environment == ANSWERS:
            try:
                Answers(None, task.extras)
            except ValueError as error:
                raise TaskFileError(f"task {number} (id {task.id!r}): {error}") from None


def _training_tasks(environments: EnvironmentSet, entry: EnvironmentEntry) -> Sequence[Task]:
    return next((tasks for one, tasks in environments.tasks("train") if one.name == entry.name), ())


async def evaluate(config: EvaluationConfig, run: RunFolder, listener: RunListener, key: str | None) -> JsonObject:
    """Plays what is left and returns the summary. An error that ends it early is recorded and then raised."""
    try:
        with open_environments(config) as environments:
            for entry, tasks in _all_tasks(config, environments):
                if len(tasks) > config.tasks and config.task_ids is None:
                    listener.note(f"{entry.name}: the first {config.tasks} of {len(tasks)} tasks; tasks=N for more")
            requests = [_request(config, task) for task in tasks_of(config, environments)]
            if _is_complete(config, run, requests):  # resumed beside others that are not
                return run.finish(RunStatus.DONE)
            rollouts = await _play(config, run, environments, requests, listener, key)
            groups = [_group(request, rollouts) for request in requests]
            await _judge(config, run, groups)
            metrics = _metrics(config, groups, environments)
    except BaseException as error:
        stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        run.event(EventKind.ERROR, error=f"{type(error).__name__}: {error}")
        run.finish(RunStatus.STOPPED if stopped else RunStatus.FAILED, error=str(error) or type(error).__name__)
        raise
    run.write_eval(STEP, groups, metrics)
    listener.evaluated(STEP, metrics)
    if not any(rollout.has_failed for rollout in rollouts.values()):  # a resume plays only these again
        (run.path / PLAYED).unlink(missing_ok=True)
    return run.finish(RunStatus.DONE)


async def _play(
    config: EvaluationConfig,
    run: RunFolder,
    environments: EnvironmentSet,
    requests: Sequence[GroupRequest],
    listener: RunListener,
    key: str | None,
) -> dict[str, Rollout]:
    rollouts = _played(run.path / PLAYED)
    total = len(requests) * config.samples
    left = [(request, i) for request in requests for i in range(config.samples) if f"{request.id}-{i}" not in rollouts]
    listener.stage(Stage.EVAL, len(rollouts), total)
    if not left:
        return rollouts
    settings = RolloutSettings(
        max_tokens=config.max_tokens,
        max_context=config.max_context,
        temperature=config.temperature,
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
    )
    ended = LineFile(run.path / PLAYED)
    try:
        log = run.path / "logs" / "server.log"
        place = model_place(config, key)
        async with (
            open_models([config.model], place, run.path / "engine", log, listener.note) as [endpoint],
            open_players(config.environments, config.agent, endpoint, settings, run.path, listener.note) as players,
        ):
            player = EndpointPlayer(endpoint, environments, settings, config.patience_s, players)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(player.play(request, index)) for request, index in left]
                for task in asyncio.as_completed(tasks):
                    rollout = await task
                    rollouts[rollout.id] = rollout
                    ended.append(msgspec.to_builtins(rollout))
                    listener.stage(Stage.EVAL, len(rollouts), total)
    except* Exception as errors:
        raise errors.exceptions[0] from None
    finally:
        ended.close()
    return rollouts


async def _judge(config: EvaluationConfig, run: RunFolder, groups: Sequence[Group]) -> None:
    """Lets the judges that the config names grade what was played. Raises RolloutSourceError."""
    try:
        async with Judges.open(config.judges, config.environments, run.path) as judges:
            await asyncio.gather(*map(judges.grade, groups))
    except JudgeError as error:
        raise RolloutSourceError(str(error)) from None


def _played(file: Path) -> dict[str, Rollout]:
    """Returns the rollouts that were played before. A failure says nothing about the model, so it is played again."""
    found = [msgspec.convert(row, Rollout) for row in read_lines(file)]
    return {rollout.id: rollout for rollout in found if not rollout.has_failed}


def _is_complete(config: EvaluationConfig, run: RunFolder, requests: Sequence[GroupRequest]) -> bool:
    """Whether an earlier start has played and recorded everything."""
    if (run.path / PLAYED).exists() or not run.read_metrics():
        return False
    recorded = {row["id"] for row in run.read_rollouts(STEP, Part.EVAL)}
    return {f"{request.id}-{index}" for request in requests for index in range(config.samples)} <= recorded


def _request(config: EvaluationConfig, task: Task) -> GroupRequest:
    seeds = group_seeds(config.samples, config.seed, "eval", task.environment, task.id)
    return GroupRequest(id=f"eval-{task.environment}-{task.id}", task=task, step=STEP, seeds=seeds)


def _group(request: GroupRequest, rollouts: dict[str, Rollout]) -> Group:
    own = [rollouts[f"{request.id}-{index}"] for index in range(len(request.seeds))]
    return Group(id=request.id, task=request.task, step=STEP, rollouts=own)


def _metrics(config: EvaluationConfig, groups: Sequence[Group], environments: EnvironmentSet) -> dict[str, float]:
    ks = [k for k in KS if k <= config.samples]
    found = score_metrics(groups, ks, config.success)
    found |= eval_metrics(groups, ks, config.success, environments.aggregate)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for name in (PROMPT_TOKENS, SAMPLED_TOKENS):
        found[f"eval/{name}"] = sum(rollout.metrics.get(name, 0.0) for rollout in rollouts)
    found["eval/length_mean"] = found[f"eval/{SAMPLED_TOKENS}"] / max(1, len(rollouts))
    return found
