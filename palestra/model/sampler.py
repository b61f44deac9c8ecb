"""Generation: requests in, tokens out, one step of the whole batch at a time.

    rid = sampler.submit(request, adapter)
    while sampler.has_work:
        for finished in sampler.step().finished: …

Each step runs every decoding row and a bounded chunk of waiting prompts through the decoder together.
Owns: the life of a request. Never touches: training, HTTP.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from palestra.model.adapters import Adapter, AdapterPool
from palestra.model.decoder import Decoder
from palestra.model.errors import DataError
from palestra.model.head import chunk_rows, logits_of
from palestra.model.kv_cache import KVCache, PagedAttention
from palestra.model.lora import LoraPlan
from palestra.model.pages import PagePool
from palestra.model.request_checks import check_request
from palestra.model.sampling import Drawn, DrawRow, TokenMask, draw
from palestra.model.scheduler import Chunk, Ready, RequestTooLarge, Scheduler, Sequence, StepPlan
from palestra.types import SampledSequence, SampleRequest, SampleResult, StopReason, TopLogprobs

CACHE_BYTES = {"cpu": 512 << 20, "cuda": 16 << 30}


@dataclass(slots=True, frozen=True)
class TokenEvent:
    """A token as it was drawn, for streams."""

    request_id: int
    sample: int
    token: int
    logprob: float


@dataclass(slots=True, frozen=True)
class Finished:
    request_id: int
    result: SampleResult


@dataclass(slots=True, frozen=True)
class Failed:
    """A request that ended with an error, its own mask's or that of the step it was in: the others go on."""

    request_id: int
    error: Exception


@dataclass(slots=True)
class StepOutput:
    tokens: list[TokenEvent] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Sample:
    """One sequence of a request."""

    request: _Request
    index: int
    seq: Sequence
    draw: DrawRow
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    stop_reason: StopReason | None = None


@dataclass(slots=True, eq=False)
class _Request:
    id: int
    spec: SampleRequest
    adapter: Adapter | None
    """A snapshot of its own: training goes on meanwhile, this request does not notice."""
    stop_ids: tuple[int, ...]
    mask: TokenMask | None
    samples: list[_Sample] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[TopLogprobs | None] = field(default_factory=list)

    @property
    def wants_prompt(self) -> bool:
        return self.spec.prompt_logprobs or self.spec.topk_prompt_logprobs > 0


