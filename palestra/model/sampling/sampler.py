"""Generation: requests in, tokens out, one step of the whole batch at a time.

    rid = sampler.submit(request, adapter)
    while sampler.has_work:
        for finished in sampler.step().finished: …

Each step runs every decoding row and a bounded chunk of waiting prompts through the decoder together. On a GPU the host
follows one step behind: a step begins from tokens that only the device knows, and while it is computed the host reads
those tokens, looks for stops and asks grammars. A sequence that turns out to have stopped was computed in vain.

Owns: the life of a request. Never touches: training, HTTP.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from palestra.model.attention.backends import has_kernels, packed_attention, paged_attention
from palestra.model.attention.kv_cache import KVCache, row_positions
from palestra.model.decoder import Decoder
from palestra.model.errors import DataError
from palestra.model.lora.adapters import Adapter, AdapterPool
from palestra.model.lora.layout import UNEMBED
from palestra.model.lora.linear import LoraPlan, merge_runs
from palestra.model.mixers.packed_recurrence import packed_recurrence
from palestra.model.mlp.routing import Routing
from palestra.model.sampling.grammars import CompiledGrammar, Grammars
from palestra.model.sampling.kv_page_pool import PagePool
from palestra.model.sampling.logit_filters import DrawRow, TokenMask
from palestra.model.sampling.prompt_logprobs import PromptScores
from palestra.model.sampling.recurrent_states import RecurrentStates
from palestra.model.sampling.request_checks import check_request
from palestra.model.sampling.routing_cache import RoutingCache, routed_experts
from palestra.model.sampling.running_requests import (
    Failed,
    Finished,
    PendingChange,
    RunningRequest,
    RunningSequence,
    SharedWeights,
    StepOutput,
    TokenEvent,
    UnreadTokens,
)
from palestra.model.sampling.scheduler import RequestTooLarge, Scheduler
from palestra.model.sampling.sequences import PENDING, Ready, Sequence, SequenceState, StepPlan
from palestra.model.sampling.slotted_recurrence import slotted_recurrence
from palestra.model.sampling.state_slots import StateSlots
from palestra.model.sampling.stop_strings import ends_with_stop
from palestra.model.sampling.token_draws import draw
from palestra.model.training.head import chunk_rows, logits_of
from palestra.model.transfers import to_device
from palestra.model.vision.placed import BatchPictures, PictureRows, place_pictures, sequence_positions
from palestra.types import Picture, SampledSequence, SampleRequest, SampleResult, StopReason, TopLogprobs
from palestra.types.sampling import WeightsChange

if TYPE_CHECKING:
    from palestra.model.sampling.cuda_graphs import StepGraphs

RowAdapters = list[tuple[Adapter | None, int]]
"""Adapters of a step's rows, and how many rows each has."""
AroundLayers = Callable[[StepPlan, Tensor, RowAdapters], AbstractContextManager[None]]

CPU_CACHE_BYTES = 512 << 20
STATE_SHARE = 0.5  # of the cache at most for the recurrent states of running rows, where a model has some
SNAPSHOT_SHARE = 0.25  # of what these leave, at most, for snapshots of states; the rest is for pages
SNAPSHOTS_PER_ROW = 4  # more than these would hardly be found again
CACHE_SHARE = 0.5  # of what a GPU has left beside the weights; the rest is for training
GRAMMAR_WAIT_S = 0.02  # then the caller looks whether there is something else to do


