"""An audit of one environment, from its entry in a config to the report."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import psutil
from msgspec.structs import replace

from palestra.audit import policies
from palestra.audit.coding_audit import audit_coding
from palestra.audit.episodes import ProbeEpisode, Trouble
from palestra.audit.evidence import Evidence, finding_of
from palestra.audit.findings import FindingKind, Severity, finding
from palestra.audit.judges.conduct import FEWEST_IN_A_ROW, judge_conduct
from palestra.audit.judges.leaks import judge_leaks
from palestra.audit.judges.rewards import judge_rewards
from palestra.audit.known_answers import answers_of, answers_of_verdict
from palestra.audit.platform_audit import judge_platform
from palestra.audit.policies import ProbeKind, ProbePolicy
from palestra.audit.report import AuditReport, figures, probe_summaries
from palestra.audit.session_player import SessionPlayer
from palestra.audit.settings import AuditSettings
from palestra.audit.targets import AuditTarget
from palestra.audit.task_lists import Splits, chosen_tasks, judge_fresh_listing, judge_tasks, list_tasks
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.environment_set import EnvironmentSet
from palestra.environments.threads import CallThreads
from palestra.types.rollouts import Task

__all__ = ["AuditProgress", "audit", "audit_coding", "audit_target"]

AuditProgress = Callable[[str, int, int], None]
"""Takes what is being played, how much of it is done and how much there is."""
HANGS = 3
"""Episodes that hang before no more are played."""


class ProbePlayer(Protocol):
    @property
    def knows_memory(self) -> bool:
        """Whether the environment is in this process."""
        ...

    @property
    def has_tools(self) -> bool:
        """Whether an episode so far had tools."""
        ...

    async def play(self, task: Task, policy: ProbePolicy, repeat: int = 0) -> ProbeEpisode: ...

    async def play_together(self, tasks: Sequence[Task], policy: ProbePolicy) -> list[ProbeEpisode]: ...


async def audit_target(
    target: AuditTarget,
    settings: AuditSettings | None = None,
    progress: AuditProgress | None = None,
    sandbox: str = "local",
) -> AuditReport:
    """Audits what a name stands for. Findings of kinds that the target accepts are counted and explained. Raises what
    `audit` raises, and TaskError."""
    settings = settings or AuditSettings()
    settings = replace(settings, ignored=settings.ignored | target.accepted.keys())
    if target.entry is None:
        report = await audit_coding(target.coding, settings, progress, target.name, sandbox)
    else:
        report = await audit(target.entry, settings, progress, target.name)
    report.accepted = target.accepted
    return report


async def audit(
    entry: EnvironmentEntry,
    settings: AuditSettings | None = None,
    progress: AuditProgress | None = None,
    name: str | None = None,
) -> AuditReport:
    """Audits the environment of an entry that is not coding tasks. Raises TaskFileError without tasks,
    UnknownEnvironment, and PolicyError or RolloutSourceError if servers of it cannot be started."""
    settings = settings or AuditSettings()
    report = AuditReport(target=name or entry.name, seed=settings.seed)
    began_s = time.monotonic()
    with EnvironmentSet([entry], env_threads=settings.at_once, env_timeout_s=settings.timeout_s) as environments:
        try:
            splits, again = [await _listed(environments, settings) for _ in range(2)]
        except TimeoutError:
            seen = f"Listing the tasks takes longer than {settings.within_s / 2:g} s."
            hang = finding(FindingKind.HANG, Severity.ERROR, "lists the tasks", "", seen)
            report.add([hang], settings.ignored)
            return report
        report.add(judge_tasks(splits, again), settings.ignored)
        is_here = environments.is_played_here(entry.name)
        if settings.fresh_process and is_here:
            found = await asyncio.to_thread(judge_fresh_listing, entry, splits, settings.timeout_s * 2)
            report.add(found, settings.ignored)
        tasks = chosen_tasks(splits, settings.limit, settings.seed)
        report.tasks = len(tasks)
        evidence = _evidence(entry, environments, settings, tasks)
        async with _opened(entry, environments, settings) as player:
            playing = _Playing(player, evidence, report, began_s + settings.within_s, progress or (lambda *_: None))
            await playing.play_all(_gold(environments, tasks, report.notes))
    for judged in (judge_rewards(evidence), judge_conduct(evidence), judge_leaks(evidence)):
        report.add(judged, settings.ignored)
    report.add(await asyncio.to_thread(judge_platform, tasks), settings.ignored)
    report.probes, report.figures = probe_summaries(evidence), figures(evidence)
    report.seconds = time.monotonic() - began_s
    return report


async def _listed(environments: EnvironmentSet, settings: AuditSettings) -> Splits:
    """Lists the tasks. Raises TimeoutError after half of the audit's time; the thread is not waited for."""
    threads = CallThreads(1)
    try:
        async with asyncio.timeout(settings.within_s / 2):
            return await asyncio.get_running_loop().run_in_executor(threads, list_tasks, environments)
    finally:
        threads.shutdown(wait=False)


