"""Profiles of a server's CPU time, with Python's own profiler."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

from pydantic import BaseModel, PrivateAttr


class Profiler(BaseModel):
    name: str
    base_profile_dir: Path
    required_str: str | None = None
    """Only functions whose line has it are told."""
    _profile: cProfile.Profile = PrivateAttr(default_factory=cProfile.Profile)

    def start(self) -> None:
        self._profile.enable()

    def stop(self) -> None:
        self._profile.disable()
        self.dump()

    def dump(self) -> None:
        self.base_profile_dir.mkdir(parents=True, exist_ok=True)
        output = io.StringIO()
        pstats.Stats(self._profile, stream=output).sort_stats("cumulative").print_stats(self.required_str or "")
        (self.base_profile_dir / f"{self.name}.log").write_text(output.getvalue(), encoding="utf-8")