class Sampler:
    """Samples from one decoder for many requests at once, each with an adapter or the base model.

    Requests are taken by `submit`; each `step` draws the next token of every running sequence and returns what came.
    A request keeps the weights that its adapter had when it was submitted, unless `change_weights` gives it others.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        *,
        tokenizer: Tokenizer | None = None,
        page_size: int = 16,
        cache_tokens: int | None = None,
        cache_share: float = CACHE_SHARE,
        max_rows: int = 256,
        prefill_tokens: int = 2048,
        runs_ahead: bool | None = None,
    ):
        """`runs_ahead`: a step begins before the tokens of the last one are read; by default on a GPU."""
        self.decoder, self.pool, self.tokenizer = decoder, pool, tokenizer
        self.runs_ahead = decoder.device.type == "cuda" if runs_ahead is None else runs_ahead
        spec = decoder.spec
        cache_bytes = _cache_bytes(decoder.device, cache_share)
        self.state_slots = _state_slots(decoder, cache_bytes, max_rows, page_size)
        if cache_tokens is None:
            per_token = spec.kv_numbers_per_token * decoder.dtype.itemsize
            n_states = 0 if self.state_slots is None else self.state_slots.n_slots + self.state_slots.n_snapshots
            for_pages = cache_bytes - n_states * decoder.spec.state_bytes(decoder.dtype.itemsize)
            cache_tokens = max(for_pages // per_token, page_size)
        self.pages = PagePool(-(-cache_tokens // page_size), page_size)
        self.cache = KVCache(spec, self.pages.n_pages, page_size, dtype=decoder.dtype, device=decoder.device)
        self.routing = RoutingCache(spec, self.pages.n_pages, page_size, decoder.device) if spec.experts else None
        self.scheduler = Scheduler(
            self.pages, max_rows=max_rows, prefill_tokens=prefill_tokens, states=self.state_slots
        )
        self.states = _states(decoder, self.state_slots)
        self.graphs = _step_graphs(decoder, self.cache, self.states, max_rows)
        self._ids, self._uids = itertools.count(), itertools.count()
        self._requests: dict[int, RunningRequest] = {}
        self._samples: dict[int, RunningSequence] = {}
        self._weights: dict[int, SharedWeights] = {}
        self.grammars = None if tokenizer is None else Grammars(tokenizer, spec.vocab_size)
        self._compiling: dict[int, Future[CompiledGrammar]] = {}
        """By request: what it waits for, before anything is computed."""
        self._unseen: dict[int, list[Picture]] = {}
        """By request: pictures that the tower has to read, before anything else is computed."""
        self._with_pictures = 0
        """How many requests have pictures."""
        self._flight: UnreadTokens | None = None
        self._changes: list[PendingChange] = []
        self.around_layers: AroundLayers = lambda plan, tokens, adapters: nullcontext()
        """Wraps each pass through the layers, where other processes compute them too."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._compiling or self._unseen) or self._flight is not None

    @property
    def running(self) -> int:
        """Sequences that have pages, and tokens to come."""
        return self.scheduler.running

    @property
    def waiting(self) -> int:
        return self.scheduler.waiting

    @property
    def kv_used(self) -> float:
        """Share of the cache's pages that running sequences hold; the rest is free or can be had."""
        return 1.0 - self.pages.available / self.pages.n_pages

    @property
    def weights_in_use(self) -> Collection[int]:
        """The `weights_id` of all adapters that requests use."""
        return self._weights.keys()

    def submit(self, request: SampleRequest, adapter: Adapter | None = None, *, mask: TokenMask | None = None) -> int:
        check_request(request, self.decoder.spec, has_tokenizer=self.tokenizer is not None)
        weights = None if adapter is None else self._borrow(adapter)
        try:
            return self._enqueue(request, weights, mask)
        except RequestTooLarge as e:
            self._give_back(weights)
            raise DataError(str(e)) from None

    def abort(self, request_id: int) -> SampleResult | None:
        """Stops a request; what it has so far comes back. None if it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        is_scheduled = self._compiling.pop(request_id, None) is None and self._unseen.pop(request_id, None) is None
        for sample in request.samples:
            if sample.stop_reason is None:
                if is_scheduled:
                    self.scheduler.abort(sample.seq)
                sample.stop_reason = StopReason.ABORT
        result = self._close(request)
        if self._flight is not None and not self._samples.keys() & self._flight.places.keys():
            self._flight = None  # its tokens are not waited for any more
        return result

    def change_weights(self, request_id: int, adapter: Adapter, name: str, *, keeps_keys: bool) -> bool:
        """Lets a request go on with other weights from its next step on, and says so under `name` in its result.
        `keeps_keys`: keys and values of the older ones stay; otherwise they are computed anew. Returns False, and
        changes nothing, if the request is not here, has no adapter, or asks what the weights say of its prompt."""
        request = self._requests.get(request_id)
        if request is None or request.weights is None or request.scores is not None:
            return False
        self._changes.append(PendingChange(request_id, self._borrow(adapter), name, keeps_keys))
        return True

    @torch.inference_mode()
    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compiles kernels and records graphs, so that no request waits for it; `on_progress(done, of)`."""
        keys = [] if self.graphs is None else self.graphs.usual_keys
        for done, key in enumerate(keys):
            on_progress(done, len(keys))
            if self.graphs is not None:
                self.graphs.record(key)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Runs the model once; with nothing to do, does nothing. Tokens come with the step after their own where the
        sampler runs ahead."""
        output = StepOutput()
        if self._changes:
            self._settle(output)  # what was drawn before is of the older weights
            self._apply_changes()
        if self._compiling:
            self._begin_compiled(output)
        if self._unseen:
            self._look(output)
        plan, flight = self.scheduler.plan(), self._flight
        try:
            hidden = self._forward(plan) if plan.rows else None
            self._settle(output)
            if hidden is not None:
                self._flight = self._draw(plan, hidden, output)
            if not self.runs_ahead:
                self._settle(output)
        except Exception as e:  # the step is lost for those in it; whoever waits outside goes on
            was_read = flight is not None and self._flight is not flight
            uids = [*(chunk.seq.uid for chunk in plan.rows), *(flight.places if flight and was_read else ())]
            for sample in [self._samples[uid] for uid in uids if uid in self._samples]:
                if self.abort(sample.request.id) is not None:
                    output.failed.append(Failed(sample.request.id, e))
        return output

    def generate(
        self, requests: Seq[SampleRequest], adapters: Seq[Adapter | None] | Adapter | None = None
    ) -> list[SampleResult]:
        """Submits all, runs until all are done. For use alone: a loop with `submit` and `step` serves many callers."""
        if self.has_work:
            raise DataError("generate() cannot run while other requests are in flight; use submit() and step()")
        per_request = adapters if isinstance(adapters, Seq) else [adapters] * len(requests)
        ids: list[int] = []
        done: dict[int, SampleResult] = {}
        try:
            for request, adapter in zip(requests, per_request, strict=True):
                ids.append(self.submit(request, adapter))
            while self.has_work:
                output = self.step()
                if output.failed:
                    raise output.failed[0].error
                done.update((f.request_id, f.result) for f in output.finished)
        finally:
            for number in ids:
                self.abort(number)  # nothing to do for those that are done
        return [done[i] for i in ids]

    # A request's way in

    def _borrow(self, adapter: Adapter) -> SharedWeights:
        self.pool.require(adapter)
        weights = self._weights.get(adapter.weights_id)
        if weights is None:
            weights = self._weights[adapter.weights_id] = SharedWeights(self.pool.snapshot(adapter))
        weights.requests += 1
        return weights

    def _give_back(self, weights: SharedWeights | None) -> None:
        if weights is not None:
            weights.requests -= 1
            if not weights.requests:
                self.pool.free(self._weights.pop(weights.adapter.weights_id).adapter)

    def _enqueue(self, request: SampleRequest, weights: SharedWeights | None, mask: TokenMask | None) -> int:
        p, prompt = request.params, request.prompt
        pictures = None
        if request.images:
            sent = {picture.digest: picture for picture in request.pictures}
            pictures = place_pictures(self.decoder.spec, request.images, sent, len(prompt))
        tokens = prompt if pictures is None else pictures.with_ids(prompt)
        stop_ids = self.decoder.spec.eos_token_ids if p.stop_token_ids is None else p.stop_token_ids
        stop_ids = tuple(t for t in stop_ids if 0 <= t < self.decoder.spec.vocab_size)
        longest = self.decoder.spec.max_positions
        max_len = longest if p.max_tokens is None else min(longest, len(prompt) + p.max_tokens)
        if p.max_tokens is None:  # an open end may use what the cache has; the rest is LENGTH
            max_len = max(len(prompt) + 1, min(max_len, self.pages.n_pages * self.pages.page_size))
        seed = secrets.randbits(64) if p.seed is None else p.seed
        scores = PromptScores.of(request, seed, self.decoder.spec.vocab_size, pictures)
        entry = RunningRequest(next(self._ids), request, weights, stop_ids, scores)
        version = 0 if weights is None else weights.adapter.weights_id
        for index in range(request.num_samples):
            seq = Sequence(
                next(self._uids),
                (version, request.cache_salt),
                list(tokens),
                len(prompt),
                max_len,
                adapter_slot=-1 if weights is None else version,
                compute_from=None if scores is None else scores.first_row,
                pictures=pictures,
            )
            row = DrawRow(p, seed, index, request.prompt, [], stop_ids, request.raw_logprobs)
            entry.samples.append(RunningSequence(entry, index, seq, row, mask))
        leader = entry.samples[0].seq
        leader.siblings = [s.seq for s in entry.samples[1:]]
        if request.grammar is not None and self.grammars is not None:
            self._compiling[entry.id] = self.grammars.compile(request.grammar)
        else:
            self._begin(entry)
        self._with_pictures += pictures is not None
        self._requests[entry.id] = entry
        self._samples.update((s.seq.uid, s) for s in entry.samples)
        return entry.id

    def _begin(self, request: RunningRequest) -> None:
        """Lets it be computed, once the tower has read its pictures."""
        leader = request.samples[0].seq
        if leader.pictures is not None and request.id not in self._unseen:
            self.scheduler.require_fit(leader)
            self._unseen[request.id] = list(leader.pictures.pictures)
        else:
            self.scheduler.add(leader)

    def _look(self, output: StepOutput) -> None:
        """The tower reads at most one picture in a step, so that decoding goes on beside it."""
        vision, number = self.decoder.vision, next(iter(self._unseen))
        todo = self._unseen[number]
        assert vision is not None
        try:
            while todo:
                is_known = todo[-1] in vision
                vision.of(todo.pop())
                if todo and not is_known:
                    return
            self._begin(self._requests[number])
            del self._unseen[number]
        except Exception as e:
            self.abort(number)
            output.failed.append(Failed(number, e))

    def _begin_compiled(self, output: StepOutput) -> None:
        """Begins requests whose grammars are ready. A step that would have nothing to do waits for one."""
        if not self.scheduler.has_work and self._flight is None:
            wait(self._compiling.values(), GRAMMAR_WAIT_S, FIRST_COMPLETED)
        for number in [n for n, compiled in self._compiling.items() if compiled.done()]:
            request = self._requests[number]
            try:
                grammar = self._compiling[number].result()
                for sample in request.samples:
                    sample.mask = grammar.begin(request.stop_ids)
                self._begin(request)
                del self._compiling[number]
            except Exception as e:
                self.abort(number)
                output.failed.append(Failed(number, DataError(str(e)) if isinstance(e, RequestTooLarge) else e))

    # Other weights for requests that run

    def _apply_changes(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            request = self._requests[change.request_id]
            old, request.weights = request.weights, change.weights
            for sample in request.samples:
                if sample.stop_reason is None:
                    self._change(sample, change)
            self._give_back(old)

    def _change(self, sample: RunningSequence, change: PendingChange) -> None:
        start, weights_id, seq = len(sample.draw.generated), change.weights.adapter.weights_id, sample.seq
        if sample.changes and sample.changes[-1].start == start:
            sample.changes.pop()
        if weights_id != seq.adapter_slot:
            version = (weights_id, sample.request.spec.cache_salt)
            self.scheduler.change_version(seq, version, weights_id, keeps_keys=change.keeps_keys)
        sample.changes.append(WeightsChange(start, change.name, is_exact=not seq.is_mixed))

    # One step

    def _forward(self, plan: StepPlan) -> Tensor:
        device = self.decoder.device
        self._copy_pages(plan)
        tokens, adapters = self._input_tokens(plan), self._adapters(plan)
        positions, pictures = (row_positions(plan), None) if not self._with_pictures else self._see(plan)
        hidden = routes = None
        if self.graphs is not None and pictures is None:
            hidden = self.graphs.run(plan, tokens, merge_runs(adapters), positions)
            routes = self.graphs.routes(len(tokens))
        if hidden is None:
            routing = None if self.routing is None else Routing()
            with self.around_layers(plan, tokens, adapters):
                hidden = self.decoder(
                    tokens,
                    to_device(positions, device),
                    paged_attention(self.cache, plan),
                    LoraPlan.of(adapters, device=device),
                    None if self.states is None else slotted_recurrence(self.states, plan),
                    routing=routing,
                    pictures=pictures,
                )
            routes = None if routing is None else routing.by_row
        if self.states is not None:
            self.states.save(plan.snapshots)
        if self.routing is not None and routes is not None:
            self.routing.write(plan, routes)
        self._read_prompts(plan, hidden)
        return hidden

    def _see(self, plan: StepPlan) -> tuple[NDArray[np.int64], PictureRows | None]:
        """Rope positions of the plan's rows, and what pictures are to them."""
        return self._see_chunks([(chunk.seq, chunk.start, chunk.end) for chunk in plan.rows])

    def _see_chunks(self, chunks: Seq[tuple[Sequence, int, int]]) -> tuple[NDArray[np.int64], PictureRows | None]:
        found, vision = BatchPictures(), self.decoder.vision
        positions = np.concatenate([sequence_positions(seq.pictures, start, end) for seq, start, end in chunks])
        index = np.concatenate([found.index(seq.pictures, start, end) for seq, start, end in chunks])
        pictures = None if vision is None else found.rows(index, vision, self.decoder.device)
        # All three numbers of a row of text are equal.
        return positions if pictures is not None else np.ascontiguousarray(positions[:, 0]), pictures

    def _copy_pages(self, plan: StepPlan) -> None:
        self.cache.copy(plan.copies)
        if self.states is not None:
            self.states.move(plan.state_moves)
        if self.routing is not None:
            self.routing.copy(plan.copies)

    def _input_tokens(self, plan: StepPlan) -> Tensor:
        """Returns the input tokens; those that are not read yet come from where they were drawn."""
        tokens = [s.tokens[s.computed] for s in plan.decode]
        for chunk in plan.prefill:
            tokens += chunk.seq.tokens[chunk.start : chunk.end]
        known = to_device(tokens, self.decoder.device, np.int64)
        if self._with_pictures:
            known = known.clamp_min(0)  # rows of pictures have no embeddings
        if self._flight is None:
            return known
        places = np.full(len(tokens), -1, np.int64)
        for row, (seq, token) in enumerate(zip(plan.decode, tokens, strict=False)):
            if token == PENDING:
                places[row] = self._flight.places[seq.uid]
        found = to_device(places, self.decoder.device)
        return torch.where(found < 0, known, self._flight.tokens[found.clamp_min(0)])

    def _adapters(self, plan: StepPlan) -> RowAdapters:
        """The adapter of each chunk's sequence, and the chunk's rows."""
        return [(self._adapter(c.seq), c.end - c.start) for c in plan.rows]

    def _adapter(self, seq: Sequence) -> Adapter | None:
        weights = self._samples[seq.uid].request.weights
        return None if weights is None else weights.adapter

    def _read_prompts(self, plan: StepPlan, hidden: Tensor) -> None:
        first = len(plan.decode)
        for chunk in plan.prefill:
            seq, rows = chunk.seq, hidden[first : first + chunk.end - chunk.start]
            scores = self._samples[seq.uid].request.scores
            if scores is not None and seq.compute_from is not None:
                scores.read(chunk.start, rows, partial(self._logits, seq), chunk_rows(self.decoder))
            first += len(rows)

    def _logits(self, seq: Sequence, hidden: Tensor) -> Tensor:
        return logits_of(self.decoder, hidden, self._head_plan([seq] * len(hidden)))

    def _head_plan(self, rows: Seq[Sequence]) -> LoraPlan:
        """Returns the LoRA plan of the unembedding, which few adapters have."""
        adapters = map(self._adapter, rows)
        runs = [(a if a is not None and UNEMBED in a.stack.layout.sites else None, 1) for a in adapters]
        return LoraPlan.of(runs, device=self.decoder.device)

    def _ask_masks(self, ready: list[Ready], output: StepOutput) -> list[Ready]:
        """Masks are the caller's code: one that raises ends its own request, the rest goes on. One that allows nothing
        more ends its sequence."""
        samples = [self._samples[s.uid] for r in ready for s in r.seqs]
        masked = [sample for sample in samples if sample.mask is not None]
        if not masked:
            return ready
        for sample in masked:
            try:
                if sample.stop_reason is None and not self._ask_mask(sample):
                    sample.stop_reason = StopReason.STOP
                    self._finish(sample, output)
            except Exception as e:
                if self.abort(sample.request.id) is not None:
                    output.failed.append(Failed(sample.request.id, e))
        over = {sample.seq.uid for sample in samples if sample.stop_reason is not None}
        alive = [Ready(r.row, [s for s in r.seqs if s.uid not in over]) for r in ready] if over else ready
        return [r for r in alive if r.seqs]

    def _ask_mask(self, sample: RunningSequence) -> bool:
        """Whether anything can follow."""
        assert sample.mask is not None
        vocab_size, generated = self.decoder.spec.vocab_size, sample.draw.generated
        allowed = sample.draw.allowed = sample.mask.allowed(generated)
        if allowed is None:
            return True
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.shape != (vocab_size,):
            raise DataError(f"the token mask must be a bool tensor of {vocab_size} (the model's vocabulary) or None")
        if not generated and not allowed.any():
            grammar, problem = sample.request.spec.grammar, "no token can be drawn: {} allows none"
            raise DataError(problem.format("the mask") if grammar is None else grammar.refusal(problem.format("it")))
        return bool(allowed.any())

    def _draw(self, plan: StepPlan, hidden: Tensor, output: StepOutput) -> UnreadTokens | None:
        """Logits once per ready row; each of its sequences draws from them, some at a time: a draw holds its rows a
        few times over."""
        ready = self._ask_masks(self.scheduler.commit(plan), output)
        if not ready:
            return None
        rows, device, last = plan.rows, hidden.device, -1
        ends = [last := last + c.end - c.start for c in rows]
        index = [ends[r.row] for r in ready]
        if index != list(range(len(hidden))):
            hidden = hidden[to_device(index, device)]
        logits = logits_of(self.decoder, hidden, self._head_plan([rows[r.row].seq for r in ready]))
        samples = [self._samples[s.uid] for r in ready for s in r.seqs]
        source = [i for i, r in enumerate(ready) for _ in r.seqs]
        size, draws = chunk_rows(self.decoder), []
        for start in range(0, len(samples), size):
            part, taken = samples[start : start + size], source[start : start + size]
            if len(taken) == taken[-1] - taken[0] + 1:  # it goes up by 0 or 1: one sequence a row
                own = logits[taken[0] : taken[-1] + 1]
            else:
                own = logits[to_device(taken, device)]
            top = max(s.request.spec.topk_logprobs for s in part)
            alone = partial(self._logits_alone, part) if self._can_compute_alone else None
            draws.append((part, draw(own, [s.draw for s in part], top=top, logits_alone=alone)))
        for sample in samples:
            if len(sample.seq.tokens) + 1 < sample.seq.max_len:
                self.scheduler.append(sample.seq)
            else:  # whatever the token is, it is the last
                self._keep_routing(sample, sample.seq.computed)
                self.scheduler.finish(sample.seq)
        tokens = draws[0][1].tokens if len(draws) == 1 else torch.cat([d.tokens for _, d in draws])
        return UnreadTokens(draws, {sample.seq.uid: i for i, sample in enumerate(samples)}, tokens)

    @property
    def _can_compute_alone(self) -> bool:
        """Whether rounding depends on batch mates, and this process has the whole model and all tokens."""
        decoder = self.decoder
        is_rounded_by_batch = decoder.device.type == "cpu" and decoder.dtype == torch.float32
        return is_rounded_by_batch and not (self.runs_ahead or decoder.tensor or decoder.sharded)

    def _logits_alone(self, samples: Seq[RunningSequence], number: int) -> Tensor:
        """Logits of a sequence's next token, without batch mates and cache: always the same bits."""
        decoder, seq = self.decoder, samples[number].seq
        device, n = decoder.device, len(seq.tokens)
        positions, pictures = (np.arange(n), None) if seq.pictures is None else self._see_chunks([(seq, 0, n)])
        hidden = decoder(
            to_device(seq.tokens, device, np.int64).clamp_min(0),
            to_device(positions, device),
            packed_attention(
                [n],
                decoder.spec,
                device,
                decoder.dtype,
                ahead=None if seq.pictures is None else seq.pictures.ahead(0, n),
            ),
            LoraPlan.of([(self._adapter(seq), n)], device=device),
            packed_recurrence([n], decoder.spec, device, decoder.dtype),
            routing=None if self.routing is None else Routing(),
            pictures=pictures,
        )
        return self._logits(seq, hidden[-1:])

    def _settle(self, output: StepOutput) -> None:
        """Reads what was drawn last."""
        flight, self._flight = self._flight, None
        for samples, draws in flight.draws if flight else ():
            drawn = draws.read()
            for i, sample in enumerate(samples):
                if sample.stop_reason is None:  # it may have been aborted
                    if k := sample.request.spec.topk_logprobs:
                        sample.top.append(TopLogprobs(tuple(drawn.top_ids[i][:k]), tuple(drawn.top_logprobs[i][:k])))
                    self._advance(sample, drawn.tokens[i], drawn.logprobs[i], drawn.raw[i], output)

    def _advance(self, sample: RunningSequence, token: int, logprob: float, raw: float, output: StepOutput) -> None:
        request, generated = sample.request, sample.draw.generated
        assert isinstance(generated, list)
        generated.append(token)
        sample.logprobs.append(logprob)
        if request.spec.raw_logprobs:
            sample.raw.append(raw)
        top = sample.top[-1] if sample.top else None
        output.tokens.append(TokenEvent(request.id, sample.index, token, raw, top, len(generated) == 1))
        if self._has_stopped(request, generated):
            sample.stop_reason = StopReason.STOP
        elif sample.seq.state is SequenceState.FINISHED:
            sample.stop_reason = StopReason.LENGTH
        if sample.stop_reason is None:
            self.scheduler.settle(sample.seq, token)
        else:
            self._finish(sample, output)

    def _finish(self, sample: RunningSequence, output: StepOutput) -> None:
        request = sample.request
        self._keep_routing(sample, len(request.spec.prompt) + len(sample.draw.generated) - 1)
        self.scheduler.finish(sample.seq)
        if all(s.stop_reason is not None for s in request.samples):
            output.finished.append(Finished(request.id, self._close(request)))

    def _keep_routing(self, sample: RunningSequence, n: int) -> None:
        """Experts of the first `n` positions, read before the pages go to other sequences."""
        if self.routing is not None and sample.request.spec.record_routing and sample.seq.pages:
            sample.routing = self.routing.read(sample.seq.pages, n)

    def _has_stopped(self, request: RunningRequest, generated: list[int]) -> bool:
        stops = request.spec.params.stop_strings
        if generated[-1] in request.stop_ids:
            return True
        if not stops or self.tokenizer is None or len(generated) <= request.spec.params.min_tokens:
            return False
        return ends_with_stop(self.tokenizer, generated[request.spec.params.min_tokens :], stops)

    # A request's way out

    def _close(self, request: RunningRequest) -> SampleResult:
        del self._requests[request.id]
        for sample in request.samples:
            del self._samples[sample.seq.uid]
        self._give_back(request.weights)
        for change in [one for one in self._changes if one.request_id == request.id]:
            self._changes.remove(change)
            self._give_back(change.weights)
        self._with_pictures -= request.samples[0].seq.pictures is not None
        result = SampleResult(
            sequences=[
                SampledSequence(
                    tokens=list(s.draw.generated),
                    logprobs=s.logprobs,
                    stop_reason=s.stop_reason or StopReason.ABORT,
                    raw_logprobs=s.raw,
                    topk_logprobs=s.top,
                    routing=None if s.routing is None else routed_experts(s.routing),
                    changes=s.changes,
                )
                for s in request.samples
            ],
            cached_prompt_tokens=request.samples[0].seq.cached_tokens,
        )
        if request.scores is not None:
            request.scores.write_to(result)
        return result


