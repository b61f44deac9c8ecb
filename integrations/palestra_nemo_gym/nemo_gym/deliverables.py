"""Tells the files that are an agent's work from those that only report how it went."""

from pathlib import Path

IGNORE_FILES = frozenset(
    {
        "finish_params.json",
        "history.json",
        "history.pkl",
        "inprogress_history.json",
        "log.txt",
        "metadata.json",
        "reference_files",
    }
)


def is_deliverable(path: Path) -> bool:
    return path.name not in IGNORE_FILES and path.is_file()
