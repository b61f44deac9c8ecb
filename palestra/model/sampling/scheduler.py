"""Which tokens the model computes next: continuous batching, chunked prefill, preemption.

Owns: the waiting and running sequences, their pages, what one step computes. Never touches: tensors, sampling, time.

The caller's loop: `plan`, carry out the copies, run the model, `commit`, then `append` to or `finish` every ready
sequence before the next `plan`. Prefill and decode are one thing: `tokens[computed:]` are still to be computed, and
the logits of the last position give the next token.

Models with recurrent states also have `StateSlots`. There a step that was planned but not committed has advanced
states: whoever was in it starts again from a snapshot.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from operator import attrgetter

from palestra.model.sampling.kv_page_pool import PageNode, PagePool
from palestra.model.sampling.sequences import PENDING, Ready, Sequence, SequenceChunk, SequenceState, StepPlan
from palestra.model.sampling.state_slots import StateSlots


class RequestTooLarge(ValueError):
    """The sequence would not fit even with the whole page pool to itself."""


MANY_SHARE, LEAST_SHARE = 4, 16
"""Where others decode, prompts get the whole budget if they are one in so many, and at least the budget divided by the
second."""

_by_arrival = attrgetter("arrival")
_by_adapter_slot = attrgetter("adapter_slot", "arrival")


def _is_decoding(seq: Sequence) -> bool:
    return len(seq.tokens) - seq.computed == 1 and seq.computed >= seq.prompt_len


def _place(queue: list[Sequence], seq: Sequence) -> int:
    return bisect_left(queue, seq.arrival, key=_by_arrival)


class Scheduler:
    """Serves by arrival: the oldest running sequence is in every plan, so everything finishes in the end."""

    def __init__(
        self, pages: PagePool, *, max_rows: int, prefill_tokens: int, states: StateSlots | None = None
    ) -> None:
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError(f"max_rows and prefill_tokens must be >= 1, got {max_rows} and {prefill_tokens}")
        self.pages = pages
        self.states = states
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.preemptions = 0
        self._arrivals = 0
        # Both sorted by arrival: a preempted sequence goes back before everything that came after it.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._siblings = 0
        self._uncommitted: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._siblings

    def add(self, leader: Sequence) -> None:
        group = [leader, *leader.siblings]
        for seq in group:
            self.require_fit(seq)
            if (seq.version, seq.compute_from, seq.tokens) != (leader.version, leader.compute_from, leader.tokens):
                raise ValueError(
                    f"sequence {seq.uid} needs the version, prompt and compute_from of its leader {leader.uid}"
                )
        for seq in group:
            seq.arrival = self._arrivals
            seq.leader = None if seq is leader else leader
            self._arrivals += 1
        self._waiting.append(leader)
        self._siblings += len(leader.siblings)

    def require_fit(self, seq: Sequence) -> None:
        """Raises RequestTooLarge where it could not be computed with the whole cache to itself."""
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

    def plan(self) -> StepPlan:
        if self.states is not None and self._uncommitted is not None:
            self._roll_back(self.states, self._uncommitted)
        plan = self._uncommitted = StepPlan(prefill_budget=self._prefill_budget())
        for seq in self._running:  # it may shrink meanwhile, but only behind `seq`
            self._enter(seq, plan)
        self._admit(plan)
        plan.decode.sort(key=_by_adapter_slot)
        plan.prefill.sort(key=lambda chunk: _by_adapter_slot(chunk.seq))
        plan.rows = [SequenceChunk(seq, seq.computed, seq.computed + 1) for seq in plan.decode] + plan.prefill
        if self.states is not None:
            self._plan_states(self.states, plan)
        return plan

    def commit(self, plan: StepPlan) -> list[Ready]:
        """Account for a step the model has run; what was aborted meanwhile is skipped."""
        ready: list[Ready] = []
        self._uncommitted = None
        for row, chunk in enumerate(plan.rows):
            seq = chunk.seq
            if seq.state is not SequenceState.RUNNING:
                continue
            seq.computed = chunk.end
            full = chunk.end // self.pages.page_size
            if full > chunk.start // self.pages.page_size and not seq.is_mixed:
                self.pages.publish(seq.version, seq.tokens, seq.pages, full)
            if self.states is not None and seq.state_slot in plan.snapshots:
                self.states.keep(plan.snapshots.pop(seq.state_slot), self.pages.node_of(seq.pages[full - 1]))
            if chunk.end == len(seq.tokens):
                ready.append(Ready(row, self.fork(seq)))
        self._discard_snapshots(plan)
        return ready

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Let the siblings run on from the prompt that `leader` has computed; they share all its pages. Those for which
        there is no slot wait, as if they had been preempted."""
        leader.compute_from = None
        if not leader.siblings:
            return [leader]
        siblings, leader.siblings = leader.siblings, []
        self._siblings -= len(siblings)
        for seq in siblings:
            if self.states is not None and not self.states.available:
                self._take_over(seq, leader, [])
                seq.compute_from, seq.computed, seq.state = None, 0, SequenceState.WAITING
                seq.is_mixed = False
                insort(self._waiting, seq, key=_by_arrival)
                continue
            if self.states is not None:
                seq.state_slot = self.states.take(leader.state_slot)
            for page in leader.pages:
                self.pages.share(page)
            self._take_over(seq, leader, list(leader.pages))
            seq.compute_from = None
            insort(self._running, seq, key=_by_arrival)
        return [leader, *siblings]

    def append(self, seq: Sequence, token: int = PENDING) -> None:
        """The token drawn for it. A pending one may be computed with; `settle` it before the step is committed."""
        if len(seq.tokens) >= seq.max_len:
            raise ValueError(f"sequence {seq.uid} already has its max_len of {seq.max_len} tokens")
        seq.tokens.append(token)

    def settle(self, seq: Sequence, token: int) -> None:
        """The pending token is known."""
        seq.tokens[-1] = token

    def finish(self, seq: Sequence) -> None:
        """Finishes a sequence that has all its tokens. Its full pages stay findable; the same holds for an abort."""
        self.abort(seq)

    def abort(self, seq: Sequence) -> None:
        """Legal in any state. The first sibling of a leader goes on where the leader was."""
        if seq.leader is not None:
            seq.leader.siblings.remove(seq)
            self._siblings -= 1
        elif seq.siblings:
            self._hand_over(seq)
        elif seq.state is not SequenceState.FINISHED:
            queue = self._queue_of(seq)
            del queue[_place(queue, seq)]
            self._drop(seq)
        seq.leader = None
        seq.state = SequenceState.FINISHED

    def change_version(self, seq: Sequence, version: Hashable, adapter_slot: int, *, keeps_keys: bool) -> None:
        """Other weights compute it from the next plan on. What older ones have computed of it goes, or is kept."""
        seq.version, seq.adapter_slot, seq.found = version, adapter_slot, None
        if seq.state is not SequenceState.RUNNING:
            return
        if keeps_keys:
            seq.is_mixed, seq.keep_at = True, ()
        else:
            self._put_back(seq)

    def _enter(self, seq: Sequence, plan: StepPlan) -> None:
        """Put as much of it into the plan as there are rows, tokens and pages for."""
        pending = len(seq.tokens) - seq.computed
        if not pending:
            raise RuntimeError(f"sequence {seq.uid} was ready: append to it or finish it before the next plan")
        is_decoding = _is_decoding(seq)
        length = int(len(plan.decode) < self.max_rows) if is_decoding else self._prefill_length(seq, plan)
        end = seq.computed + length
        if not length or (self._missing(seq, end) and not self._take_pages(seq, end, plan)):
            return
        if is_decoding:
            plan.decode.append(seq)
        else:
            plan.prefill.append(SequenceChunk(seq, seq.computed, end))
            plan.prefill_tokens += length

    def _prefill_budget(self) -> int:
        """Tokens of prompts that a step computes: fewer where few sequences have some and many decode, so that one long
        prompt does not hold up sixty others. Samples of a prompt, which wait for it, count as well."""
        decoding = sum(_is_decoding(seq) for seq in self._running)
        if not decoding:
            return self.prefill_tokens
        filling = len(self._running) - decoding + self.waiting
        share = self.prefill_tokens * filling * MANY_SHARE // (filling + decoding)
        return min(self.prefill_tokens, max(share, self.prefill_tokens // LEAST_SHARE, 1))

    def _prefill_length(self, seq: Sequence, plan: StepPlan) -> int:
        budget = max(0, plan.prefill_budget - plan.prefill_tokens)  # a picture may have gone beyond it
        if self.states is None:
            end = min(len(seq.tokens), seq.computed + budget)
            if seq.pictures is not None:
                end = seq.pictures.whole_end(seq.computed, end, must_move=not plan.prefill_tokens)
            return end - seq.computed
        return self.states.prefill_end(seq, budget, must_move=not plan.prefill_tokens) - seq.computed

    def _take_pages(self, seq: Sequence, end: int, plan: StepPlan) -> bool:
        """Preempt sequences younger than `seq`, youngest first, until its pages up to `end` can be had; take them.

        Planning goes oldest first, so a victim is never in the plan yet. The youngest keeps its pages and sits the
        step out: an older one takes them if it needs them.
        """
        while self._missing(seq, end) > self.pages.available:
            if self._running[-1] is seq:
                return False
            self._preempt(self._running[-1])
        self._own_pages(seq, end, plan)
        return True

    def _missing(self, seq: Sequence, end: int) -> int:
        new = self.pages.pages_for(end) - len(seq.pages)
        return max(new, 0) + self._must_copy(seq)

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
        self._put_back(seq)

    def _put_back(self, seq: Sequence) -> None:
        """Among those that wait, with nothing of it computed."""
        del self._running[_place(self._running, seq)]
        self._drop(seq)
        seq.state = SequenceState.WAITING
        insort(self._waiting, seq, key=_by_arrival)

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting sequences in order of arrival, passing over those whose next page is on its way.

        The books are summed up once and kept from there: a newcomer that fits never takes a page from another.
        """
        rows = sum(1 + len(seq.siblings) for seq in self._running)
        if not self._waiting or rows >= self.max_rows or plan.prefill_tokens >= plan.prefill_budget:
            return
        owed = sum(self._owed(seq) for seq in self._running)
        busy = [seq for seq in self._running if self._will_share(seq)]
        for seq in self._waiting[: self.max_rows]:  # a bound on the lookups of one plan
            if self.pages.available - owed < 1 or not self._has_slots(seq):
                return
            if seq.tokens[-1] == PENDING or self._waits(seq, busy):
                continue
            seq.pages = self.pages.hold(self._resume_at(seq))
            if self._running and self._owed(seq) > self.pages.available - owed:
                self._drop(seq)
                return
            self._start(seq)
            self._enter(seq, plan)
            rows += 1 + len(seq.siblings)
            if rows >= self.max_rows or plan.prefill_tokens >= plan.prefill_budget:
                return
            owed += self._owed(seq)
            if self._will_share(seq):
                busy.append(seq)

    def _owed(self, seq: Sequence) -> int:
        """Pages it takes until it has computed its tokens and grown by a page: a newcomer that took those would soon
        be preempted again."""
        soon = min(self.pages.pages_for(len(seq.tokens)) + 1, self.pages.pages_for(seq.max_len))
        return soon - len(seq.pages) + len(seq.siblings)

    def _will_share(self, seq: Sequence) -> bool:
        """Whether others will soon find more of it: a page, or a snapshot where those are needed."""
        if seq.is_mixed:
            return False
        if self.states is not None:
            return any(position > seq.computed for position in seq.keep_at)
        return seq.computed // self.pages.page_size < len(seq.tokens) // self.pages.page_size

    def _waits(self, seq: Sequence, busy: list[Sequence]) -> bool:
        """Whether what it needs next is being computed for another one: then a later plan finds it cached."""
        limit = seq.cache_limit
        seq.found = self.pages.find(seq.version, seq.tokens, limit, seq.found)
        if self.states is not None:
            return self._waits_for_a_snapshot(seq, busy)
        start = seq.found.depth * self.pages.page_size if seq.found else 0
        end = start + self.pages.page_size
        return (
            end <= limit
            and any(
                other.computed < end <= len(other.tokens)
                and other.version == seq.version
                and other.tokens[start:end] == seq.tokens[start:end]  # tells most pairs apart
                and other.tokens[:start] == seq.tokens[:start]
                for other in busy
            )
        )

    def _waits_for_a_snapshot(self, seq: Sequence, busy: list[Sequence]) -> bool:
        node, limit = self._resume_at(seq), seq.snapshot_limit
        start = node.depth * self.pages.page_size if node else 0
        return any(
            max(start, other.computed) < end <= limit
            and other.version == seq.version
            and other.tokens[:end] == seq.tokens[:end]
            for other in busy
            for end in other.keep_at
        )

    def _resume_at(self, seq: Sequence) -> PageNode | None:
        """The last cached page that it can go on from: with recurrent states, the last one that has a snapshot."""
        return seq.found if self.states is None else self.states.deepest(seq.found, seq.snapshot_limit)

    def _has_slots(self, seq: Sequence) -> bool:
        """Whether enough state slots are free for the sequence and its siblings, beside those that running sequences
        will need. Always true while none runs."""
        if self.states is None or not self._running:
            return True
        owed = sum(len(other.siblings) for other in self._running)
        return self.states.available - owed > len(seq.siblings)

    def _start(self, seq: Sequence) -> None:
        del self._waiting[_place(self._waiting, seq)]
        insort(self._running, seq, key=_by_arrival)
        seq.computed = len(seq.pages) * self.pages.page_size
        seq.state = SequenceState.RUNNING
        if self.states is not None:
            seq.state_slot = self.states.take(self.states.resume(self._resume_at(seq)))
            known = seq.found.depth * self.pages.page_size if seq.found else 0
            seq.keep_at = self.states.positions_to_keep(seq, known)
        seq.found = None
        if not seq.has_started:
            seq.cached_tokens = seq.computed
            seq.has_started = True

    # Recurrent states

    def _plan_states(self, states: StateSlots, plan: StepPlan) -> None:
        plan.state_moves, states.moves = states.moves, []
        for chunk in plan.prefill:
            slot = chunk.seq.state_slot
            row = states.reserve_snapshot() if chunk.end in chunk.seq.keep_at else None
            if row is not None and slot is not None:
                plan.snapshots[slot] = row

    def _roll_back(self, states: StateSlots, plan: StepPlan) -> None:
        """A step was planned and not committed: it is unknown which states it has moved or advanced."""
        self._discard_snapshots(plan)
        touched = {target for _, target in plan.state_moves} | {chunk.seq.state_slot for chunk in plan.rows}
        for seq in [seq for seq in self._running if seq.state_slot in touched]:
            self._preempt(seq)

    def _discard_snapshots(self, plan: StepPlan) -> None:
        """Snapshots that were not kept."""
        if self.states is not None:
            for row in plan.snapshots.values():
                self.states.discard(row)
            plan.snapshots = {}

    def _queue_of(self, seq: Sequence) -> list[Sequence]:
        return self._running if seq.state is SequenceState.RUNNING else self._waiting

    def _drop(self, seq: Sequence) -> None:
        self.pages.release_all(seq.pages)
        seq.pages = []
        seq.computed = 0
        seq.is_mixed = False
        if self.states is not None and seq.state_slot is not None:
            self.states.release(seq.state_slot)
            seq.state_slot = None

    def _take_over(self, seq: Sequence, leader: Sequence, pages: list[int]) -> None:
        seq.pages = pages
        seq.computed = leader.computed
        seq.is_mixed = leader.is_mixed
        seq.cached_tokens = leader.cached_tokens
        seq.has_started = leader.has_started
        seq.state = leader.state
        seq.leader = None

    def _must_restart(self, heir: Sequence, leader: Sequence) -> bool:
        """What the leader computed of the prompt went to the leader, where the caller needs it; and its state is ahead
        of its tokens while a step with it is under way."""
        plan = self._uncommitted
        is_ahead = self.states is not None and plan is not None and any(chunk.seq is leader for chunk in plan.rows)
        return heir.compute_from is not None or is_ahead

    def _hand_over(self, leader: Sequence) -> None:
        heir, *rest = leader.siblings
        heir.siblings, leader.siblings = rest, []
        for seq in rest:
            seq.leader = heir
        self._siblings -= 1
        queue = self._queue_of(leader)
        queue[_place(queue, leader)] = heir
        self._take_over(heir, leader, leader.pages)
        heir.state_slot, heir.keep_at, leader.pages, leader.state_slot = leader.state_slot, leader.keep_at, [], None
        if heir.state is SequenceState.RUNNING and self._must_restart(heir, leader):
            self._drop(heir)
            if self.states is not None:
                heir.state_slot = self.states.take(None)