def _cache_bytes(device: torch.device, share: float) -> int:
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + unused) * share)


def _state_slots(decoder: Decoder, cache_bytes: int, max_rows: int, page_size: int) -> StateSlots | None:
    """Slots for as many rows as there may be, if they fit, and snapshots beside them."""
    if not decoder.spec.recurrences:
        return None
    size = decoder.spec.state_bytes(decoder.dtype.itemsize)
    rows = max(1, min(int(cache_bytes * STATE_SHARE) // size, max_rows))
    snapshots = int((cache_bytes - rows * size) * SNAPSHOT_SHARE) // size
    return StateSlots(rows, max(1, min(snapshots, SNAPSHOTS_PER_ROW * max_rows)), page_size)


def _states(decoder: Decoder, slots: StateSlots | None) -> RecurrentStates | None:
    if slots is None:
        return None
    n_rows = slots.n_slots + slots.n_snapshots
    return RecurrentStates(decoder.spec, n_rows, dtype=decoder.dtype, device=decoder.device)


def _step_graphs(decoder: Decoder, cache: KVCache, states: RecurrentStates | None, max_rows: int) -> StepGraphs | None:
    """Makes the graphs of steps. None where steps are not recorded: without kernels, and where other processes have a
    part of the weights."""
    if decoder.device.type != "cuda" or not has_kernels(decoder.spec, decoder.device, decoder.dtype):
        return None
    if decoder.sharded is not None or decoder.tensor is not None:
        return None
    from palestra.model.sampling.cuda_graphs import StepGraphs

    return StepGraphs(decoder, cache, states, max_rows)
