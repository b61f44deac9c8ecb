"""The answer to `/aggregate_metrics`.

Owns: looking at what was sent. Never touches: the figures (`palestra.gym.metrics`).
"""

from __future__ import annotations

from collections.abc import Callable

from palestra.gym.errors import BadCall
from palestra.gym.records import ROLLOUT_INDEX, TASK_INDEX
from palestra.gym.wire import Answer, Call
from palestra.util.json_types import JsonMapping, JsonObject

INDICES = (TASK_INDEX, ROLLOUT_INDEX)
FIELD = "verify_responses"


def aggregated(
    call: Call,
    compute: Callable[[list[list[JsonMapping]]], JsonObject] | None = None,
    pick: Callable[[JsonObject], JsonObject] | None = None,
) -> Answer:
    """Raises BadCall."""
    from palestra.gym.metrics import aggregate

    rollouts = call.body.get(FIELD) if isinstance(call.body, dict) else None
    if not isinstance(rollouts, list):
        raise BadCall(422, [_problem("missing", [], "Field required", rollouts)])
    for number, one in enumerate(rollouts):
        if not isinstance(one, dict) or any(type(one.get(index, 0)) is not int for index in INDICES):
            words = f"Input should be a rollout: an object whose {' and '.join(INDICES)} are whole numbers"
            raise BadCall(422, [_problem("dict_type", [number], words, one)])
    return Answer(body=aggregate(rollouts, compute, pick))


def _problem(kind: str, where: list[int], words: str, given: object) -> JsonObject:
    return {"type": kind, "loc": ["body", FIELD, *where], "msg": words, "input": given}
