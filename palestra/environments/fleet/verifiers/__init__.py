"""Verifiers of others, in processes of their own."""

from palestra.environments.fleet.verifiers.runner import Execution, Limits, read_database, run_verifier
from palestra.environments.fleet.verifiers.sandbox.scores import score_of

__all__ = ["Execution", "Limits", "read_database", "run_verifier", "score_of"]
