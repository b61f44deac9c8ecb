"""What can be wrong with a task, and what with its verifier.

Owns: the exceptions. Never touches: anything else.
"""

from __future__ import annotations

from palestra.sandbox import SandboxError


class TaskError(ValueError):
    """A task folder cannot be read, or cannot be played with a backend. The text names the file and what to do."""


class BrokenWork(SandboxError):
    """What the agent left cannot be judged: it does not fit a sandbox, or is in the way of the task's own files."""


class VerifierError(RuntimeError):
    """The verifier failed, not the agent: there is no reward."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """What the verifier printed."""
