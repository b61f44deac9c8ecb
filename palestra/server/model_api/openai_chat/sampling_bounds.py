"""Keeps sampling parameters within the bounds of an episode's run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from palestra.server.model_api.errors import invalid
from palestra.server.model_api.hosted_tools import TOOLS
from palestra.server.model_api.openai_chat.schemas import CompletionRequest, SamplingFields
from palestra.types.episodes import OutOfBounds, SamplingBounds
from palestra.util.json_types import JsonObject

C = TypeVar("C", bound=SamplingFields)

FILTERS: dict[str, tuple[Any, ...]] = {
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
}
"""Parameters that filter tokens, with the values that change nothing."""
UNBOUNDED = SamplingBounds()
CODE = "out_of_bounds"


def bounded(call: C, bounds: SamplingBounds | None) -> C:
    """Returns the call as it may be sampled. 400 if its run's settings say to refuse it."""
    if bounds is None or bounds == UNBOUNDED:
        return call
    _check_answers(call, bounds)
    changes: JsonObject = {}
    most = float("inf") if bounds.max_temperature is None else bounds.max_temperature
    for name, default, least, largest in (
        ("temperature", 1.0, bounds.min_temperature, most),
        ("top_p", 1.0, bounds.min_top_p, 1.0),
    ):
        given = getattr(call, name)
        allowed = min(max(default if given is None else given, least), largest)
        if given is not None and given != allowed:
            _refuse_or_pass(bounds, name, f"{least:g} to {largest:g} is allowed in this run, found {given:g}")
        changes[name] = allowed
    for name, harmless in FILTERS.items():
        given = getattr(call, name)
        if not bounds.can_filter and given is not None and given not in harmless:
            _refuse_or_pass(bounds, name, "this run does not allow top_p, top_k and the like; leave it out")
            changes[name] = None
    return call.model_copy(update=changes)


def bounded_tokens(requested: int | None, bounds: SamplingBounds | None) -> int | None:
    """Returns the maximum number of tokens of one answer. None: as many as fit."""
    if bounds is None or bounds.max_tokens is None:
        return requested
    return bounds.max_tokens if requested is None else min(requested, bounds.max_tokens)


def check_left_out(ignored: Sequence[str], bounds: SamplingBounds | None) -> None:
    """400 if tools were left out of the prompt and the run does not allow it."""
    left_out = [name.removeprefix(TOOLS) for name in ignored if name.startswith(TOOLS)]
    if left_out and bounds is not None and not bounds.can_leave_out_tools:
        names = ", ".join(left_out)
        raise invalid(
            "tools", f"tools: the server does not run {names}, and this run allows no call without it", code=CODE
        )


def _check_answers(call: SamplingFields, bounds: SamplingBounds) -> None:
    answers = call.choices * (len(call.prompts) if isinstance(call, CompletionRequest) else 1)
    if bounds.max_n is not None and answers > bounds.max_n:
        raise invalid("n", f"n: this run allows at most {bounds.max_n} answers to a call, found {answers}", code=CODE)


def _refuse_or_pass(bounds: SamplingBounds, name: str, why: str) -> None:
    if bounds.outside is OutOfBounds.REFUSE:
        raise invalid(name, f"{name}: {why}", code=CODE)
