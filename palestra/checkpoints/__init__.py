"""Checkpoints of runs and servers: downloaded, exported for other tools. Begin at `export`."""

from palestra.runs.saved_checkpoints import (
    CheckpointError,
    CheckpointNotFound,
    SavedCheckpoint,
    find_checkpoint,
    list_checkpoints,
    selected_step,
    split_name,
)

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "SavedCheckpoint",
    "find_checkpoint",
    "list_checkpoints",
    "selected_step",
    "split_name",
]
