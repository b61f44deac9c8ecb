"""The lines that a sweep prints: how each run does, and all of them together."""

from __future__ import annotations

from collections.abc import Sequence

import rich_click as click

from palestra.runs.advisories import Advisory
from palestra.runs.best_step import is_loss
from palestra.runs.listener import Silence
from palestra.runs.reader import RunStatus
from palestra.sweeps.folder import Decision, MemberState, MemberStatus, PlannedMember, SweepPlan
from palestra.sweeps.settings import setting_text
from palestra.util.figures import number_text

SHOWN = {MemberStatus.RUNNING: "run", MemberStatus.WAITING: "wait", MemberStatus.DONE: "done"}


class SweepLines:
    """Prints a line for each evaluation and each end of a run, and every few seconds one about all runs."""

    def __init__(self, plan: SweepPlan, *, to_stderr: bool) -> None:
        self._plan, self._to_stderr = plan, to_stderr
        self._settings = {one.name: setting_text(one.settings) for one in plan.members}

    def note(self, text: str) -> None:
        click.echo(text, err=self._to_stderr)

    def of(self, member: PlannedMember) -> MemberLines:
        return MemberLines(self, member, self._plan.metric)

    def ended(self, member: PlannedMember, status: RunStatus, error: Exception | None) -> None:
        text = f"{status}: {type(error).__name__}: {error}" if error is not None else status
        self.note(f"{self.name(member.name)}: {text}")

    def decided(self, decision: Decision) -> None:
        self.note(f"{self.name(decision.member)}: {decision.kind}, {decision.reason}")

    def progress(self, states: Sequence[MemberState]) -> None:
        counts = [(sum(state.status is status for state in states), word) for status, word in SHOWN.items()]
        counts.append((len(states) - sum(count for count, _ in counts), "ended early"))
        parts = [f"{count} {word}" for count, word in counts if count]
        steps = f"{sum(state.step for state in states)} of {sum(state.steps for state in states)} steps"
        known = [(value, state.name) for state in states if (value := state.last) is not None]
        best = (min if is_loss(self._plan.metric) else max)(known, default=None)
        text = f"; best {self._plan.metric} {number_text(best[0])} ({self.name(best[1])})" if best else ""
        self.note(f"{', '.join(parts)}; {steps}{text}")

    def name(self, member: str) -> str:
        return f"{member} {self._settings[member]}"


class MemberLines(Silence):
    """Prints the evaluations and warnings of a run."""

    def __init__(self, lines: SweepLines, member: PlannedMember, metric: str) -> None:
        self._lines, self._name, self._metric = lines, lines.name(member.name), metric

    def advise(self, advisory: Advisory) -> None:
        self._lines.note(f"{self._name}: {advisory.warning}")

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        if (value := metrics.get(self._metric)) is not None:
            self._lines.note(f"{self._name}: step {step}, {self._metric} {number_text(value)}")
