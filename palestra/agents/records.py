"""The folder that is kept of an episode: what the agent printed, what it changed, what was said, what it was worth."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec

from palestra.types.timelines import AttemptTimeline
from palestra.util.json_types import JsonObject

LOG, PATCH, TRANSCRIPT, VERIFIER, RESULT = (
    "agent.log",
    "changes.patch",
    "transcript.json",
    "verifier.log",
    "result.json",
)


class EpisodeRecord:
    """The folder of one attempt at an episode. A folder without `result.json` is of one that was not played to its
    end."""

    def __init__(self, folder: Path, episode_id: str, attempt: int) -> None:
        self.folder = folder / re.sub(r"[^A-Za-z0-9._-]", "_", f"{episode_id}-{attempt}")
        self.folder.mkdir(parents=True, exist_ok=True)

    async def log(self, _stream: int, data: bytes) -> None:
        """Takes the agent's output as it comes."""

        def write() -> None:
            with (self.folder / LOG).open("ab") as file:
                file.write(data)

        await asyncio.to_thread(write)

    def last_line(self) -> str:
        """The last line that the agent printed."""
        file = self.folder / LOG
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else []
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8", errors="replace")

    def transcript(self, calls: AttemptTimeline) -> None:
        self.write(TRANSCRIPT, msgspec.json.format(msgspec.json.encode(calls), indent=2).decode())

    def result(self, fields: JsonObject) -> None:
        self.write(RESULT, msgspec.json.format(msgspec.json.encode(fields), indent=2).decode() + "\n")
