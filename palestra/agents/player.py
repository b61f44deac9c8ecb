"""Plays an episode of a coding task with an agent in a sandbox."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from palestra.agents.endings import AgentEnding, AgentRun, attempt_of
from palestra.agents.installation import Installation, find_installation
from palestra.agents.program import AgentTask
from palestra.agents.records import PATCH, VERIFIER, EpisodeRecord
from palestra.agents.registry import find_agent
from palestra.coding import CodingTask, CodingVerdict, TaskError, VerifierError, diff, prepare, task_spec, verify
from palestra.config.agents import AgentConfig
from palestra.episodes import (
    AsyncEpisode,
    AsyncEpisodeClient,
    EpisodeApiError,
    EpisodeError,
    EpisodeResult,
    NotPlayedHere,
)
from palestra.sandbox import EndpointProxy, Sandbox, SandboxError, SandboxUnavailable, backend, sandbox
from palestra.sandbox.spec import OWN_FOLDERS, SEARCH_PATH
from palestra.types.episodes import ResultKey
from palestra.types.timelines import AttemptTimeline, turn_times
from palestra.util.json_types import JsonObject

log = logging.getLogger(__name__)
T = TypeVar("T")

OF_THIS_MACHINE = ("local",)
"""Backends whose sandboxes have the programs of this machine. In others an agent is found by its name."""
LOOK_S = 0.5  # how soon an agent is ended whose episode was lost
MOST_LOG = 16 * 1024 * 1024
MOST_SHOWN = 64 * 1024
"""Characters of the diff, and of what the verifier printed last, that are sent with the result; the record has all."""
PUT = 'mkdir -p "$HOME/$(dirname "$0")" && cat > "$HOME/$0"'
FAILURES = {AgentEnding.TIMEOUT: "timeout"}
"""Types of errors that the trainer knows by name; others are failures of the environment."""


class EpisodeLost(Exception):
    """The server has given the episode to another player, or cancelled it."""


def installation_of(config: AgentConfig, tasks: Iterable[CodingTask]) -> Installation:
    """Returns where the agent is that plays these tasks. Raises UnknownAgentProgram, SandboxError and
    SandboxUnavailable if it can play nothing here."""
    agent = find_agent(config.command)
    is_here = config.sandbox in OF_THIS_MACHINE
    installed = find_installation(agent.program) if is_here else Installation(agent.program)
    problem = backend(config.sandbox).problem()
    if is_here:
        shown = replace(installed, folders=(*installed.folders, *map(str, config.visible)))
        problem = problem or shown.hidden_by((*OWN_FOLDERS, *{task.workdir for task in tasks}))
    if problem:
        raise SandboxUnavailable(problem)
    return installed


class AgentPlayer:
    """Plays episodes for the client library's pool: call it with an episode. Raises UnknownAgentProgram, SandboxError
    and SandboxUnavailable when it is made, if it could play nothing here."""

    def __init__(
        self,
        config: AgentConfig,
        tasks: Mapping[str, CodingTask],
        folder: Path,
        client: AsyncEpisodeClient,
    ) -> None:
        """`folder` gets a folder for each episode."""
        self._config, self._tasks, self._folder = config, tasks, folder
        self._client = client
        self._agent = find_agent(config.command)
        self._installed = installation_of(config, tasks.values())

    async def __call__(self, episode: AsyncEpisode) -> EpisodeResult | None:
        task = self._tasks.get(episode.task.id)
        if task is None:
            raise NotPlayedHere(f"there is no task {episode.task.id!r} in the folder of tasks")
        record = EpisodeRecord(self._folder, episode.id, episode.attempt)
        try:
            result = await _while_held(episode, self._play(episode, task, record))
        except EpisodeLost:
            return None
        except SandboxError as error:  # before the agent began: this machine's fault
            log.warning("episode %s is given back: %s", episode.id, error)
            await episode.release(f"{type(error).__name__}: {error}"[:500])
            return None
        except (TaskError, VerifierError) as error:
            log.warning("episode %s has no reward: %s", episode.id, error)
            if isinstance(error, VerifierError):
                record.write(VERIFIER, error.log)
            result = EpisodeResult(error=EpisodeError(type=type(error).__name__, message=str(error)[:2000]))
        record.result(
            {
                "task": task.id,
                "attempt": episode.attempt,
                "reward": result.reward,
                "metrics": result.metrics,
                **{name: value for name, value in result.metadata.items() if name != ResultKey.VERDICT},
                "error": None if result.error is None else result.error.message,
            }
        )
        return result

    async def _play(self, episode: AsyncEpisode, task: CodingTask, record: EpisodeRecord) -> EpisodeResult:
        proxy = EndpointProxy(episode.base_url)
        agent_task = AgentTask(
            prompt=task.instruction, model=episode.model, base_url=proxy.inside_url, api_key=episode.api_key
        )
        spec = await task_spec(
            task,
            self._config.sandbox,
            env=self._path(),
            endpoint_proxy=proxy,
            host_folders=(*self._installed.folders, *map(str, self._config.visible)),
        )
        async with sandbox(self._config.sandbox, spec) as box:
            await prepare(task, box)
            for name, text in self._agent.home_files(agent_task).items():
                await _put_at_home(box, name, text)
            run = await self._run(episode, task, agent_task, box, record)
            ending = run.ending
            metrics = _metrics(run, ending)
            facts: JsonObject = {"ending": str(ending), "status": run.status, "agent": self._agent.name}
            facts |= _for_people(run)
            worth = ending.worth(self._config)
            if worth == "mask":
                why = f"the agent's ending was {ending}, status {run.status}: {record.last_line()}"
                error = EpisodeError(type=FAILURES.get(ending, f"Agent{ending.title()}"), message=why)
                return EpisodeResult(error=error, metrics=metrics, metadata=facts)
            if worth != "grade":
                return EpisodeResult(reward=worth, metrics=metrics, metadata=facts)
            verdict = None if run.patch is None else await _judged(task, box, record)
        if verdict is None:
            return EpisodeResult(reward=0.0, metrics=metrics, metadata=facts)
        record.write(VERIFIER, verdict.log)
        metrics |= {**verdict.parts, "verifier_s": verdict.seconds}
        facts[ResultKey.VERDICT] = {**facts.get(ResultKey.VERDICT, {}), "printed": verdict.log[-MOST_SHOWN:]}
        return EpisodeResult(reward=verdict.reward, metrics=metrics, metadata=facts)

    def _path(self) -> dict[str, str]:
        more = self._installed.search_path
        return {"PATH": ":".join((*more, SEARCH_PATH))} if more else {}

    async def _run(
        self, episode: AsyncEpisode, task: CodingTask, agent_task: AgentTask, box: Sandbox, record: EpisodeRecord
    ) -> AgentRun:
        """Runs the agent to its end, and finds out what it did."""
        _, *arguments = self._agent.command(agent_task)
        began = time.monotonic()
        status, is_late, patch = -1, False, None
        try:
            done = await box.exec(
                [self._installed.program, *arguments],
                env=self._agent.environment(agent_task),
                limit_s=self._config.timeout_s or task.limits.agent_s,
                max_output=MOST_LOG,
                on_output=record.log,
            )
            status, is_late = done.status, done.is_late
            seconds = time.monotonic() - began
            patch = await diff(task, box)
            record.write(PATCH, patch)
        except SandboxError as error:  # it has ended, or its files cannot be taken: the agent's doing, either way
            seconds = time.monotonic() - began
            await record.log(2, f"\n{error}\n".encode())
        calls = await self._calls(episode)
        if calls is not None:
            record.transcript(calls)
        return AgentRun(status=status, is_late=is_late, seconds=seconds, patch=patch, calls=calls)

    async def _calls(self, episode: AsyncEpisode) -> AttemptTimeline | None:
        try:
            return attempt_of(await self._client.timeline(episode.id), episode.attempt)
        except EpisodeApiError as error:
            if error.status != 403:
                raise
            return None


async def _while_held(episode: AsyncEpisode, work: Coroutine[Any, Any, T]) -> T:
    """Runs until the work has ended, or the episode is lost; then the work is cancelled, and with it the sandbox."""
    playing = asyncio.create_task(work, name=f"agent of {episode.id}")
    try:
        while not playing.done():
            await asyncio.wait({playing}, timeout=LOOK_S)
            if not playing.done() and not episode.can_continue:
                log.info("episode %s was lost: %s", episode.id, episode.reason)
                raise EpisodeLost(episode.reason)
        return playing.result()
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def _judged(task: CodingTask, box: Sandbox, record: EpisodeRecord) -> CodingVerdict | None:
    """Returns the verdict; None if what the agent left has ended its sandbox, or cannot be read."""
    try:
        return await verify(task, box)
    except SandboxError as error:
        await record.log(2, f"\n{error}\n".encode())
        return None


async def _put_at_home(box: Sandbox, name: str, text: str) -> None:
    done = await box.exec(["/bin/sh", "-c", PUT, name], stdin=text.encode())
    if done.status:
        raise SandboxError(f"the agent's settings cannot be written: {done.stderr.decode(errors='replace')[:200]}")


def _for_people(run: AgentRun) -> JsonObject:
    """Returns what the page of the rollout shows: the diff, and the time of each model call of the agent itself."""
    own = [] if run.calls is None else [call for call in run.calls.calls if not call.agent]
    verdict = {ResultKey.VERDICT: {"patch": run.patch[:MOST_SHOWN]}} if run.patch else {}
    return {**verdict, **({ResultKey.TURN_TIMES: turn_times(own)} if own else {})}


def _metrics(run: AgentRun, ending: AgentEnding) -> dict[str, float]:
    shares = {one: float(one is ending) for one in AgentEnding if one is not AgentEnding.SILENT}
    calls = {} if run.calls is None else {"model_calls": float(len(run.calls.calls))}
    return {**{f"ending/{name}": value for name, value in shares.items()}, "agent_s": run.seconds, **calls}
