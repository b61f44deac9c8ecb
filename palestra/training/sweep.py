"""Runs a sweep: one server, one process, a task for each of its runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Protocol

from palestra.config.train import RunConfig
from palestra.endpoints.own_server import lasting_server
from palestra.rollouts.reachability import wait_reachable
from palestra.runs.control import request_stop
from palestra.runs.labels import add_tag
from palestra.runs.listener import RunListener
from palestra.runs.reader import ENGINE, RunReader, RunStatus
from palestra.runs.writer import RunFolder
from palestra.sweeps.evolution import compared_steps, decide, take_over
from palestra.sweeps.folder import (
    Decision,
    MemberState,
    MemberStatus,
    PlannedMember,
    SweepFolder,
    SweepPlan,
)
from palestra.sweeps.halving import value_at
from palestra.sweeps.planning import load_member
from palestra.training.launch import check, server_of, tokenizer_folder, train
from palestra.util.json_types import JsonObject

TELL_EVERY_S = 8.0
UNDER_WAY = (MemberStatus.WAITING, MemberStatus.CUT)
"""States of runs that wait for a place."""


class SweepListener(Protocol):
    """Listens to the progress of a sweep."""

    def note(self, text: str) -> None: ...

    def of(self, member: PlannedMember) -> RunListener:
        """A listener to one of its runs."""
        ...

    def ended(self, member: PlannedMember, status: RunStatus, error: Exception | None) -> None:
        """Reports that a run has ended; it failed if there is an error."""
        ...

    def decided(self, decision: Decision) -> None: ...

    def progress(self, states: Sequence[MemberState]) -> None:
        """Reports how all runs are doing, every few seconds."""
        ...


class SweepRun:
    """A sweep that runs in this process."""

    def __init__(self, folder: SweepFolder, listener: SweepListener, at_once: int) -> None:
        self._folder, self._listener = folder, listener
        self._slots = asyncio.Semaphore(at_once)
        self._rungs = compared_steps(folder.config, folder.plan.members[0].config)
        self._pruned = {one.member for one in folder.decisions() if one.kind == "pruned"}
        self._paused: dict[str, asyncio.Event] = {}
        """Runs that wait for a rung's decision."""
        self._evolving = set[str]()
        """Runs that end to go on with another one's weights."""

    async def run(self) -> None:
        """Runs what is left of the sweep. A run that fails is reported, and the others go on. Raises PolicyError if
        there is no server."""
        states = zip(self._folder.members(), self._folder.states(), strict=True)
        left = [member for member, state in states if not state.status.is_over]
        if not left:
            return
        async with AsyncExitStack() as stack:
            url = await self._open_server(stack, load_member(left[0]))
            async with asyncio.TaskGroup() as tasks:
                telling = tasks.create_task(self._tell(), name="progress")
                async with asyncio.TaskGroup() as running:
                    for member in left:
                        running.create_task(self._run_member(member, url), name=member.name)
                telling.cancel()

    async def _open_server(self, stack: AsyncExitStack, config: RunConfig) -> str | None:
        """Opens the server of the runs. None if they name one themselves, which must answer."""
        if config.server is not None:
            await wait_reachable(config.server, config.server_patience_s, self._listener.note)
            return None
        folder, note = self._folder.path, self._listener.note
        server = lasting_server(lambda port: server_of(config, folder, note, port), note)
        return await stack.enter_async_context(server)

    async def _run_member(self, member: PlannedMember, url: str | None) -> None:
        while member.name not in self._pruned:
            async with self._slots:
                if member.name not in self._pruned:  # while it waited
                    await self._train(member, url)
            if (decided := self._paused.get(member.name)) is not None:
                await decided.wait()
                del self._paused[member.name]
            elif member.name not in self._evolving:
                return
            self._evolving.discard(member.name)
            member = next(one for one in self._folder.members() if one.name == member.name)

    async def _train(self, member: PlannedMember, url: str | None) -> None:
        config = load_member(member)

        def compare(step: int) -> None:
            self._compare()
            self._pause(member, step)

        listener = MemberListener(self._listener.of(member), compare)
        try:
            with await asyncio.to_thread(self._open_run, member, config) as run:
                summary = await train(config, run, listener, url)
        except Exception as error:  # boundary: one run, whatever it plays and computes, never ends the others
            self._listener.ended(member, RunStatus.FAILED, error)
        else:
            if member.name not in self._paused and member.name not in self._evolving:
                self._listener.ended(member, RunStatus(summary["status"]), None)
        self._compare()  # a rung may have waited for this one

    def _open_run(self, member: PlannedMember, config: RunConfig) -> RunFolder:
        path = self._folder.member_path(member.name)
        if (path / "config.json").is_file():
            run = RunFolder.open(path)
            take_over(self._folder, run)
            return run
        path.mkdir(parents=True, exist_ok=True)
        if config.server is None:
            with suppress(FileExistsError):
                (path / ENGINE).symlink_to(Path("..") / self._folder.name / ENGINE)
        add_tag(path, f"sweep:{self._folder.name}")
        facts: JsonObject = {"tokenizer": str(tokenizer_folder(config)), "sweep": self._folder.name}
        return RunFolder.create(path.parent, member.name, config, facts)

    def _compare(self) -> None:
        """Decides the rungs that can be decided, and ends the runs that they leave behind, wherever these are."""
        decisions = decide(self._folder)
        self._folder.decide(decisions)
        for one in decisions:
            self._listener.decided(one)
            if one.kind in ("pruned", "evolved"):
                (self._pruned if one.kind == "pruned" else self._evolving).add(one.member)
                path = self._folder.member_path(one.member)
                if (path / "config.json").is_file():
                    request_stop(RunReader(path))
            if one.member in self._paused:
                self._paused[one.member].set()

    def _pause(self, member: PlannedMember, step: int) -> None:
        """Gives the place of a run whose rung is not decided to one that waits for a place."""
        if step not in self._rungs or not self._slots.locked():
            return
        if any(one.step >= step and one.kind != "paused" for one in self._folder.decisions()):
            return
        states = self._folder.states()
        if not any(state.status in UNDER_WAY and value_at(state, step) is None for state in states):
            return
        reason = f"it was evaluated at step {step}, where other runs have yet to come"
        run = RunReader(self._folder.member_path(member.name))
        attempt = run.read_summary().get("attempts", 1)
        self._folder.decide([Decision(kind="paused", member=member.name, step=step, reason=reason, attempt=attempt)])
        self._paused[member.name] = asyncio.Event()
        request_stop(run)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self._listener.progress(await asyncio.to_thread(self._folder.states))


class MemberListener:
    """Passes the reports of a run on, and tells the sweep whenever it was evaluated."""

    def __init__(self, inner: RunListener, compare: Callable[[int], None]) -> None:
        self.stage, self.step, self.note, self.advise = inner.stage, inner.step, inner.note, inner.advise
        self._inner, self._compare = inner, compare

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        self._inner.evaluated(step, metrics)
        self._compare(step)


def check_members(plan: SweepPlan) -> None:
    """Checks everything that can be checked before anything is started; configs that differ in how they are optimized
    only once. Raises ValueError, or RolloutSourceError."""
    checked = set[str]()
    for member in plan.members:
        config = load_member(member)
        known = config.model_dump_json(exclude={"name", "alias", "seed", "optimizer", "steps", "checkpoint"})
        if known not in checked:
            checked.add(known)
            check(config)
