"""The playground: chats with models in the browser, over the same endpoint that programs use; and a call's trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import takewhile

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.runs.reader import Part
from palestra.server.broker.service import EpisodeService
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import TinkerPath
from palestra.server.model_api.service import ModelApi
from palestra.server.pages.access import TrainerNow
from palestra.store import Store
from palestra.store.queries.checkpoints import list_checkpoints
from palestra.store.records import CheckpointKind, CheckpointRow, Rights
from palestra.util.json_types import JsonObject
from palestra.view.api import json_response
from palestra.view.rendering import render
from palestra.view.rollouts.messages import content_text, show_messages
from palestra.view.rollouts.rollout_detail import read_rollout
from palestra.view.rollouts.rollout_records import messages_in

MAX_CHECKPOINTS = 200
MAX_TRACES = 100
MAX_TOKENS = 4000  # of one answer that are shown
MAX_PAGE_TOKENS = 12_000  # of a trace: the server does nothing else while it writes their page
LOWEST_LOGPROB = -6.0  # what is rarer looks the same
LEVELS = 8

api = APIRouter(prefix="/api/v1", tags=["playground"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class PlaygroundModel(Struct, frozen=True):
    """A model to talk to."""

    id: str
    """Its name for the model endpoint."""
    kind: str
    """base, alias or checkpoint."""
    about: str
    """What an alias points at, or when and from what a checkpoint was made."""


class ShownToken(Struct, frozen=True):
    text: str
    logprob: float | None = None
    """None: a whole answer in which something is masked."""
    level: int = 0
    """0 to 8: the higher, the less likely."""


class Opening(Struct, frozen=True):
    """What a conversation begins with."""

    system: str = ""
    text: str = ""


def opening_of(messages: Sequence[JsonObject]) -> Opening:
    """The messages before the first answer of the model, as the fields of the page have them."""
    asked = list(takewhile(lambda message: message.get("role") != "assistant", messages))
    system = [content_text(one) for one in asked if one.get("role") == "system"]
    return Opening("\n\n".join(system), "\n\n".join(content_text(one) for one in asked if one.get("role") != "system"))


@api.get("/playground/models")
async def list_playground_models(request: Request, caller: TrainerNow) -> Response:
    """Lists what the caller can talk to: base models, aliases such as `policy`, and checkpoints for sampling, newest
    first."""
    return json_response(await offered_models(request, caller))


@pages.get("/playground")
async def playground_page(
    request: Request,
    caller: TrainerNow,
    model: str = "",
    beside: str = "",
    run: str = "",
    part: Part = Part.ROLLOUTS,
    step: int = 0,
    id: str = "",  # noqa: A002
) -> HTMLResponse:
    """Shows the playground. A `run`, a `step` and an `id` fill in the prompt of that rollout, for callers who may see
    runs."""
    models = await offered_models(request, caller)
    opening = Opening()
    if run:
        await request.app.state.authenticator.admit(request, rights=(Rights.ADMIN,))
        record = (await asyncio.to_thread(read_rollout, request.app.state.catalogue, run, part, step, id)).record
        opening = opening_of(messages_in(record))
    known = {one.id for one in models}
    chosen = [
        PlaygroundModel(name, "named", "") for name in dict.fromkeys((model, beside)) if name and name not in known
    ]
    content = {"models": [*models, *chosen], "model": model, "beside": beside, "opening": opening}
    return render(request, "playground.html", **content)


@pages.get("/traces")
async def traces_page(request: Request, caller: TrainerNow) -> HTMLResponse:
    service: ModelApi = request.app.state.model_api
    found = await service.traces.page(caller, MAX_TRACES, 0, None)
    return render(request, "traces.html", traces=found["data"], total=found["total"])


@pages.get("/traces/{trace_id}")
async def trace_page(request: Request, caller: TrainerNow, trace_id: str, turn: int | None = None) -> HTMLResponse:
    service: ModelApi = request.app.state.model_api
    trace = await service.traces.one(caller, trace_id)
    limits = token_limits([[len(sample["tokens"]) for sample in one["samples"]] for one in trace["turns"]])
    turns = [
        {**one, "strips": await _strips(request, caller, one, most)}
        for one, most in zip(trace["turns"], limits, strict=True)
    ]
    shown = {"messages": show_messages(_conversation(turns, turn))}
    return render(request, "trace.html", trace=trace, turns=turns, shown=shown)


async def offered_models(request: Request, caller: Caller) -> list[PlaygroundModel]:
    service: ModelApi = request.app.state.model_api
    served = [
        PlaygroundModel(target.name, "base", "")
        if target.alias is None
        else PlaygroundModel(target.name, "alias", target.alias.model)
        for target in await service.models.listed(caller)
    ]
    saved = [
        PlaygroundModel(address, "checkpoint", row.base_model)
        for address, row in (await known_checkpoints(request, caller)).items()
        if row.kind is CheckpointKind.SAMPLER
    ]
    return served + saved


async def known_checkpoints(request: Request, caller: Caller) -> dict[str, CheckpointRow]:
    """The newest checkpoints of the caller's owner, by address."""
    store: Store = request.app.state.store
    found = await store.read(
        lambda conn: list_checkpoints(conn, owner=caller.owner, alive_at=time.time(), limit=MAX_CHECKPOINTS)
    )
    return {str(TinkerPath(row.model_id, row.kind, row.name)): row for row in found.items}


def token_limits(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns how many tokens of each answer of each turn are shown. In a long trace the newest turns have theirs."""
    left, limits = MAX_PAGE_TOKENS, []
    for turn in reversed(lengths):
        limits.append([])
        for length in turn:
            limits[-1].append(min(length, MAX_TOKENS, left))
            left -= limits[-1][-1]
    return limits[::-1]


async def _strips(request: Request, caller: Caller, turn: JsonObject, limits: Sequence[int]) -> list[list[ShownToken]]:
    """The tokens of each answer."""
    models = request.app.state.model_api.models
    tokenizer = await models.tokenizer(await models.find(caller, turn["base_model"]))
    samples = zip(turn["samples"], limits, strict=True)
    return [await _strip(request.app.state.episodes, tokenizer, sample, most) for sample, most in samples]


async def _strip(episodes: EpisodeService, tokenizer: ChatTokenizer, sample: JsonObject, most: int) -> list[ShownToken]:
    tokens = sample["tokens"][:most]
    text = tokenizer.decode(tokens, skip_special=False)
    (masked,) = await episodes.masking.of([text])
    if masked != text:
        return [ShownToken(masked)]
    return [
        ShownToken(tokenizer.decode([token], skip_special=False), logprob, _level(logprob))
        for token, logprob in zip(tokens, sample["logprobs"], strict=False)
    ]


def _conversation(turns: Sequence[JsonObject], number: int | None) -> list[JsonObject]:
    """The messages up to a turn, or the last one. A turn has those that its parent does not have; a trace branches
    where a conversation was continued twice."""
    known = {one["number"]: one for one in turns}
    turn = known.get(turns[-1]["number"] if number is None else number)
    messages: list[JsonObject] = list(turn["answers"]) if turn else []
    while turn:
        parent = known.get(turn["parent"])
        before = [parent["answers"][turn["parent_sample"]]] if parent else []
        messages = [*before, *turn["messages"], *messages]
        turn = parent
    return messages


def _level(logprob: float) -> int:
    return round(LEVELS * min(1.0, max(0.0, logprob / LOWEST_LOGPROB)))
