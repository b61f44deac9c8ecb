"""The words for what went wrong, few enough to be counted. A server's own are `<server>:<kind>`."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

FailureStage: TypeAlias = Literal["admission", "seed", "agent", "verification", "cleanup"]

JUDGE_FAILED = "judge_failed"
VERIFIER_ERROR = "verifier_error"
_OTHERS = """transport_unreachable transport_peer_drop transport_timeout transport_local_resource agent_run_error
    agent_request_failed agent_timeout agent_command_not_allowed judge_unparseable provider_unavailable
    provider_quota_exhausted provider_oom_killed session_lost session_expired session_release_failed cancelled
    kill_shaped shutdown persistence_failed cohort_incomplete"""
FAILURE_KINDS = frozenset([JUDGE_FAILED, VERIFIER_ERROR, *_OTHERS.split()])
_NAMESPACED = re.compile(r"[a-z][a-z0-9_]*:[a-z][a-z0-9_]*")


def is_registered(name: str) -> bool:
    return name in FAILURE_KINDS


def is_namespaced(name: str) -> bool:
    return _NAMESPACED.fullmatch(name) is not None


def validate_failure_kind(name: str | None) -> str | None:
    """The name as it is: a failure with an unknown name is still a failure."""
    return name
