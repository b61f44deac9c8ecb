"""Verifiers that come with a task, in processes of their own. Begin at `runner`."""

from palestra.environments.platform.verifiers.runner import (
    VerifierExecution,
    VerifierLimits,
    read_database,
    run_verifier,
)
from palestra.environments.platform.verifiers.runtime.scores import score_of

__all__ = ["VerifierExecution", "VerifierLimits", "read_database", "run_verifier", "score_of"]
