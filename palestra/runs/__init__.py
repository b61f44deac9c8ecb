"""Run folders: what a training run leaves on disk, written and read by the same code.

`palestra.runs.open("first")` opens one to look at it and to take its checkpoints. Trainers write through
`writer.RunFolder`; commands and pages read through `reader`. No torch, no HTTP, no database.
"""

from palestra.runs.reader import RunNotFound, RunStatus
from palestra.runs.record_files import RunError
from palestra.runs.run import Run
from palestra.runs.run import open_run as open  # noqa: A004 (as gzip.open)
from palestra.runs.saved_checkpoints import CheckpointError, CheckpointNotFound, SavedCheckpoint

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "Run",
    "RunError",
    "RunNotFound",
    "RunStatus",
    "SavedCheckpoint",
    "open",
]
