"""Opens a run from its config, and closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.picture_files import TEXT_ONLY
from palestra.config.train import DistillConfig, DpoConfig, GrpoConfig, PreferenceLoss, RunConfig, SftConfig
from palestra.data.conversations import CHECKED_ROWS
from palestra.data.errors import DatasetError
from palestra.endpoints.aliases import RunAlias
from palestra.endpoints.model_folders import SetupError, check_model, model_folder, tokenizer_of
from palestra.endpoints.own_server import own_server
from palestra.environments.environment_set import EntryTasks
from palestra.environments.errors import JudgeError
from palestra.rollouts.agents.setup import check_agent
from palestra.rollouts.continued_samples import ContinuedSamples
from palestra.rollouts.policy_sampler import PolicyError, SamplingError, ServerUnreachable
from palestra.rollouts.reachability import until_unreachable, wait_reachable
from palestra.rollouts.sources import RolloutSourceError
from palestra.runs.advisories import RunAdvisor
from palestra.runs.listener import RunListener, Stage
from palestra.runs.reader import ENGINE, IMITATION, RunError, RunStatus
from palestra.runs.run_state import RunState, StateError
from palestra.runs.saved_checkpoints import CheckpointError, SelectedCheckpoint, find_selected, values_by_step
from palestra.runs.writer import EventKind, RunFolder
from palestra.training.auto_lr import with_learning_rates
from palestra.training.custom_functions import CustomReward, FunctionError, check_functions
from palestra.training.loops.dpo import check_dpo, run_dpo
from palestra.training.loops.grpo_setup import open_environments, run_grpo
from palestra.training.loops.imitation import ImitationNotes, check_imitation, sft_config, write_conversations
from palestra.training.loops.kto import check_kto, run_kto
from palestra.training.loops.sft import check_sft, run_sft
from palestra.training.policy import PolicyStart
from palestra.training.run_checkpoints import RunCheckpoints
from palestra.training.session import TrainingSession
from palestra.training.teachers import check_teachers
from palestra.training.tinker_policy import TinkerPolicy
from palestra.training.trackers import Trackers, open_trackers
from palestra.training.webhook import report_end
from palestra.util.json_types import JsonObject
from palestra.util.own_process import guarded
from palestra.util.picture_parts import has_pictures

RUN_ERRORS = (
    *(SetupError, FunctionError, ChatError, DatasetError, JudgeError, PolicyError, SamplingError),
    *(StateError, RolloutSourceError, RunError),
)
"""Errors that may end a run and are not bugs of Palestra."""


async def train(config: RunConfig, run: RunFolder, listener: RunListener, own_url: str | None = None) -> JsonObject:
    """Trains from the newest checkpoint in the run's folder, or from the beginning, and returns the summary. An error
    that ends the run early is recorded and then raised. `own_url`: the server whose state is in the run's folder, where
    it runs already; without it and `config.server`, one is started."""
    try:
        async with open_session(config, run, listener, own_url) as session:
            status = await loop_of(session.config, session)
    except BaseException as error:
        stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        run.event(EventKind.ERROR, error=f"{type(error).__name__}: {error}")
        status = RunStatus.STOPPED if stopped else RunStatus.FAILED
        facts: JsonObject = {"error": str(error) or type(error).__name__, **selection_facts(run)}
        report_end(config, run, run.finish(status, **facts))
        raise
    summary = run.finish(status, **selection_facts(run))
    await asyncio.to_thread(report_end, config, run, summary)
    return summary


def check(config: RunConfig) -> None:
    """Checks everything that can be checked before anything is started or written. Raises ValueError, or
    RolloutSourceError if an agent cannot play here."""
    folder = tokenizer_folder(config)
    if config.server is None:
        check_model(model_folder(config.model))
    tokenizer = ChatTokenizer.load(folder)
    match config:
        case GrpoConfig():
            check_functions(config.algorithm)
            if config.reward is not None:
                CustomReward.load(config.reward)
            if config.rollouts == "agent":
                check_agent(config.agent, config.environments)
            with open_environments(config) as environments:
                for split in ("train", "eval"):
                    check_tasks(environments.tasks(split), tokenizer)
            if isinstance(config, DistillConfig):
                check_teachers(config, tokenizer)
            if config.imitation is not None:
                check_imitation(config, config.imitation, tokenizer)
        case SftConfig():
            check_sft(config, tokenizer)
        case DpoConfig(loss=PreferenceLoss.KTO):
            check_kto(config, tokenizer)
        case DpoConfig():
            check_dpo(config, tokenizer)


def check_tasks(found: Sequence[EntryTasks], tokenizer: ChatTokenizer) -> None:
    """Raises SetupError if tasks show pictures to a model that reads text only."""
    if tokenizer.card is not None:
        return
    for entry, tasks in found:
        if any(has_pictures(task.prompt) for task in tasks[:CHECKED_ROWS]):
            raise SetupError(f"environment {entry.name}: {TEXT_ONLY}")


def loop_of(config: RunConfig, session: TrainingSession) -> Coroutine[Any, Any, RunStatus]:
    match config:
        case GrpoConfig():
            return run_grpo(config, session)
        case SftConfig():
            return run_sft(config, session)
        case DpoConfig(loss=PreferenceLoss.KTO):
            return run_kto(config, session)
        case DpoConfig():
            return run_dpo(config, session)
        case _:
            raise SetupError(f"there is no training loop for a config of kind {type(config).__name__}")


def server_of(
    config: RunConfig, folder: Path, note: Callable[[str], None], port: int = 0
) -> AbstractAsyncContextManager[str]:
    """The server of a run, or of a sweep, whose state is in `folder`."""
    base = config.model
    return own_server(
        *(str(model_folder(base)), base.name, folder / ENGINE, folder / "logs" / "server.log", note),
        device=base.device,
        weights=base.weights,
        memory=base.memory,
        runs=folder.parent,
        port=port,
    )


@asynccontextmanager
async def open_session(
    config: RunConfig, run: RunFolder, listener: RunListener, own_url: str | None = None
) -> AsyncIterator[TrainingSession]:
    listener.stage(Stage.START, 0, 0)
    tokenizer = ChatTokenizer.load(tokenizer_folder(config))
    async with AsyncExitStack() as stack:
        url, name = config.server or own_url, config.model.name
        if url is None:
            url = await stack.enter_async_context(server_of(config, run.path, listener.note))
        else:
            await wait_reachable(url, config.server_patience_s, listener.note)
            stack.enter_context(guarded(until_unreachable(url, config.server_patience_s), ServerUnreachable))
        config = await with_learning_rates(config, config.server, listener)
        checkpoints = open_checkpoints(config, run)
        state = checkpoints.newest()
        adapter_settings = {"rank": config.model.rank, "seed": config.seed, "train_unembed": config.model.train_unembed}
        if state is None:
            address = await first_weights(config, run, listener, url)
            listener.stage(Stage.START, 0, 0)  # again, after an imitation
            start = PolicyStart(**adapter_settings, address=address, with_optimizer=False)
        else:
            start = PolicyStart(**adapter_settings, address=state.address)
            listener.note(f"continuing after step {state.step}")
        alias = await stack.enter_async_context(RunAlias.open(url, config.alias, listener.note))
        replays = isinstance(config, GrpoConfig) and config.algorithm.replay_routing
        continued = None
        if isinstance(config, GrpoConfig) and config.asynchronous.continues:
            keeps = config.asynchronous.older_keys == "keep"
            opening = ContinuedSamples.open(url, listener.note, keeps_keys=keeps)
            continued = await stack.enter_async_context(opening)
        policy = await stack.enter_async_context(
            TinkerPolicy.open(url, name, start, alias, replay_routing=replays, continued=continued)
        )
        run.change_config(config)  # only now: a resume that cannot begin must not change what is saved
        trackers = stack.enter_context(reporting_the_end(open_trackers(config.trackers, run)))
        if state is not None and state.is_borrowed:
            state.is_borrowed = False
            await checkpoints.save(state, policy)
        try:
            yield TrainingSession(
                config=config,
                policy=policy,
                tokenizer=tokenizer,
                run=run,
                checkpoints=checkpoints,
                state=state or RunState(),
                listener=listener,
                trackers=trackers,
                url=url,
                advisor=RunAdvisor(run),
            )
        finally:
            listener.stage(Stage.END, 0, 0)
            selected = selected_checkpoint(run)
            policy.select(selected.saved.address if selected is not None and selected.metric is not None else None)


def open_checkpoints(config: RunConfig, run: RunFolder) -> RunCheckpoints:
    rule = config.checkpoint
    values = values_by_step(run, rule.keep_best) if rule.keep_best is not None else {}
    return RunCheckpoints(run.path / "checkpoints", rule.keep, rule.keep_best, values)


def selected_checkpoint(run: RunFolder) -> SelectedCheckpoint | None:
    """The checkpoint that the run stands for when it has ended; None if there is none that can be read."""
    try:
        return find_selected(run)
    except CheckpointError:
        return None


def selection_facts(run: RunFolder) -> JsonObject:
    """Returns what the summary says about the selected checkpoint."""
    selected = selected_checkpoint(run)
    return {} if selected is None else {"selected": selected.facts}


async def first_weights(config: RunConfig, run: RunFolder, listener: RunListener, url: str) -> str | None:
    """Returns the weights that the config names, or those learned by imitation: an SFT run in the run's folder, at the
    same server, which is continued if it was interrupted."""
    if not isinstance(config, GrpoConfig) or config.imitation is None:
        return config.model.start_from
    imitation, path = config.imitation, run.path / IMITATION
    listener.note(f"imitation first, {imitation.steps} steps; its run is in {path}")
    await asyncio.to_thread(write_conversations, config, imitation, path / "data.jsonl")
    sft = sft_config(config, imitation, path / "data.jsonl", url)
    is_begun = (path / "config.json").exists()
    with RunFolder.open(path) if is_begun else RunFolder.create(run.path, IMITATION, sft) as within:
        await train(sft, within, ImitationNotes(listener, sft.steps))
    newest = RunCheckpoints(path / "checkpoints", keep=1).newest()
    if newest is None:  # the run was asked to stop before the first step
        return config.model.start_from
    run.event(EventKind.IMITATED, steps=newest.step, address=newest.address)
    return newest.address


@contextmanager
def reporting_the_end(trackers: Trackers) -> Iterator[Trackers]:
    status = RunStatus.FAILED
    try:
        yield trackers
        status = RunStatus.DONE
    except (asyncio.CancelledError, KeyboardInterrupt):
        status = RunStatus.STOPPED
        raise
    finally:
        trackers.finish(status)


def tokenizer_folder(config: RunConfig) -> Path:
    return tokenizer_of(config.model)
