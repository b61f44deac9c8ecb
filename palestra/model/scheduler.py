"""Which tokens the model computes next: continuous batching, chunked prefill, preemption.

Owns: the waiting and running sequences, their pages, what one step computes. Never touches: tensors, sampling, time.

The caller's loop: `plan`, carry out the copies, run the model, `commit`, then `append` to or `finish` every ready
sequence before the next `plan`. Prefill and decode are one thing: `tokens[computed:]` are still to be computed, and
the logits of the last position give the next token.
"""

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from palestra.model.pages import PagePool


class RequestTooLarge(ValueError):
    """The sequence would not fit even with the whole page pool to itself."""


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample being generated."""

    uid: int
    version: Hashable
    """Adapter and weight version: keys and values are never shared across it."""
    tokens: list[int]
    """Prompt, then what was generated."""
    prompt_len: int
    max_len: int
    """Prompt plus the most tokens that may be generated."""
    lane: int = -1
    """Adapter slot; rows of one lane are adjacent in a plan. -1 for none."""
    use_cache: bool = True
    """False: the caller needs every prompt position computed. True again once that has happened."""
    siblings: "list[Sequence]" = field(default_factory=list)
    """Other samples of the same prompt, which wait until this one has computed it."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in `pages`."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache at first start."""
    state: SequenceState = SequenceState.WAITING
    arrival: int = -1
    has_started: bool = False
    leader: "Sequence | None" = field(default=None, repr=False)
    """Whose `siblings` this one is in."""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.pending == 1 and self.computed >= self.prompt_len


@dataclass(slots=True, frozen=True)
class Chunk:
    """Positions `start` to `end` (exclusive) of a sequence."""

    seq: Sequence
    start: int
    end: int


@dataclass(slots=True)
class StepPlan:
    """One step of the model. Rows are numbered through `decode` first, then `prefill`."""

    decode: list[Sequence] = field(default_factory=list)
    """Each computes the one position `seq.computed`."""
    prefill: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source page, target page), before the step writes: in this order, or all reads before all writes."""

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.prefill)

    @property
    def rows(self) -> list[Chunk]:
        return [Chunk(seq, seq.computed, seq.computed + 1) for seq in self.decode] + self.prefill


@dataclass(slots=True, frozen=True)
class Ready:
    """The last logits of plan row `row` are the next-token distribution of each of `seqs`."""

    row: int
    seqs: list[Sequence]


_by_arrival = attrgetter("arrival")
_by_lane = attrgetter("lane", "arrival")


