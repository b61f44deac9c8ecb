"""A call that is ready to be sampled, and the record of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from palestra.chat import ChatTokenizer
from palestra.chat.conversation_cache import HistoryMatch
from palestra.server.core.owners.callers import Caller
from palestra.server.model_api.client_headers import ClientHeaders
from palestra.server.model_api.engine_sampler import SampleOutcome
from palestra.server.model_api.errors import invalid, too_long
from palestra.server.model_api.model_resolver import SamplingTarget
from palestra.server.model_api.openai_chat.params import sampling_params, shown_params
from palestra.server.model_api.openai_chat.sampling_bounds import bounded, bounded_tokens, check_left_out
from palestra.server.model_api.openai_chat.schemas import ChatRequest, SamplingFields
from palestra.store.queries.traces import AGENT, TurnFacts
from palestra.types import Grammar, Picture, PlacedImage, SampleRequest

C_co = TypeVar("C_co", bound=SamplingFields, covariant=True)


@dataclass(frozen=True, slots=True)
class CallOrigin(Generic[C_co]):
    """A call, who made it, and how."""

    caller: Caller
    call: C_co
    route: str
    response_id: str
    headers: ClientHeaders = field(default_factory=ClientHeaders)
    ignored: list[str] = field(default_factory=list)
    """Names of fields and tools that were sent and are ignored. Before the answer begins, all of them are here."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Fields of chat calls that have another name in the API of the route."""
    started: float = field(default_factory=time.monotonic)

    def ignore(self, name: str) -> None:
        self.ignored.append(self.names.get(name, name))


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output options that differ between the routes."""

    max_tokens: int | None
    top: int | None
    """How many alternatives are returned for each token; None: no logprobs."""
    prompt_top: int | None
    """The same for the prompt's tokens."""
    grammar: Grammar | None = None
    prompt_field: str = "messages"
    images: tuple[PlacedImage, ...] = ()
    """Where pictures stand in the prompt."""
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    origin: CallOrigin[SamplingFields]
    target: SamplingTarget
    tokenizer: ChatTokenizer
    request: SampleRequest
    prepared: float = field(default_factory=time.monotonic)

    def facts(self, outcome: SampleOutcome, weights: str, match: HistoryMatch) -> TurnFacts:
        done, origin = time.monotonic(), self.origin
        return TurnFacts(
            response_id=origin.response_id,
            route=origin.route,
            base_model=self.target.worker.name,
            weights=weights,
            version=self.target.version,
            segments=outcome.segments,
            temperature=self.request.params.temperature,
            match=match.value,
            started_at=time.time() - (done - origin.started),
            prepare_s=self.prepared - origin.started,
            sample_s=done - self.prepared,
            compute_s=outcome.compute_s,
            cached_tokens=outcome.result.cached_prompt_tokens,
            params=shown_params(self.request.params),
            user=origin.call.user,
            metadata=origin.call.metadata,
            client=origin.headers.client,
            agent=_agent(origin),
            has_tools=isinstance(origin.call, ChatRequest) and bool(origin.call.tools),
            ignored=list(dict.fromkeys(origin.ignored)),
            images=list(self.request.images),
        )


def plan(
    origin: CallOrigin[SamplingFields],
    target: SamplingTarget,
    tokenizer: ChatTokenizer,
    prompt: Sequence[int],
    options: OutputOptions,
) -> SamplingPlan:
    call = bounded(origin.call, target.bounds)
    check_left_out(origin.ignored, target.bounds)
    check_vocabulary(prompt, target, options.prompt_field)
    if len(prompt) >= target.card.max_positions:
        raise too_long(len(prompt), target.card.max_positions, options.prompt_field)
    max_tokens = bounded_tokens(options.max_tokens, target.bounds)
    params = sampling_params(call, target, tokenizer.stop_ids, len(prompt), max_tokens)
    request = SampleRequest(
        prompt=tuple(prompt),
        images=options.images,
        pictures=options.pictures,
        params=params,
        num_samples=call.choices,
        grammar=options.grammar,
        topk_logprobs=options.top or 0,
        # The trace needs the logprobs of the distribution that was sampled from; if the client wants others, it gets
        # its own.
        raw_logprobs=options.top is not None
        and call.logprobs_mode != "temperature"
        and call.drawn_at not in (0.0, 1.0),
        prompt_logprobs=options.prompt_top is not None,
        topk_prompt_logprobs=options.prompt_top or 0,
    )
    return SamplingPlan(origin, target, tokenizer, request)


def _agent(origin: CallOrigin[SamplingFields]) -> str:
    """Returns for which of several agents the call is: as its metadata says, or else the client's headers."""
    named = (origin.call.metadata or {}).get(AGENT)
    return origin.headers.agent if named is None else str(named)


def check_vocabulary(tokens: Sequence[int], target: SamplingTarget, where: str) -> None:
    vocabulary = target.card.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise invalid(where, f"{where}: a token id is outside the vocabulary of {vocabulary}")
