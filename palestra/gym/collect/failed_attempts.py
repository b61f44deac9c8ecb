"""What failed in a collection, counted by what went wrong.

Owns: reading failures files back. Never touches: what is tried again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from palestra.gym.collect.files import OutputFiles, read_lines
from palestra.gym.collect.rows import agent_of
from palestra.gym.records import AGENT_REF, TASK_INDEX
from palestra.types.gym_failures import class_in
from palestra.util.json_types import JsonObject

FAILED_ATTEMPTS = "failed_attempts"
"""Beside the figures of an agent or a task: how many attempts failed, by class."""


class FailedAttempts:
    def __init__(self, outputs: Iterable[Path]) -> None:
        """Of the collections with these outputs. Raises CollectError."""
        self.by_agent: dict[str, Counter[str]] = defaultdict(Counter)
        self.by_task: dict[Any, Counter[str]] = defaultdict(Counter)
        for output in outputs:
            for line in read_lines(OutputFiles(output).failures):
                kind = class_in(line)
                self.by_agent[agent_of(line) or ""][kind] += 1
                self.by_task[line.get(TASK_INDEX)][kind] += 1

    def beside_agents(self, entries: list[JsonObject]) -> list[JsonObject]:
        """Metrics by agent with its failures; an agent that did nothing but fail has an entry, too."""
        known = {entry[AGENT_REF]["name"] for entry in entries}
        only_failed = [
            {AGENT_REF: {"name": name}, "agent_metrics": {}, "key_metrics": {}, "group_level_metrics": []}
            for name in sorted(self.by_agent.keys() - known)
        ]
        return [
            {**entry, FAILED_ATTEMPTS: dict(self.by_agent.get(entry[AGENT_REF]["name"], {}))}
            for entry in [*entries, *only_failed]
        ]


def counted(failures: Counter[str]) -> str:
    """For people: the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in failures.most_common())