class Scheduler:
    """Serves by arrival: the oldest running sequence is in every plan, so everything finishes in the end."""

    def __init__(self, pages: PagePool, *, max_rows: int, prefill_tokens: int) -> None:
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError(f"max_rows and prefill_tokens must be >= 1, got {max_rows} and {prefill_tokens}")
        self.pages = pages
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.preemptions = 0
        self._arrivals = 0
        # Both sorted by arrival: a preempted sequence goes back before everything that came after it.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + sum(len(seq.siblings) for seq in self._waiting + self._running)

    def add(self, leader: Sequence) -> None:
        group = [leader, *leader.siblings]
        for seq in group:
            self._require_fit(seq)
            if (seq.version, seq.tokens, seq.use_cache) != (leader.version, leader.tokens, leader.use_cache):
                raise ValueError(
                    f"sequence {seq.uid} needs the version, prompt and use_cache of its leader {leader.uid}"
                )
        for seq in group:
            seq.arrival = self._arrivals
            seq.leader = None if seq is leader else leader
            self._arrivals += 1
        self._waiting.append(leader)

    def plan(self) -> StepPlan:
        plan = StepPlan()
        for seq in self._running:  # it may shrink meanwhile, but only behind `seq`
            self._enter(seq, plan)
        self._admit(plan)
        plan.decode.sort(key=_by_lane)
        plan.prefill.sort(key=lambda chunk: _by_lane(chunk.seq))
        return plan

    def commit(self, plan: StepPlan) -> list[Ready]:
        """Account for a step the model has run; what was aborted meanwhile is skipped."""
        ready: list[Ready] = []
        for row, chunk in enumerate(plan.rows):
            seq = chunk.seq
            if seq.state is not SequenceState.RUNNING:
                continue
            seq.computed = chunk.end
            full = chunk.end // self.pages.page_size
            if full > chunk.start // self.pages.page_size:
                self.pages.publish(seq.version, seq.tokens, seq.pages, full)
            if not seq.pending:
                ready.append(Ready(row, self.fork(seq)))
        return ready

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Let the siblings run on from the prompt that `leader` has computed; they share all its pages."""
        siblings, leader.siblings = leader.siblings, []
        leader.use_cache = True
        for seq in siblings:
            for page in leader.pages:
                self.pages.share(page)
            self._take_over(seq, leader, list(leader.pages))
            seq.use_cache = True
            insort(self._running, seq, key=_by_arrival)
        return [leader, *siblings]

    def append(self, seq: Sequence, token: int) -> None:
        if len(seq.tokens) >= seq.max_len:
            raise ValueError(f"sequence {seq.uid} already has its max_len of {seq.max_len} tokens")
        seq.tokens.append(token)

    def finish(self, seq: Sequence) -> None:
        """It has all its tokens. Its full pages stay findable; the same holds for an abort."""
        self.abort(seq)

    def abort(self, seq: Sequence) -> None:
        """Legal in any state. The first sibling of a leader goes on where the leader was."""
        if seq.leader is not None:
            seq.leader.siblings.remove(seq)
        elif seq.siblings:
            self._hand_over(seq)
        elif seq.state is not SequenceState.FINISHED:
            self._queue_of(seq).remove(seq)
            self._drop_pages(seq)
        seq.leader = None
        seq.state = SequenceState.FINISHED

    def _require_fit(self, seq: Sequence) -> None:
        if not 1 <= seq.prompt_len == len(seq.tokens) <= seq.max_len:
            raise ValueError(
                f"sequence {seq.uid} needs 1 <= prompt_len == len(tokens) <= max_len, "
                f"got {seq.prompt_len}, {len(seq.tokens)} and {seq.max_len}"
            )
        if self.pages.pages_for(seq.max_len) > self.pages.n_pages:
            raise RequestTooLarge(
                f"sequence {seq.uid} may grow to {seq.max_len} tokens ({seq.prompt_len} of them prompt), but the "
                f"key/value cache holds {self.pages.n_pages * self.pages.page_size}: ask for fewer tokens"
            )

    def _enter(self, seq: Sequence, plan: StepPlan) -> None:
        """Put as much of it into the plan as there are rows, tokens and pages for."""
        if not seq.pending:
            raise RuntimeError(f"sequence {seq.uid} was ready: append to it or finish it before the next plan")
        if seq.is_decoding:
            length = int(len(plan.decode) < self.max_rows)
        else:
            length = min(seq.pending, self.prefill_tokens - plan.prefill_tokens)
        end = seq.computed + length
        if not length or not self._make_room(seq, end):
            return
        self._own_pages(seq, end, plan)
        if seq.is_decoding:
            plan.decode.append(seq)
        else:
            plan.prefill.append(Chunk(seq, seq.computed, end))

    def _make_room(self, seq: Sequence, end: int) -> bool:
        """Preempt sequences younger than `seq`, youngest first, until its pages up to `end` can be had.

        Planning goes oldest first, so a victim is never in the plan yet. The youngest keeps its pages and sits the
        step out: an older one takes them if it needs them.
        """
        while self._missing(seq, end) > self.pages.available:
            if self._running[-1] is seq:
                return False
            self._preempt(self._running[-1])
        return True

    def _missing(self, seq: Sequence, end: int) -> int:
        new = max(0, self.pages.pages_for(end) - len(seq.pages))
        return new + self._must_copy(seq)

    def _must_copy(self, seq: Sequence) -> bool:
        """Whether the half-filled last page is also a sibling's. Only that one is ever written when it exists."""
        index = seq.computed // self.pages.page_size
        return index < len(seq.pages) and self.pages.is_shared(seq.pages[index])

    def _own_pages(self, seq: Sequence, end: int, plan: StepPlan) -> None:
        if self._must_copy(seq):
            index = seq.computed // self.pages.page_size
            old, seq.pages[index] = seq.pages[index], self.pages.allocate()
            plan.copies.append((old, seq.pages[index]))
            self.pages.release(old)
        while len(seq.pages) < self.pages.pages_for(end):
            seq.pages.append(self.pages.allocate())

    def _preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self._running.remove(seq)
        self._drop_pages(seq)
        seq.state = SequenceState.WAITING
        insort(self._waiting, seq, key=_by_arrival)

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting sequences in order of arrival, passing over those whose next page is on its way."""
        if self._is_full(plan):
            return
        for seq in self._waiting[: self.max_rows]:  # a bound on the lookups of one plan
            if seq.use_cache:  # at least one position is left to compute, for its logits
                seq.pages = self.pages.lookup(seq.version, seq.tokens, len(seq.tokens) - 1)
            if seq.use_cache and self._is_on_its_way(seq):
                self._drop_pages(seq)
            elif self._running and self._owed(seq) > self._room():
                self._drop_pages(seq)
                return
            else:
                self._start(seq)
                self._enter(seq, plan)
                if self._is_full(plan):
                    return

    def _is_full(self, plan: StepPlan) -> bool:
        rows = sum(1 + len(seq.siblings) for seq in self._running)
        return rows >= self.max_rows or plan.prefill_tokens >= self.prefill_tokens or self._room() < 1

    def _room(self) -> int:
        """Pages left once all that runs has computed its tokens and grown by a page: a newcomer that took those
        would soon be preempted again. None if a sequence sits this step out for lack of pages."""
        return self.pages.available - sum(self._owed(seq) for seq in self._running)

    def _owed(self, seq: Sequence) -> int:
        soon = min(self.pages.pages_for(len(seq.tokens)) + 1, self.pages.pages_for(seq.max_len))
        return soon - len(seq.pages) + len(seq.siblings)

    def _is_on_its_way(self, seq: Sequence) -> bool:
        """Whether its next uncached page is being computed for another one: then the next plan finds it cached."""
        end = (len(seq.pages) + 1) * self.pages.page_size
        return end < len(seq.tokens) and any(
            other.computed < end <= len(other.tokens)
            and other.version == seq.version
            and other.tokens[:end] == seq.tokens[:end]
            for other in self._running
        )

    def _start(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        insort(self._running, seq, key=_by_arrival)
        seq.computed = len(seq.pages) * self.pages.page_size
        seq.state = SequenceState.RUNNING
        if not seq.has_started:
            seq.cached_tokens = seq.computed
            seq.has_started = True

    def _queue_of(self, seq: Sequence) -> list[Sequence]:
        return self._running if seq.state is SequenceState.RUNNING else self._waiting

    def _drop_pages(self, seq: Sequence) -> None:
        self.pages.release_all(seq.pages)
        seq.pages = []
        seq.computed = 0

    def _take_over(self, seq: Sequence, leader: Sequence, pages: list[int]) -> None:
        seq.pages = pages
        seq.computed = leader.computed
        seq.cached_tokens = leader.cached_tokens
        seq.has_started = leader.has_started
        seq.state = leader.state
        seq.leader = None

    def _hand_over(self, leader: Sequence) -> None:
        heir, *rest = leader.siblings
        heir.siblings, leader.siblings = rest, []
        for seq in rest:
            seq.leader = heir
        queue = self._queue_of(leader)
        queue[queue.index(leader)] = heir
        self._take_over(heir, leader, leader.pages)
        leader.pages = []
        if not heir.use_cache:  # what the leader computed of the prompt went to the leader
            self._drop_pages(heir)
