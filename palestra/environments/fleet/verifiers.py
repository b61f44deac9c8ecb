"""Verifiers that come with a task, under the name by which Fleet's users know them."""

from palestra.environments.platform.verifiers import (
    VerifierExecution,
    VerifierLimits,
    read_database,
    run_verifier,
    score_of,
)

__all__ = ["VerifierExecution", "VerifierLimits", "read_database", "run_verifier", "score_of"]
