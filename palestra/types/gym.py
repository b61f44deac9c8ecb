"""Names of fields that training and a gym exchange: entries, rows, answers. Neither imports the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

GYM = "gym"
GYM_HEAD = "http://127.0.0.1:11000"
"""Address of a gym's head server, unless its config says otherwise."""

ComputeMetrics: TypeAlias = Callable[[list[list[JsonMapping]]], JsonPayload]
"""Computes metrics of a server's own from all rollouts by task."""
PickKeyMetrics: TypeAlias = Callable[[JsonObject], JsonPayload]
"""Picks the most important of all metrics."""

PARAMS = "responses_create_params"
AGENT_REF: Final = "agent_ref"
EXTRA_BODY = "extra_body"
"""Metadata of a request: further fields for the model's endpoint, as JSON text."""
POLICY = "policy_model_name"
"""In the metadata of a request: which model of the endpoint is to answer it, in place of the model server's own.
Training says there which weights it wants; `model` will not do, as datasets have one in their rows."""
ROLLOUT_SEED = "rollout_seed"
"""In the metadata of a request, as text: the model server makes a seed of it for each call of the rollout."""

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
ROLLOUT_ID = "_ng_rollout_id"
ATTEMPT_INDEX = "_ng_attempt_index"
FAILURE_CLASS = "_ng_failure_class"
FAILURE_REASON = "failure_reason"
FAILURE_TERMINAL = "_ng_failure_terminal"
NO_PERSIST = "_ng_no_persist"
TURN_TIMES = "_ng_turn_times"
"""In a result, from agents that measure it: a pair for each model call, its seconds and those of the tools after it."""
MASK_SAMPLE = "mask_sample"

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields on the last output item of each model call: all three or none."""
ROUTED_EXPERTS = "routed_experts"
"""A field beside them, if the engine reports which experts it used."""


def overruled(agent: str | None, rows: Sequence[str]) -> str | None:
    """A warning for a user who has named an agent for rows without one, given who plays each row; None if there is no
    need."""
    others = Counter(name for name in rows if name != agent)
    if agent is None or not others:
        return None
    named = ", ".join(name for name, _ in others.most_common(3)) + (", …" if len(others) > 3 else "")
    return f"agent {agent!r} plays rows that name no agent, but {others.total()} of {len(rows)} rows name one ({named})"


def is_gym(name: str) -> bool:
    """Whether an environment's name is `gym`, or `gym:NAME` where a run has several."""
    return name == GYM or name.startswith(f"{GYM}:")
