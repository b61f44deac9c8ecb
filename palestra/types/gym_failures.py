"""Classes of failures of a gym's rollouts.

`docs/gym.md` has the list for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from palestra.types.gym import FAILURE_CLASS, FAILURE_REASON, FAILURE_TERMINAL
from palestra.util.json_types import JsonMapping, JsonObject

REASON_CHARS = 2_000
OTHER_REASONS = ("_ng_failure_judge_error", "error")
"""Fields in which NeMo Gym's servers give the reason: of a failed judge, of a remote agent."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 that may succeed the next time."""


class FailureClass(StrEnum):
    """Values of `_ng_failure_class`. Agents may have further ones."""

    MODEL_RATE_LIMITED = "model_rate_limited"
    """The model's endpoint still answered 429 after all attempts of the model server."""
    MODEL_ERROR = "model_error"
    """The endpoint, or the model server, answered another error."""
    MODEL_TIMEOUT = "model_timeout"
    MODEL_UNREACHABLE = "model_unreachable"
    """No connection to the endpoint."""
    BAD_ANSWER = "bad_answer"
    """A model, a world or an agent answered with success, but the answer is malformed."""
    JUDGE_FAILED = "judge_failed"
    VERIFIER_REFUSED = "verifier_refused"
    """`verify` answered 4xx: it will never be able to judge this row."""
    VERIFIER_ERROR = "verifier_error"
    WORLD_ERROR = "world_error"
    """The resources server failed before `verify`: in `seed_session`, `reset` or `step`."""
    SESSION_LOST = "session_lost"
    """The state of the session is lost: its server was restarted, or the session was idle for too long."""
    ROW_REFUSED = "row_refused"
    """The agent, the model server or the world answered 4xx: the row itself is wrong."""
    UNKNOWN_AGENT = "unknown_agent"
    AGENT_ERROR = "agent_error"
    """The agent itself failed."""
    REMOTE_AGENT_ERROR = "remote_agent_error"
    """The service behind a `remote_agent` failed."""
    TIMEOUT = "timeout_exceeded"
    """The rollout, or a call in it, took longer than it may."""
    SERVER_DIED = "server_died"
    """A connection broke in the middle of the rollout."""
    SERVER_UNREACHABLE = "server_unreachable"
    NOT_KEPT = "not_kept"
    """Its agent asks not to store it (`_ng_no_persist`)."""


FINAL = frozenset({FailureClass.ROW_REFUSED, FailureClass.VERIFIER_REFUSED, FailureClass.UNKNOWN_AGENT})
"""Failures that would happen again: retrying the row does not help."""

OLD_NAMES = {
    "run_failed": FailureClass.AGENT_ERROR,
    "server_lost": FailureClass.SERVER_DIED,
    "invalid_answer": FailureClass.BAD_ANSWER,
    "verify_failed": FailureClass.VERIFIER_ERROR,
}
"""Names in files of earlier versions."""


class RowFailure(Struct, frozen=True, kw_only=True):
    kind: str
    """A FailureClass, or an agent's own word."""
    reason: str
    status: int | None = None
    """The HTTP status that caused it, if there was one."""
    is_final: bool = False

    @classmethod
    def of(cls, kind: FailureClass, reason: str, status: int | None = None) -> RowFailure:
        return cls(kind=kind, reason=reason[:REASON_CHARS], status=status, is_final=kind in FINAL)

    @classmethod
    def stated_in(cls, fields: Any) -> RowFailure | None:
        """The failure in parsed JSON; None if there is none."""
        kind = fields.get(FAILURE_CLASS) if isinstance(fields, Mapping) else None
        if not kind:
            return None
        status = fields.get("status")
        reasons = (fields.get(name) for name in (FAILURE_REASON, *OTHER_REASONS))
        return cls(
            kind=str(kind),
            reason=next((one[:REASON_CHARS] for one in reasons if isinstance(one, str)), ""),
            status=status if isinstance(status, int) else None,
            is_final=bool(fields.get(FAILURE_TERMINAL)),
        )

    @classmethod
    def answered(cls, who: str, status: int, body: bytes, otherwise: FailureClass) -> RowFailure:
        """Makes a failure of an answer with an error status. What it tells of itself is passed on as it is, so that a
        reason is said once however many servers it came through."""
        return cls.stated_in(_parsed(body)) or cls.of(otherwise, f"{who} answered {status}: {error_text(body)}", status)

    def fields(self) -> JsonObject:
        """The failure as fields of a JSON object."""
        fields_out: JsonObject = {FAILURE_CLASS: str(self.kind), FAILURE_REASON: self.reason}
        if self.status is not None:
            fields_out["status"] = self.status
        return fields_out | {FAILURE_TERMINAL: True} if self.is_final else fields_out


def run_failure(agent: str, status: int, body: bytes) -> RowFailure:
    """The failure that an error answer of an agent's `/run` means."""
    otherwise = FailureClass.ROW_REFUSED if is_refusal(status) else FailureClass.AGENT_ERROR
    return RowFailure.answered(agent, status, body, otherwise)


def is_refusal(status: int) -> bool:
    """Whether a status means that the same request would be refused again."""
    return 400 <= status < 500 and status not in PASSING


def class_in(line: JsonMapping) -> str:
    """The failure class in a line of a failures file; old names are translated."""
    kind = str(line.get(FAILURE_CLASS) or FailureClass.AGENT_ERROR)
    return str(OLD_NAMES.get(kind, kind))


def error_text(body: bytes) -> str:
    """The message in an error's body: FastAPI's `detail`, OpenAI's `error`, or a text."""
    message = _error_text(_parsed(body))
    return (message or body.decode(errors="replace"))[:REASON_CHARS]


def _error_text(detail: object) -> str:
    if isinstance(detail, str):
        return detail
    if isinstance(detail, list):
        return "; ".join(one for one in map(_error_text, detail) if one)
    if not isinstance(detail, Mapping):
        return ""
    if isinstance(detail.get("loc"), list):
        return f"{'.'.join(map(str, detail['loc']))}: {detail.get('msg')}"
    inner = next((detail[name] for name in (FAILURE_REASON, "detail", "error", "message") if detail.get(name)), None)
    return _error_text(inner)


def _parsed(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