def _evidence(
    entry: EnvironmentEntry, environments: EnvironmentSet, settings: AuditSettings, tasks: Sequence[Task]
) -> Evidence:
    low, high = settings.reward_range or environments.reward_range(entry.name) or (0.0, 1.0)
    answers = {task.id: found for task in tasks if (found := answers_of(task))}
    return Evidence(settings=settings, tasks=tasks, low=low, high=high, answers=answers)


@asynccontextmanager
async def _opened(
    entry: EnvironmentEntry, environments: EnvironmentSet, settings: AuditSettings
) -> AsyncIterator[ProbePlayer]:
    if environments.is_played_here(entry.name):
        yield SessionPlayer(environments, settings.seed, settings.at_once)
        return
    from palestra.audit.endpoint_player import open_served_player  # it needs what gyms need

    with tempfile.TemporaryDirectory(prefix="palestra-audit-") as folder:
        async with open_served_player(entry, environments, settings, Path(folder)) as player:
            yield player


def _gold(environments: EnvironmentSet, tasks: Sequence[Task], notes: list[str]) -> dict[str, list[str]]:
    """Returns what solves each task, as the environment's own class says."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        try:
            gold = environments.gold(task)
        except Exception as error:  # boundary: the environment's own code
            notes.append(f"{task.id}: its gold cannot be had: {type(error).__name__}: {error}")
            continue
        if gold is not None:
            found[task.id] = gold
    return found


class _Playing:
    """Plays probe after probe until the time is over."""

    def __init__(
        self,
        player: ProbePlayer,
        evidence: Evidence,
        report: AuditReport,
        until_s: float,
        progress: AuditProgress,
    ) -> None:
        self._player, self._evidence, self._report = player, evidence, report
        self._until_s, self._progress = until_s, progress
        self._hung = 0

    async def play_all(self, gold: Mapping[str, Sequence[str]]) -> None:
        evidence = self._evidence
        nothing = await self._play(policies.NOTHING[:1])
        if nothing and all(one.trouble and not one.steps for one in nothing):
            return  # it cannot even begin
        from_verdicts = {one.task: found for one in nothing if (found := answers_of_verdict(one.verdict))}
        evidence.answers = {**from_verdicts, **evidence.answers}
        evidence.has_gold = bool(gold)
        best = [policies.scripted("gold", ProbeKind.GOLD, gold)] if gold else await self._found_form()
        await self._play(best)
        await self._play(policies.NOTHING[1:])
        await self._play((*policies.RANDOM, *policies.REPEATED))
        await self._play(policies.cheats())
        await self._play_code()
        await self._play(policies.guesses(evidence.answers))
        if best and evidence.answers:
            form = best[0].name.rpartition(" as ")[2] if not gold else "{}"
            await self._play([policies.hedge(form, evidence.answers)])
        await self._play(policies.malformed())
        by_chance = policies.RANDOM[1 if self._player.has_tools else 0]
        steady = [*best, by_chance]
        await self._again(steady)
        await self._together(steady)
        await self._many(best[0] if best else policies.NOTHING[1])

    async def _play_code(self) -> None:
        """Answers with code, and looks for what it would have made on this machine outside of a sandbox."""
        with tempfile.TemporaryDirectory(prefix="palestra-audit-") as folder:
            by_file = policies.code(Path(folder))
            await self._play(list(by_file.values()))
            names = {policy.name for file, policy in by_file.items() if file.exists()}
        ran = [one for one in self._evidence.all(ProbeKind.CODE) if one.probe in names]
        if ran:
            seen = "The answer was executed as Python: it has made a file on this machine."
            found = finding_of(FindingKind.EXECUTES_ANSWER, Severity.ERROR, ran, seen)
            self._report.add([found], self._evidence.settings.ignored)

    async def _found_form(self) -> list[ProbePolicy]:
        """Finds a form in which the known answer is taken for right, on the first tasks that have one."""
        evidence = self._evidence
        for policy in policies.answer_forms(evidence.answers) if evidence.answers else ():
            tasks = [task for task in evidence.tasks if task.id in evidence.answers][:2]
            tried = [await self._player.play(task, policy) for task in tasks if not self._is_over]
            if any(evidence.is_solved(one) for one in tried):
                return [policy]
        self._report.notes.append(
            "no solution is known, so it was not played: a static method `gold(task)` of the class returns what a "
            "perfect policy says, turn by turn"
        )
        return []

    @property
    def _is_over(self) -> bool:
        return self._hung >= HANGS or time.monotonic() > self._until_s

    def _cut(self, what: str) -> None:
        self._report.is_cut = True
        why = "too many calls hung" if self._hung >= HANGS else "the time was over (--within SECONDS for more)"
        self._report.notes.append(f"not played to its end: {what}; {why}")

    async def _play(self, probes: Sequence[ProbePolicy]) -> list[ProbeEpisode]:
        """Plays each policy on its tasks. One that hangs plays no more tasks."""
        found: list[ProbeEpisode] = []
        pairs = [(policy, task) for number, policy in enumerate(probes) for task in self._tasks(policy, number)]
        stopped: set[str] = set()
        for done, (policy, task) in enumerate(pairs):
            if self._is_over:
                self._cut(policy.kind)
                break
            self._progress(policy.kind, done, len(pairs))
            if policy.name in stopped or (policy.needs_tools and not self._player.has_tools):
                continue
            episode = await self._player.play(task, policy)
            self._evidence.episodes.setdefault(policy.kind, []).append(episode)
            found.append(episode)
            if episode.trouble is Trouble.HUNG:
                self._hung += 1
                stopped.add(policy.name)
        return found

    def _tasks(self, policy: ProbePolicy, number: int) -> Sequence[Task]:
        """Tasks of a policy: if it plays only some, each policy others."""
        tasks = [task for task in self._evidence.tasks if policy.only is None or task.id in policy.only]
        if policy.tasks is None or not tasks:
            return tasks
        return [tasks[(number + n) % len(tasks)] for n in range(min(policy.tasks, len(tasks)))]

    async def _again(self, probes: Sequence[ProbePolicy]) -> None:
        """Plays what was played alone once more."""
        pairs = [(policy, task) for policy in probes for task in self._tasks(policy, 0)]
        for done, (policy, task) in enumerate(pairs):
            if self._is_over:
                self._cut("the same again")
                return
            self._progress("again", done, len(pairs))
            if self._evidence.first(task.id, policy.name) is not None:
                self._evidence.again.append(await self._player.play(task, policy, 1))

    async def _together(self, probes: Sequence[ProbePolicy]) -> None:
        for policy in probes:
            tasks = [task for task in self._tasks(policy, 0) if self._evidence.first(task.id, policy.name) is not None]
            if self._is_over:
                self._cut("many at once")
            elif tasks:
                self._progress("at once", 0, self._evidence.settings.at_once)
                self._evidence.together += await self._player.play_together(tasks, policy)

    async def _many(self, policy: ProbePolicy) -> None:
        """Plays many episodes in a row and notes the memory after each."""
        tasks = self._tasks(policy, 0)
        if not self._player.knows_memory or not tasks or self._evidence.settings.in_a_row < FEWEST_IN_A_ROW:
            return
        process, count = psutil.Process(), self._evidence.settings.in_a_row
        for number in range(count):
            if self._is_over:
                self._cut("many in a row")
                return
            self._progress("many in a row", number, count)
            await self._player.play(tasks[number % len(tasks)], policy, number + 2)
            if (number + 1) % (count // 3) == 0:
                gc.collect()  # what is only waiting to be collected does not stay
            self._evidence.many.append(process.memory_info().rss)
