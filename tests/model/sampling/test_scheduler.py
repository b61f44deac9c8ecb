"""The scheduler driving a pretend model whose memory records what was written into every page slot."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.model.sampling.kv_page_pool import PagePool
from palestra.model.sampling.scheduler import RequestTooLarge, Scheduler
from palestra.model.sampling.sequences import Sequence, SequenceChunk, SequenceState, StepPlan
from tests.properties import examples


def next_token(tokens: list[int], seed: int) -> int:
    return (sum(tokens) + 3 * len(tokens) + seed) % 4


@dataclass
class Engine:
    """Runs plans on the pretend memory, and checks on the way everything a real model would rely on."""

    pool: PagePool
    scheduler: Scheduler
    memory: list[list[tuple]] = field(default_factory=list)
    computed_tokens: int = 0
    aborted: list[Sequence] = field(default_factory=list)

    @classmethod
    def of(cls, n_pages: int, page_size: int, max_rows: int = 8, prefill_tokens: int = 16) -> "Engine":
        pool = PagePool(n_pages, page_size)
        scheduler = Scheduler(pool, max_rows=max_rows, prefill_tokens=prefill_tokens)
        return cls(pool, scheduler, [[("never written",)] * page_size for _ in range(n_pages)])

    def step(self, abort: tuple[Sequence, ...] = ()) -> StepPlan:
        plan = self.scheduler.plan()
        rows = plan.rows
        self.check_plan(plan, rows)
        self.copy(plan.copies)
        for chunk in rows:
            self.write(chunk)
        for seq in abort:
            self.scheduler.abort(seq)
            self.aborted.append(seq)
        for ready in self.scheduler.commit(plan):
            assert rows[ready.row].seq is ready.seqs[0]
            for seq in ready.seqs:
                assert seq not in self.aborted
                assert self.read(seq, seq.computed) == seq.tokens
                self.sample(seq)
        self.pool.check()
        self.check_counts()
        return plan

    def check_counts(self) -> None:
        waiting, running = self.scheduler._waiting, self.scheduler._running
        assert self.scheduler.waiting == len(waiting) + sum(len(seq.siblings) for seq in waiting + running)
        assert self.scheduler.running == len(running)
        assert waiting == sorted(waiting, key=lambda seq: seq.arrival)

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no end in sight")

    def sample(self, seq: Sequence) -> None:
        if len(seq.tokens) < seq.max_len:
            self.scheduler.append(seq, next_token(seq.tokens, seq.uid % 2))
        if len(seq.tokens) == seq.max_len:
            self.scheduler.finish(seq)

    def check_plan(self, plan: StepPlan, rows: list[SequenceChunk]) -> None:
        running = self.scheduler._running
        assert len(plan.decode) <= self.scheduler.max_rows
        assert plan.prefill_tokens <= self.scheduler.prefill_tokens
        assert [seq.adapter_slot for seq in plan.decode] == sorted(seq.adapter_slot for seq in plan.decode)
        assert [chunk.seq.adapter_slot for chunk in plan.prefill] == sorted(
            chunk.seq.adapter_slot for chunk in plan.prefill
        )
        if self.scheduler.has_work:
            assert any(chunk.seq is running[0] for chunk in rows), "the oldest always makes progress"
        assert running == sorted(running, key=lambda seq: seq.arrival)
        written = [page for chunk in rows for page in self.pages_of(chunk)]
        assert len(written) == len(set(written)), "two rows write one page"
        for chunk in rows:
            assert chunk.start == chunk.seq.computed < chunk.end <= len(chunk.seq.tokens)
            assert chunk.seq.state is SequenceState.RUNNING
        assert not any(self.pool.is_shared(page) for page in written)

    def pages_of(self, chunk: SequenceChunk) -> list[int]:
        size = self.pool.page_size
        return chunk.seq.pages[chunk.start // size : (chunk.end - 1) // size + 1]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        at_once = {target: list(self.memory[source]) for source, target in copies}
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        assert all(self.memory[target] == slots for target, slots in at_once.items()), "the order of copies matters"

    def write(self, chunk: SequenceChunk) -> None:
        seq, size = chunk.seq, self.pool.page_size
        for position in range(chunk.start, chunk.end):
            slot = (seq.version, seq.tokens[position], position)
            self.memory[seq.pages[position // size]][position % size] = slot
            self.computed_tokens += 1
        assert self.read(seq, chunk.end) == seq.tokens[: chunk.end]

    def read(self, seq: Sequence, end: int) -> list[int]:
        size = self.pool.page_size
        slots = [self.memory[seq.pages[i // size]][i % size] for i in range(end)]
        assert all(slot[0] == seq.version and slot[2] == i for i, slot in enumerate(slots))
        return [slot[1] for slot in slots]


def make(uid: int, prompt: list[int], max_len: int, n: int = 1, version: Hashable = "base", **extra: Any) -> Sequence:
    seqs = [Sequence(uid + i, version, list(prompt), len(prompt), max_len, **extra) for i in range(n)]
    seqs[0].siblings = seqs[1:]
    return seqs[0]


def expected(prompt: list[int], max_len: int, seed: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens, seed))
    return tokens


@dataclass(frozen=True)
class Request:
    prefix: int
    tail: list[int]
    new: int
    n: int
    lane: int
    compute_from: int | None
    at_step: int
    abort_at: int | None
    """The step within which one of its sequences is aborted, between plan and commit."""
    aborted: int


PREFIXES = [[], [1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 1, 2, 0, 0, 0, 0, 1, 1, 1]]
REQUESTS = st.builds(
    Request,
    prefix=st.sampled_from(range(len(PREFIXES))),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    new=st.integers(0, 9),
    n=st.sampled_from([1, 1, 1, 2, 4]),
    lane=st.integers(-1, 1),
    compute_from=st.sampled_from([None, None, None, 0, 3, 9]),
    at_step=st.integers(0, 12),
    abort_at=st.none() | st.integers(0, 25),
    aborted=st.integers(0, 3),
)


@examples(250)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    page_size=st.integers(1, 4),
    spare_pages=st.integers(0, 12),
    max_rows=st.integers(1, 5),
    prefill_tokens=st.integers(1, 12),
)
def test_every_sequence_gets_its_tokens_whatever_else_goes_on(
    requests, page_size, spare_pages, max_rows, prefill_tokens
):
    groups: list[list[Sequence]] = []
    for index, request in enumerate(requests):
        prompt = PREFIXES[request.prefix] + request.tail
        extra = {
            "version": ("adapter", request.lane),
            "adapter_slot": request.lane,
            "compute_from": request.compute_from,
        }
        leader = make(10 * index, prompt, len(prompt) + request.new, n=request.n, **extra)
        groups.append([leader, *leader.siblings])
    largest = max(seq.max_len for group in groups for seq in group)
    engine = Engine.of(-(-largest // page_size) + spare_pages, page_size, max_rows, prefill_tokens)

    aborted: set[int] = set()
    for step in range(26):
        for request, group in zip(requests, groups, strict=True):
            if request.at_step == step:
                engine.scheduler.add(group[0])
        victims = tuple(
            group[request.aborted % request.n]
            for request, group in zip(requests, groups, strict=True)
            if request.abort_at == step and request.at_step <= step
        )
        aborted |= {seq.uid for seq in victims if seq.state is not SequenceState.FINISHED}
        engine.step(abort=victims)
    engine.run()

    for request, group in zip(requests, groups, strict=True):
        for seq in group:
            assert (seq.state, seq.pages, seq.siblings) == (SequenceState.FINISHED, [], [])
            requested = expected(group[0].tokens[: seq.prompt_len], seq.max_len, seq.uid % 2)
            assert seq.tokens == requested or (seq.uid in aborted and seq.tokens == requested[: len(seq.tokens)])
            assert request.compute_from is None or seq.cached_tokens <= request.compute_from
    assert engine.pool.available == engine.pool.n_pages
    assert (engine.scheduler.running, engine.scheduler.waiting) == (0, 0)


def test_group_computes_its_prompt_once():
    engine = Engine.of(40, 4, prefill_tokens=64)
    leader = make(0, list(range(10)), 16, n=4)
    group = [leader, *leader.siblings]
    engine.scheduler.add(leader)
    first = engine.step()
    assert first.prefill == [SequenceChunk(leader, 0, 10)]
    assert [len(seq.tokens) for seq in group] == [11] * 4
    assert len({seq.pages[2] for seq in group}) == 1
    second = engine.step()
    assert second.decode == group
    assert len(second.copies) == 3, "the last owner writes the half-full page in place"
    assert len({seq.pages[2] for seq in group}) == 4
    engine.run()
    assert engine.computed_tokens == 10 + 4 * 5


@pytest.mark.parametrize("prefill_tokens", [6, 64])
def test_equal_requests_at_once_compute_their_full_pages_once(prefill_tokens):
    engine = Engine.of(40, 4, prefill_tokens=prefill_tokens)
    first, second = make(0, list(range(14)), 16), make(1, list(range(14)), 16)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (1, 1)
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert engine.computed_tokens == 14 + 2 + 2  # the second's rest, and a decode each


def test_held_back_request_is_not_looked_up_from_the_start_again():
    """The first page is in the cache, the second on its way: the search goes on behind it, even if others came."""
    engine = Engine.of(40, 4, prefill_tokens=64)
    prompt = list(range(20))
    engine.scheduler.add(make(0, prompt[:5], 6))
    engine.run()
    first, second = make(1, prompt, 24), make(2, prompt, 24)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step()
    assert second.found is not None
    assert second.found.depth == 1
    engine.run()
    assert (first.cached_tokens, second.cached_tokens, second.found) == (4, 16, None)


def test_held_back_request_starts_over_when_its_prefix_is_gone():
    engine = Engine.of(40, 4, prefill_tokens=64)
    prompt = list(range(20))
    engine.scheduler.add(make(0, prompt[:5], 6))
    engine.run()
    first, second = make(1, prompt, 24), make(2, prompt, 24)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step(abort=(first,))
    assert second.found is not None
    engine.pool.forget("base")
    assert engine.step().prefill == [SequenceChunk(second, 0, 20)]
    engine.run()
    assert second.tokens == expected(prompt, 24, 0)


def test_held_back_request_goes_on_when_the_computing_one_is_aborted():
    engine = Engine.of(40, 4)
    first, second = make(0, list(range(14)), 16), make(1, list(range(14)), 16)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    assert engine.step(abort=(first,)).prefill == [SequenceChunk(first, 0, 14)]
    assert engine.step().prefill == [SequenceChunk(second, 0, 14)]
    engine.run()
    assert second.tokens == expected(list(range(14)), 16, 1)


def test_request_computes_the_prompt_positions_its_caller_needs():
    engine = Engine.of(40, 4)
    for uid, (compute_from, computed) in enumerate([(None, 9), (None, 1), (0, 9), (3, 9), (4, 5), (7, 5), (8, 1)]):
        engine.scheduler.add(make(uid, list(range(9)), 10, compute_from=compute_from))
        before = engine.computed_tokens
        engine.run()
        assert engine.computed_tokens - before == computed


def test_request_without_cache_uses_it_once_its_prompt_was_computed():
    engine = Engine.of(40, 4)
    seq = make(0, list(range(9)), 12, compute_from=0)
    engine.scheduler.add(seq)
    engine.step()
    engine.scheduler._preempt(seq)
    assert engine.step().prefill == [SequenceChunk(seq, 8, 10)]


def test_equal_prompts_of_two_versions_do_not_wait_for_each_other():
    engine = Engine.of(40, 4)
    for uid in range(2):
        engine.scheduler.add(make(uid, list(range(8)), 12, version=("adapter", uid)))
    assert [chunk.end for chunk in engine.step().prefill] == [8, 8]


def test_long_prompts_are_split_and_short_ones_share_a_step():
    engine = Engine.of(40, 4, prefill_tokens=10)
    long, short, later = make(0, [1] * 25, 26), make(1, [2] * 3, 4), make(2, [3] * 4, 5)
    for seq in (long, short, later):
        engine.scheduler.add(seq)
    assert engine.step().prefill == [SequenceChunk(long, 0, 10)]
    assert engine.step().prefill == [SequenceChunk(long, 10, 20)]
    assert engine.step().prefill == [
        SequenceChunk(long, 20, 25),
        SequenceChunk(short, 0, 3),
        SequenceChunk(later, 0, 2),
    ]
    assert engine.step().prefill == [SequenceChunk(later, 2, 4)]


@pytest.mark.parametrize(
    ("decoding", "prompts", "tokens"), [(0, 1, 32), (3, 1, 32), (7, 1, 16), (63, 1, 2), (32, 32, 32)]
)
def test_few_prompts_get_a_small_part_of_a_step_in_which_many_decode(decoding, prompts, tokens):
    engine = Engine.of(400, 4, max_rows=64, prefill_tokens=32)
    for uid in range(decoding):
        engine.scheduler.add(make(uid, [uid % 4] * 2, 20))
    while engine.scheduler.waiting:
        engine.step()
    for uid in range(prompts):
        engine.scheduler.add(make(100 + uid, [uid % 4] * 40, 41))
    plan = engine.step()
    assert (len(plan.decode), plan.prefill_tokens) == (decoding, tokens)
    engine.run()


def test_when_pages_run_out_the_youngest_goes_back_and_the_oldest_never():
    engine = Engine.of(8, 2, prefill_tokens=8)
    seqs = [make(uid, [uid, uid + 1], 16) for uid in range(4)]
    for seq in seqs:
        engine.scheduler.add(seq)
    finished: list[int] = []
    while engine.scheduler.has_work:
        oldest = next(seq for seq in seqs if seq.state is not SequenceState.FINISHED)
        computed = oldest.computed
        engine.step()
        assert oldest.computed > computed or oldest.state is SequenceState.FINISHED
        finished += [s.uid for s in seqs if s.state is SequenceState.FINISHED and s.uid not in finished]
    assert finished == [0, 1, 2, 3]
    assert engine.scheduler.preemptions > 0
    assert [seq.tokens for seq in seqs] == [expected([u, u + 1], 16, u % 2) for u in range(4)]


def test_newcomer_waits_rather_than_take_the_pages_of_others():
    engine = Engine.of(8, 2, prefill_tokens=8)
    first, newcomer = make(0, [1] * 7, 10), make(1, [2] * 7, 8)
    engine.scheduler.add(first)
    engine.step()
    engine.scheduler.add(newcomer)
    while first.state is not SequenceState.FINISHED:
        engine.step()
        assert newcomer.state is SequenceState.WAITING
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_newcomer_leaves_pages_for_the_copies_of_siblings():
    engine = Engine.of(5, 4)
    newcomer = make(3, [1], 8)
    engine.scheduler.add(make(0, [1, 2, 3, 4, 5, 6], 8, n=3))
    engine.scheduler.add(newcomer)
    engine.step()
    assert newcomer.state is SequenceState.WAITING
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_without_a_page_for_the_copy_the_youngest_sibling_gives_way():
    engine = Engine.of(2, 4)
    leader = make(0, [1, 2, 3, 4, 5, 6], 8, n=3)
    group = [leader, *leader.siblings]
    engine.scheduler.add(leader)
    engine.step()
    assert engine.step().decode == [leader]
    engine.run()
    assert [seq.tokens for seq in group] == [expected([1, 2, 3, 4, 5, 6], 8, uid % 2) for uid in range(3)]


def test_rows_beyond_the_limit_wait_for_the_oldest():
    engine = Engine.of(40, 4, max_rows=2)
    leader = make(0, [1, 2, 3], 6, n=4)
    group = [leader, *leader.siblings]
    engine.scheduler.add(leader)
    engine.step()
    assert engine.scheduler.running == 4
    assert engine.step().decode == group[:2]
    assert engine.step().decode == group[:2]
    assert engine.step().decode == group[2:]


def test_rows_of_one_adapter_are_adjacent():
    engine = Engine.of(40, 4)
    for uid, lane in enumerate([1, 0, -1, 1, 0]):
        engine.scheduler.add(make(uid, [uid], 4, adapter_slot=lane, version=lane))
    assert [chunk.seq.uid for chunk in engine.step().prefill] == [2, 1, 4, 0, 3]
    assert [seq.uid for seq in engine.step().decode] == [2, 1, 4, 0, 3]


def test_sibling_takes_over_the_pages_of_an_aborted_leader():
    engine = Engine.of(40, 4, prefill_tokens=8)
    leader = make(0, list(range(12)), 14, n=4)
    heir, other, unwanted = leader.siblings
    engine.scheduler.add(leader)
    engine.step()
    engine.step(abort=(leader,))
    assert (heir.computed, heir.siblings, leader.pages) == (8, [other, unwanted], [])
    for _ in range(2):  # an abort may be repeated
        engine.scheduler.abort(unwanted)
    engine.run()
    assert engine.computed_tokens == 12 + 4 + 2
    assert other.tokens == expected(list(range(12)), 14, 0)


def test_sibling_that_needs_its_prompt_computed_starts_over_after_an_aborted_leader():
    engine = Engine.of(40, 4, prefill_tokens=8)
    leader = make(0, list(range(12)), 14, n=2, compute_from=0)
    heir = leader.siblings[0]
    engine.scheduler.add(leader)
    engine.step()
    engine.step(abort=(leader,))
    assert engine.step().prefill == [SequenceChunk(heir, 0, 8)]
    engine.run()


def test_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = Engine.of(4, 4)
    engine.scheduler.add(make(0, [1] * 3, 16))
    with pytest.raises(RequestTooLarge, match=r"sequence 1 may grow to 17 tokens \(3 of them prompt\).* holds 16"):
        engine.scheduler.add(make(1, [1] * 3, 17))
    engine.run()


def test_planning_before_a_ready_sequence_was_appended_to_is_an_error():
    engine = Engine.of(4, 4)
    engine.scheduler.add(make(0, [1], 4))
    engine.scheduler.commit(engine.scheduler.plan())
    with pytest.raises(RuntimeError, match="append to it or finish it"):
        engine.scheduler.plan()