class Sampler:
    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        *,
        tokenizer: Tokenizer | None = None,
        page_size: int = 16,
        cache_tokens: int | None = None,
        max_rows: int = 256,
        prefill_tokens: int = 2048,
    ):
        self.decoder, self.pool, self.tokenizer = decoder, pool, tokenizer
        spec = decoder.spec
        if cache_tokens is None:
            per_token = 2 * spec.n_layers * spec.kv_size * decoder.dtype.itemsize
            cache_tokens = max(CACHE_BYTES.get(decoder.device.type, 1 << 30) // per_token, page_size)
        self.pages = PagePool(-(-cache_tokens // page_size), page_size)
        self.cache = KVCache(spec, self.pages.n_pages, page_size, dtype=decoder.dtype, device=decoder.device)
        self.scheduler = Scheduler(self.pages, max_rows=max_rows, prefill_tokens=prefill_tokens)
        self._ids, self._uids = itertools.count(), itertools.count()
        self._requests: dict[int, _Request] = {}
        self._samples: dict[int, _Sample] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: SampleRequest, adapter: Adapter | None = None, *, mask: TokenMask | None = None) -> int:
        check_request(request, self.decoder.spec, has_tokenizer=self.tokenizer is not None)
        if adapter is not None:
            adapter = self.pool.snapshot(adapter)
        try:
            return self._enqueue(request, adapter, mask)
        except RequestTooLarge as e:
            if adapter is not None:
                self.pool.free(adapter)
            raise DataError(str(e)) from None

    def abort(self, request_id: int) -> SampleResult | None:
        """Stops a request; what it has so far comes back. None if it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sample in request.samples:
            if sample.stop_reason is None:
                self.scheduler.abort(sample.seq)
                sample.stop_reason = StopReason.ABORT
        return self._close(request)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Runs the model once; with nothing to do, does nothing."""
        output = StepOutput()
        plan = self.scheduler.plan()
        if not plan.decode and not plan.prefill:
            return output
        requests = [self._samples[c.seq.uid].request.id for c in plan.rows]
        try:
            self._run(plan, output)
        except Exception as e:  # the step is lost for those in it; whoever waits outside goes on
            for number in requests:
                if self.abort(number) is not None:
                    output.failed.append(Failed(number, e))
        return output

    def _run(self, plan: StepPlan, output: StepOutput) -> None:
        hidden = self._forward(plan)
        self._read_prompts(plan, hidden)
        rows = plan.rows  # before commit: decode positions move on
        ready = self._ask_masks(self.scheduler.commit(plan), output)
        if ready:
            samples, drawn = self._draw(rows, hidden, ready)
            for i, sample in enumerate(samples):
                self._advance(sample, i, drawn, output)

    def generate(
        self, requests: Seq[SampleRequest], adapters: Seq[Adapter | None] | Adapter | None = None
    ) -> list[SampleResult]:
        """Submits all, runs until all are done. For use alone: a loop with `submit` and `step` serves many callers."""
        if self.has_work:
            raise DataError("generate() runs alone, but requests are in flight: use submit() and step()")
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

    def _enqueue(self, request: SampleRequest, adapter: Adapter | None, mask: TokenMask | None) -> int:
        p, prompt = request.params, list(request.prompt)
        stop_ids = self.decoder.spec.eos_token_ids if p.stop_token_ids is None else p.stop_token_ids
        stop_ids = tuple(t for t in stop_ids if 0 <= t < self.decoder.spec.vocab_size)
        entry = _Request(next(self._ids), request, adapter, stop_ids, mask)
        longest = self.decoder.spec.max_positions
        max_len = longest if p.max_tokens is None else min(longest, len(prompt) + p.max_tokens)
        if p.max_tokens is None:  # an open end may use what the cache has; the rest is LENGTH
            max_len = max(len(prompt) + 1, min(max_len, self.pages.n_pages * self.pages.page_size))
        seed = secrets.randbits(64) if p.seed is None else p.seed
        version = 0 if adapter is None else adapter.weights_id
        for index in range(request.num_samples):
            tokens = list(prompt)
            seq = Sequence(
                next(self._uids),
                version,
                tokens,
                len(prompt),
                max_len,
                lane=-1 if adapter is None else version,
                use_cache=not entry.wants_prompt,
            )
            row = DrawRow(p, seed, index, request.prompt, [], stop_ids)
            entry.samples.append(_Sample(entry, index, seq, row))
        leader = entry.samples[0].seq
        leader.siblings = [s.seq for s in entry.samples[1:]]
        self.scheduler.add(leader)
        self._requests[entry.id] = entry
        self._samples.update((s.seq.uid, s) for s in entry.samples)
        return entry.id

    # One step

    def _forward(self, plan: StepPlan) -> Tensor:
        device = self.decoder.device
        self.cache.copy(plan.copies)
        tokens = [s.tokens[s.computed] for s in plan.decode]
        positions = [np.array([s.computed for s in plan.decode], np.int64)]
        for chunk in plan.prefill:
            tokens += chunk.seq.tokens[chunk.start : chunk.end]
            positions.append(np.arange(chunk.start, chunk.end))
        return self.decoder(
            torch.tensor(tokens, device=device),
            torch.from_numpy(np.concatenate(positions)).to(device),
            PagedAttention(self.cache, plan),
            self._lora_plan([(c.seq, c.end - c.start) for c in plan.rows]),
        )

    def _lora_plan(self, runs: list[tuple[Sequence, int]]) -> LoraPlan:
        adapters = [(self._samples[seq.uid].request.adapter, n) for seq, n in runs]
        if all(a is None for a, _ in adapters):
            return LoraPlan()
        return LoraPlan.of(adapters, device=self.decoder.device)

    def _ask_masks(self, ready: list[Ready], output: StepOutput) -> list[Ready]:
        """Masks are the caller's code: one that raises or allows nothing ends its own request, the rest goes on."""
        masked = [self._samples[s.uid] for r in ready for s in r.seqs if self._samples[s.uid].request.mask]
        for sample in masked:
            try:
                sample.draw.allowed = _allowed(sample, self.decoder.spec.vocab_size)
            except Exception as e:
                if self.abort(sample.request.id) is not None:
                    output.failed.append(Failed(sample.request.id, e))
        if not output.failed:
            return ready
        alive = [Ready(r.row, [s for s in r.seqs if s.uid in self._samples]) for r in ready]
        return [r for r in alive if r.seqs]

    def _draw(self, rows: list[Chunk], hidden: Tensor, ready: list[Ready]) -> tuple[list[_Sample], Drawn]:
        """Logits once per ready row; each of its sequences draws from them."""
        last = -1
        ends = [last := last + c.end - c.start for c in rows]
        index = [ends[r.row] for r in ready]
        if index != list(range(len(hidden))):
            hidden = hidden[torch.tensor(index, device=hidden.device)]
        logits = logits_of(self.decoder, hidden, self._lora_plan([(rows[r.row].seq, 1) for r in ready]))
        if any(len(r.seqs) > 1 for r in ready):
            repeats = torch.tensor([len(r.seqs) for r in ready], device=logits.device)
            logits = logits.repeat_interleave(repeats, 0)
        samples = [self._samples[s.uid] for r in ready for s in r.seqs]
        top = max(s.request.spec.topk_logprobs for s in samples)
        return samples, draw(logits, [s.draw for s in samples], top=top)

    def _advance(self, sample: _Sample, row: int, drawn: Drawn, output: StepOutput) -> None:
        request, token, logprob = sample.request, drawn.tokens[row], drawn.logprobs[row]
        generated = sample.draw.generated
        assert isinstance(generated, list)
        generated.append(token)
        sample.logprobs.append(logprob)
        k = request.spec.topk_logprobs
        if k and drawn.top_ids is not None and drawn.top_logprobs is not None:
            sample.top.append(
                TopLogprobs(tuple(drawn.top_ids[row, :k].tolist()), tuple(drawn.top_logprobs[row, :k].tolist()))
            )
        output.tokens.append(TokenEvent(request.id, sample.index, token, logprob))
        if token in request.stop_ids or self._hits_stop_string(request, generated):
            sample.stop_reason = StopReason.STOP
        elif len(sample.seq.tokens) + 1 >= sample.seq.max_len:
            sample.stop_reason = StopReason.LENGTH
        if sample.stop_reason is None:
            self.scheduler.append(sample.seq, token)
            return
        self.scheduler.finish(sample.seq)
        if all(s.stop_reason is not None for s in request.samples):
            output.finished.append(Finished(request.id, self._close(request)))

    def _hits_stop_string(self, request: _Request, generated: list[int]) -> bool:
        stops = request.spec.params.stop_strings
        if not stops or self.tokenizer is None:
            return False
        # A token is at least a byte: this many reach back over the longest stop string.
        tail = max(len(s.encode()) for s in stops) + 4
        text = self.tokenizer.decode(generated[-tail:], skip_special_tokens=False)
        return any(s in text for s in stops)

    # Prompt log-probabilities

    def _read_prompts(self, plan: StepPlan, hidden: Tensor) -> None:
        first = len(plan.decode)
        for chunk in plan.prefill:
            request = self._samples[chunk.seq.uid].request
            if request.wants_prompt and len(request.prompt_logprobs) < chunk.seq.prompt_len:
                self._read_prompt(request, chunk, hidden[first : first + chunk.end - chunk.start])
            first += chunk.end - chunk.start

    def _read_prompt(self, request: _Request, chunk: Chunk, hidden: Tensor) -> None:
        """Position i tells the probability of token i + 1. Raw: temperature is for what is drawn."""
        seq, k = chunk.seq, request.spec.topk_prompt_logprobs
        if chunk.start == 0:
            request.prompt_logprobs, request.prompt_top = [None], [None]
        targets = seq.tokens[chunk.start + 1 : min(chunk.end + 1, seq.prompt_len)]
        size = chunk_rows(self.decoder)
        for start in range(0, len(targets), size):
            part = torch.tensor(targets[start : start + size], device=hidden.device)
            plan = self._lora_plan([(seq, len(part))])
            logp = torch.log_softmax(logits_of(self.decoder, hidden[start : start + len(part)], plan), -1)
            request.prompt_logprobs += logp.gather(1, part[:, None]).squeeze(1).tolist()
            if k:
                values, ids = logp.topk(k, -1)
                request.prompt_top += [
                    TopLogprobs(tuple(i), tuple(v)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
                ]

    # A request's way out

    def _close(self, request: _Request) -> SampleResult:
        del self._requests[request.id]
        for sample in request.samples:
            del self._samples[sample.seq.uid]
        if request.adapter is not None:
            self.pool.free(request.adapter)
        spec = request.spec
        return SampleResult(
            sequences=[
                SampledSequence(
                    tokens=list(s.draw.generated),
                    logprobs=s.logprobs,
                    stop_reason=s.stop_reason or StopReason.ABORT,
                    topk_logprobs=s.top,
                )
                for s in request.samples
            ],
            prompt_logprobs=request.prompt_logprobs if spec.prompt_logprobs else None,
            topk_prompt_logprobs=request.prompt_top if spec.topk_prompt_logprobs else None,
            cached_prompt_tokens=request.samples[0].seq.cached_tokens,
        )


def _allowed(sample: _Sample, vocab_size: int) -> Tensor | None:
    assert sample.request.mask is not None
    allowed = sample.request.mask.allowed(sample.draw.generated)
    if allowed is None:
        return None
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.shape != (vocab_size,):
        raise DataError(f"the token mask must be a bool tensor of {vocab_size} (the model's vocabulary) or None")
    if not allowed.any():
        raise DataError("the token mask allows no token at all")
    return allowed
