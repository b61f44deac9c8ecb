"""Files of an engine, in the server's state folder: the config of its training process, its tasks, its runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from palestra.environments.errors import TaskFileError
from palestra.environments.tasks import read_tasks
from palestra.server.agentjet.settings_file import AgentJetError
from palestra.util.json_types import JsonObject

ENVIRONMENT = "agentjet"
"""The environment of its tasks. It is not registered: players bring their own."""
DUMMIES = 1000  # the same number as AgentJet's
MAX_TASKS_BYTES = 256 << 20


class TrainerFolder:
    def __init__(self, state: Path, owner: str):
        mark = hashlib.sha256(owner.encode()).hexdigest()[:8]
        self.name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', owner)[:40]}-{mark}"
        self.path = state / "engines" / self.name
        self.runs = self.path / "runs"
        self._shared_tasks, self._logs = state / "tasks", state / "logs"

    def config_file(self, run: str) -> Path:
        return self.path / f"{run}.json"

    def tasks_file(self, run: str, split: str) -> Path:
        return self.path / f"{run}.{split}.jsonl"

    def log_file(self, run: str) -> Path:
        return self._logs / f"engine-{self.name}-{run}.log"

    def has_begun(self, run: str) -> bool:
        """Whether a run has begun: its folder has the config from the start."""
        return (self.runs / run / "config.json").is_file()

    def write_config(self, run: str, config: JsonObject) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.config_file(run)
        file.write_text(json.dumps(config, indent=2))
        return file

    def make_tasks(self, run: str, split: str, source: str | None) -> int:
        """Writes tasks and returns their number. `source` is a file in the server's folder of tasks; None: dummy
        tasks."""
        target = self.tasks_file(run, split)
        self.path.mkdir(parents=True, exist_ok=True)
        rows = _dummies() if source is None else _rows(self._find(source))
        target.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        try:
            return len(read_tasks(target, ENVIRONMENT))
        except TaskFileError as error:
            raise AgentJetError(str(error).replace(str(target), source or "the tasks")) from None

    def _find(self, source: str) -> Path:
        home = self._shared_tasks.resolve()
        try:
            file = (home / source).resolve()
            is_there = file.is_relative_to(home) and file.is_file()
        except (OSError, ValueError):
            is_there, file = False, home
        if not is_there:
            raise AgentJetError(
                f"no task file {source[:200]!r} in this server's task folder; put it into `tasks` in the "
                "server's state folder and give its name there"
            )
        if file.stat().st_size > MAX_TASKS_BYTES:
            raise AgentJetError(f"the task file {source[:200]!r} is larger than {MAX_TASKS_BYTES} bytes")
        return file


def _dummies() -> Iterator[JsonObject]:
    for number in range(DUMMIES):
        yield {"id": number, "prompt": f"Task {number}: its player brings the content."}


def _rows(file: Path) -> Iterator[JsonObject]:
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=JsonObject)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise AgentJetError(f"{file.name}, line {number}: not a JSON object ({error})") from None
        yield row if "prompt" in row else _from_agentjet(row)


def _from_agentjet(row: JsonObject) -> JsonObject:
    """Converts a task of AgentJet's: messages followed by a query."""
    query, messages = row.get("main_query"), row.get("init_messages") or []
    identity = {"id": row["task_id"]} if "task_id" in row else {}
    rest = {key: value for key, value in row.items() if key not in ("main_query", "init_messages", "task_id")}
    if query is None or not isinstance(messages, list):
        return rest | identity  # the reader of the file refuses it, with its line number
    return rest | identity | {"prompt": [*messages, {"role": "user", "content": query}]}
