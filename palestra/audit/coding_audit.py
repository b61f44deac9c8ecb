"""An audit of coding tasks: their solutions, doing nothing and known cheats, each in sandboxes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from palestra.audit.episodes import ProbeEpisode, Trouble
from palestra.audit.evidence import Evidence
from palestra.audit.findings import AuditFinding, FindingKind, Severity, finding
from palestra.audit.judges.conduct import judge_conduct
from palestra.audit.judges.rewards import judge_rewards
from palestra.audit.policies import ProbeKind
from palestra.audit.report import AuditReport, figures, probe_summaries
from palestra.audit.settings import AuditSettings
from palestra.coding import CodingTask, TaskError, VerifierError, play_solution
from palestra.coding.cheats import CHEATS, NOTHING, WRECKS
from palestra.sandbox import SandboxError
from palestra.types.rollouts import CODING, Task

GOLD = "its own solution"
PLAYS: dict[str, tuple[ProbeKind, str | None]] = {
    GOLD: (ProbeKind.GOLD, None),
    "doing nothing": (ProbeKind.NOTHING, NOTHING),
    **{name: (ProbeKind.CHEAT, command) for name, command in {**CHEATS, **WRECKS}.items() if command != NOTHING},
}
SLOW_S = 60.0  # of an episode, which has sandboxes and a verdict in it
TOGETHER = 4  # solutions that are played at the same time: each takes processes and memory
SECRET_LINE = 20  # characters of a line of the tests or the solution that cannot be in the environment by chance
COMMON = re.compile(r"\s*(#|import |from )")
"""Lines that many files have."""
FEWEST_SECRETS = 3  # such lines, from which a share of them says something
SECRET_SHARE = 0.5  # of such lines that are there


async def audit_coding(
    tasks: Sequence[CodingTask],
    settings: AuditSettings | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    name: str = CODING,
    backend: str = "local",
) -> AuditReport:
    """Audits coding tasks, the first `settings.limit` of them."""
    settings, began_s = settings or AuditSettings(), time.monotonic()
    settings = replace(settings, slow_s=max(settings.slow_s, SLOW_S))
    report = AuditReport(target=name, seed=settings.seed)
    chosen = list(tasks[: settings.limit])
    report.tasks = len(chosen)
    rows = [
        Task(id=one.id, environment=CODING, prompt=[{"role": "user", "content": one.instruction}]) for one in chosen
    ]
    low, high = settings.reward_range or (0.0, 1.0)
    evidence = Evidence(settings=settings, tasks=rows, low=low, high=high, answers={}, has_gold=True)
    playing = _Playing(evidence, report, backend, began_s + settings.within_s, progress or (lambda *_: None))
    await playing.play_all(chosen)
    files = [*_visible_secrets(chosen), *_same_tasks(chosen)]
    for found in (judge_rewards(evidence), judge_conduct(evidence), files):
        report.add(found, settings.ignored)
    report.probes, report.figures = probe_summaries(evidence), figures(evidence)
    report.seconds = time.monotonic() - began_s
    return report


class _Playing:
    def __init__(
        self,
        evidence: Evidence,
        report: AuditReport,
        backend: str,
        until_s: float,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._evidence, self._report, self._backend = evidence, report, backend
        self._until_s, self._progress = until_s, progress

    async def play_all(self, tasks: Sequence[CodingTask]) -> None:
        evidence = self._evidence
        plays = [(task, name) for task in tasks for name in PLAYS if task.solution is not None or name != GOLD]
        if without := [task.id for task in tasks if task.solution is None]:
            self._report.notes.append(f"no solution to play: {', '.join(without)}")
        for done, (task, name) in enumerate(plays):
            if self._is_over("its plays"):
                return
            self._progress(task.id, done, len(plays))
            evidence.episodes.setdefault(PLAYS[name][0], []).append(await self._played(task, name))
        paid = [task for task in tasks if (first := evidence.first(task.id, GOLD)) and first.reward]
        for done, task in enumerate(paid):
            if self._is_over("solutions again"):
                return
            self._progress("again", done, len(paid))
            evidence.again.append(await self._played(task, GOLD))
        if paid and not self._is_over("solutions at once"):
            chosen = [paid[number % len(paid)] for number in range(TOGETHER)]
            evidence.together += await asyncio.gather(*(self._played(task, GOLD) for task in chosen))

    def _is_over(self, what: str) -> bool:
        if time.monotonic() <= self._until_s:
            return False
        self._report.is_cut = True
        self._report.notes.append(f"not played to its end: {what}; the time was over (--within SECONDS for more)")
        return True

    async def _played(self, task: CodingTask, name: str) -> ProbeEpisode:
        command = PLAYS[name][1]
        messages = [
            {"role": "user", "content": task.instruction},
            {"role": "assistant", "content": "(its solution)" if command is None else command},
        ]
        episode = ProbeEpisode(task=task.id, probe=name, messages=messages, first=1)
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._evidence.settings.timeout_s + task.limits.verifier_s):
                verdict = await play_solution(task, self._backend, command)
            episode.reward, episode.is_done = verdict.reward, True
            episode.verdict = {"log": verdict.log[-1000:]}
            if verdict.reward < 1 and command is None:
                messages.append({"role": "verifier", "content": verdict.log})
        except TimeoutError:
            episode.trouble, episode.error = Trouble.HUNG, f"{name} and its verdict took too long"
        except TaskError as error:
            if command is not None:
                raise
            episode.reward = 0.0
            messages.append({"role": "sandbox", "content": str(error)})
        except (VerifierError, SandboxError) as error:
            episode.trouble, episode.error = Trouble.RAISED, f"{type(error).__name__}: {error}"
        episode.steps, episode.step_s = [episode.reward], []
        episode.init_s = time.perf_counter() - began_s
        return episode


def _row(task: CodingTask) -> Task:
    return Task(id=task.id, environment=CODING, prompt=[{"role": "user", "content": task.instruction}])


def _visible_secrets(tasks: Sequence[CodingTask]) -> Iterator[AuditFinding]:
    """Files of tests and solutions that lie in the environment, where the agent reads them, and lines of tests. A
    solution may well have lines of the file that it mends."""
    for task in tasks:
        tests = _files(task.tests)
        whole = next((one for one in [*tests, *_files(task.solution)] if _is_there(one, task)), None)
        shown = "\n".join(_text(file.source) for file in task.files)
        lines = {line.strip() for file in tests for line in _text(file).splitlines() if not COMMON.match(line)}
        secret = [line for line in lines if len(line) >= SECRET_LINE]
        seen = sorted(line for line in secret if line in shown)
        if whole is not None:
            detail = f"{whole.parent.name}/{whole.name} lies in the agent's folder."
        elif len(secret) >= FEWEST_SECRETS and len(seen) >= SECRET_SHARE * len(secret):
            detail = (
                f"{len(seen)} of {len(secret)} lines of the tests are in the agent's folder, such as {seen[0][:80]!r}."
            )
        else:
            continue
        yield finding(FindingKind.ANSWER_LEAK, Severity.ERROR, "reads the agent's folder", task.id, detail)


def _is_there(secret: Path, task: CodingTask) -> bool:
    """Whether a file of the tests or the solution is one of the agent's, too."""
    data = secret.read_bytes()
    own = [one.source for one in task.files]
    return len(data) >= SECRET_LINE and any(one.stat().st_size == len(data) and one.read_bytes() == data for one in own)


def _files(place: Path | None) -> list[Path]:
    if place is None:
        return []
    return [one for one in sorted(place.rglob("*")) if one.is_file()] if place.is_dir() else [place]


def _text(file: Path) -> str:
    return file.read_bytes().decode(errors="replace")


def _same_tasks(tasks: Sequence[CodingTask]) -> Iterator[AuditFinding]:
    first: dict[str, str] = {}
    for task in tasks:
        content = re.sub(r"\s+", " ", task.instruction) + "".join(_text(one) for one in _files(task.tests))
        if (other := first.setdefault(content, task.id)) != task.id:
            seen = f"{task.id} has the instruction and the tests of {other}."
            yield finding(FindingKind.DUPLICATE_TASKS, Severity.WARNING, "compares the tasks", task.id, seen)
