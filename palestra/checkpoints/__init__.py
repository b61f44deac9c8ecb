"""Checkpoints of runs and servers: downloaded, exported for other tools. Begin at `export`; `runs` chooses them."""

from palestra.checkpoints.errors import CheckpointError, CheckpointNotFound
from palestra.runs.saved_checkpoints import SavedCheckpoint, find_checkpoint, list_checkpoints, split_name

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "SavedCheckpoint",
    "find_checkpoint",
    "list_checkpoints",
    "split_name",
]
