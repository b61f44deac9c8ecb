"""The folders in which files and servers of a gym are searched.

Owns: the order of the folders, finding below them, the nearest names. Never touches: the content of files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"
"""Our own servers, in folders of NeMo Gym's structure: `<kind>/<implementation>/{app.py,configs,data}`."""

EXTRA_ROOTS = "NEMO_GYM_EXTRA_ROOTS"


def search_roots(extra: Iterable[Path] = ()) -> list[Path]:
    """Returns the given folders, then those of the environment, then the current folder, then ours."""
    from_environment = [Path(one) for one in os.environ.get(EXTRA_ROOTS, "").split(os.pathsep) if one]
    roots = [Path(one).absolute() for one in (*extra, *from_environment, Path.cwd(), SHIPPED)]
    return list(dict.fromkeys(roots))


def find_below(roots: Sequence[Path], relative: str | Path) -> Path | None:
    """Returns the first that exists. An absolute path is used as it is."""
    found = (root / relative for root in roots)
    return next((path for path in found if path.exists()), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a line for the end of a message; empty if no name is near."""
    near = get_close_matches(word, sorted({str(one) for one in known}), n=3, cutoff=0.6)
    return f"\n  did you mean: {', '.join(near)}?" if near else ""
