"""Skills for agents: folders with a SKILL.md, laid where an agent's program looks for them."""

from __future__ import annotations

import shutil
from pathlib import Path

from nemo_gym import _resolve_under_cwd_or_install


def stage_skills(path: str, dest_skills_dir: Path) -> None:
    """A copy of the folder. Raises ValueError where there is none."""
    source = _resolve_under_cwd_or_install(path)
    if not source.is_dir():
        raise ValueError(f"skills.path={path!r}: {source} is not a folder")
    shutil.copytree(source, dest_skills_dir)
