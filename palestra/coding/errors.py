"""Errors of tasks and of their verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palestra.sandbox import SandboxError

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import ValidationError


class TaskError(ValueError):
    """A task folder cannot be read, or cannot be played with a backend. The text names the file and what to do."""


def wrong_setting(file: Path, error: ValidationError) -> TaskError:
    """Names the first setting that is wrong."""
    first = error.errors()[0]
    where = ".".join(str(one) for one in first["loc"])
    return TaskError(f"{file}: {where}: {first['msg']}; docs/coding-tasks.md has every key")


class BrokenWork(SandboxError):
    """The agent's work cannot be judged: it does not fit a sandbox, or is in the way of the task's own files."""


class VerifierError(RuntimeError):
    """The verifier failed, not the agent: there is no reward."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """What the verifier printed."""
