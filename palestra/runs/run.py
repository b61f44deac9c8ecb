"""A run for those who use what it trained: its folder, and its checkpoints by how good they were."""

from __future__ import annotations

from pathlib import Path

from palestra.runs.reader import RunReader, find_run
from palestra.runs.saved_checkpoints import SELECTED, SavedCheckpoint, find_best, find_checkpoint, list_checkpoints


class Run(RunReader):
    """A training run, while it goes on or long after: its config, metrics and rollouts, and its checkpoints."""

    def checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints that are kept, oldest first."""
        return list_checkpoints(self)

    def best(self, metric: str | None = None) -> SavedCheckpoint:
        """The checkpoint with the best value of a metric: the highest, of a loss the lowest, and the newest of equal
        ones. Without a metric: by the success, reward or loss of the evaluations if there were any, else by the reward
        or loss of the training steps. Raises CheckpointError if there is none."""
        return find_checkpoint(self, "best") if metric is None else find_best(self, metric)

    def selected(self) -> SavedCheckpoint:
        """The checkpoint that the run's name means in commands: the one that `checkpoint.select` chooses, or while the
        run goes on the newest. Raises CheckpointNotFound if there is none yet."""
        return find_checkpoint(self, SELECTED)

    def last(self) -> SavedCheckpoint:
        """The newest checkpoint. Raises CheckpointNotFound if there is none yet."""
        return find_checkpoint(self)

    def at(self, step: int) -> SavedCheckpoint:
        """The checkpoint that was saved after this step. Raises CheckpointNotFound."""
        return find_checkpoint(self, str(step))


def open_run(which: str | Path, runs: str | Path = "runs") -> Run:
    """Opens a run by its name in the folder `runs`, or by the path of its own folder. Raises RunNotFound."""
    return Run(find_run(str(which), Path(runs)).path)
