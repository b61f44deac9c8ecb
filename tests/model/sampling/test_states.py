"""Recurrent states under the scheduler: a pretend model whose states remember every token they have seen, and how."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.model.sampling import state_slots
from palestra.model.sampling.kv_page_pool import PagePool
from palestra.model.sampling.scheduler import Scheduler
from palestra.model.sampling.sequences import Sequence, SequenceChunk, SequenceState, StepPlan
from palestra.model.sampling.state_slots import StateSlots
from tests.properties import examples

CHUNK = 4
Seen = tuple[object, int, str]
"""Version, token, and the form in which it was computed."""


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_slots, "CHUNK", CHUNK)
        yield


def next_token(tokens: list[int], seed: int) -> int:
    return (sum(tokens) + 3 * len(tokens) + seed) % 4


@dataclass
class Engine:
    pool: PagePool
    states: StateSlots
    scheduler: Scheduler
    memory: dict[int, list[Seen]] = field(default_factory=dict)
    computed_tokens: int = 0

    @classmethod
    def of(
        cls, *, n_pages=40, page_size=2, n_slots=4, n_snapshots=4, max_rows: int = 8, prefill_tokens: int = 16
    ) -> "Engine":
        pool, states = PagePool(n_pages, page_size), StateSlots(n_slots, n_snapshots, page_size)
        return cls(pool, states, Scheduler(pool, max_rows=max_rows, prefill_tokens=prefill_tokens, states=states))

    def step(self, *, fails_after: int | None = None, abort: tuple[Sequence, ...] = ()) -> StepPlan:
        """With `fails_after` the model breaks after so many moves and rows, and nothing is committed."""
        plan = self.scheduler.plan()
        work = [*plan.state_moves, *plan.rows][:fails_after]
        for item in work:
            if isinstance(item, SequenceChunk):
                self.advance(item)
            else:
                source, target = item
                self.memory[target] = [] if source is None else list(self.memory[source])
        if fails_after is not None:
            return plan
        for slot, row in plan.snapshots.items():
            self.memory[row] = list(self.memory[slot])
        for seq in abort:
            self.scheduler.abort(seq)
        for ready in self.scheduler.commit(plan):
            for seq in ready.seqs:
                if len(seq.tokens) < seq.max_len:
                    self.scheduler.append(seq, next_token(seq.tokens, seq.uid % 2))
                if len(seq.tokens) == seq.max_len:
                    self.scheduler.finish(seq)
        self.check()
        return plan

    def advance(self, chunk: SequenceChunk) -> None:
        """The state has seen exactly what is before the chunk, each token in its form; chunks lie on the grid."""
        seq, slot = chunk.seq, chunk.seq.state_slot
        assert slot is not None
        assert self.memory[slot] == seen(seq, chunk.start)
        if chunk.start < seq.prompt_len:
            assert chunk.start % CHUNK == 0
            assert chunk.end % CHUNK == 0 or chunk.end == seq.prompt_len
        self.memory[slot] += seen(seq, chunk.end)[chunk.start :]
        self.computed_tokens += chunk.end - chunk.start

    def check(self) -> None:
        self.pool.check()
        running = self.scheduler._running
        assert all(seq.state_slot is None for seq in self.scheduler._waiting)
        self.states.check([seq.state_slot for seq in running if seq.state_slot is not None])
        assert all(seq.state_slot is not None for seq in running)
        for row, node in self.states._kept.items():
            tokens: list[int] = []
            page = node
            while page.parent is not None:
                tokens, page = [*page.tokens, *tokens], page.parent
            assert self.memory[row] == [(node.version, token, "chunk") for token in tokens], "snapshot of other tokens"

    def run(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no end in sight")


def seen(seq: Sequence, end: int) -> list[Seen]:
    return [(seq.version, t, "chunk" if i < seq.prompt_len else "step") for i, t in enumerate(seq.tokens[:end])]


def make(uid: int, prompt: list[int], new: int, n: int = 1, version: object = "base", **extra) -> Sequence:
    seqs = [Sequence(uid + i, version, list(prompt), len(prompt), len(prompt) + new, **extra) for i in range(n)]
    seqs[0].siblings = seqs[1:]
    return seqs[0]


def expected(prompt: list[int], new: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens, seed))
    return tokens


@dataclass(frozen=True)
class Request:
    prefix: int
    tail: list[int]
    new: int
    n: int
    version: int
    compute_from: int | None
    at_step: int
    abort_at: int | None
    aborted: int


PREFIXES = [[], [1, 2, 3, 1, 2, 3, 0, 0, 1], [1, 2, 3, 1, 2, 3, 0, 0, 1, 1, 1, 1, 2, 2]]
REQUESTS = st.builds(
    Request,
    prefix=st.sampled_from(range(len(PREFIXES))),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    new=st.integers(0, 9),
    n=st.sampled_from([1, 1, 1, 2, 4]),
    version=st.integers(0, 1),
    compute_from=st.sampled_from([None, None, None, 0, 9]),
    at_step=st.integers(0, 12),
    abort_at=st.none() | st.integers(0, 25),
    aborted=st.integers(0, 3),
)


@examples(250)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    page_size=st.sampled_from([1, 2, 3, 4, 8]),
    spare_pages=st.integers(0, 12),
    n_slots=st.integers(1, 5),
    n_snapshots=st.integers(0, 4),
    max_rows=st.integers(1, 5),
    prefill_tokens=st.integers(1, 12),
    failures=st.dictionaries(st.integers(0, 25), st.integers(0, 4), max_size=3),
)
def test_every_state_has_seen_its_own_tokens_once(
    requests, page_size, spare_pages, n_slots, n_snapshots, max_rows, prefill_tokens, failures
):
    groups: list[list[Sequence]] = []
    for index, r in enumerate(requests):
        prompt = PREFIXES[r.prefix] + r.tail
        leader = make(10 * index, prompt, r.new, r.n, version=r.version, compute_from=r.compute_from)
        groups.append([leader, *leader.siblings])
    largest = max(seq.max_len for group in groups for seq in group)
    engine = Engine.of(
        n_pages=-(-largest // page_size) + spare_pages,
        page_size=page_size,
        n_slots=n_slots,
        n_snapshots=n_snapshots,
        max_rows=max_rows,
        prefill_tokens=prefill_tokens,
    )
    aborted: set[int] = set()
    for step in range(26):
        for r, group in zip(requests, groups, strict=True):
            if r.at_step == step:
                engine.scheduler.add(group[0])
        victims = tuple(
            group[r.aborted % r.n]
            for r, group in zip(requests, groups, strict=True)
            if r.abort_at == step and r.at_step <= step and step not in failures
        )
        aborted |= {seq.uid for seq in victims if seq.state is not SequenceState.FINISHED}
        engine.step(fails_after=failures.get(step), abort=victims)
    engine.run()
    for r, group in zip(requests, groups, strict=True):
        for seq in group:
            assert (seq.state, seq.pages, seq.state_slot) == (SequenceState.FINISHED, [], None)
            truth = expected(PREFIXES[r.prefix] + r.tail, r.new, seq.uid % 2)
            assert seq.tokens == truth or (seq.uid in aborted and seq.tokens == truth[: len(seq.tokens)])
    assert engine.pool.available == engine.pool.n_pages
    engine.states.check([])


def test_equal_prompts_go_on_from_the_snapshot_at_the_end_of_the_first():
    engine = Engine.of()
    first, second = make(0, [1] * 11, 2), make(1, [1] * 11, 2)
    for seq in (first, second):
        engine.scheduler.add(seq)
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    assert engine.computed_tokens == 11 + 1 + 3 + 1


def test_next_turn_goes_on_from_the_prompt_of_the_last():
    engine = Engine.of()
    first = make(0, [1] * 9, 6)
    engine.scheduler.add(first)
    engine.run()
    second = make(1, [*first.tokens, 3, 3], 1)
    engine.scheduler.add(second)
    engine.run()
    assert second.cached_tokens == 8, "what was generated came from steps, and a prompt is computed in chunks"


def test_third_one_that_leaves_a_known_path_gains_from_the_second():
    engine = Engine.of()
    common = [1, 2, 3, 0, 1, 2, 3, 0, 2]
    found = []
    for uid, last in enumerate((1, 2, 3)):
        seq = make(uid, common + [last] * 9, 1)
        engine.scheduler.add(seq)
        engine.run()
        found.append(seq.cached_tokens)
    assert found == [0, 0, 8]


def test_group_larger_than_the_slots_is_served_in_turns():
    engine = Engine.of(n_slots=2)
    leader = make(0, [1, 2, 3, 1, 2], 5, n=5)
    group = [leader, *leader.siblings]
    engine.scheduler.add(leader)
    assert engine.step().prefill == [SequenceChunk(leader, 0, 4)], "up to where a snapshot is kept"
    engine.step()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 3)
    assert [len(seq.tokens) for seq in group] == [6] * 5, "all drew their first token from the same logits"
    engine.run()
    assert [seq.tokens for seq in group] == [expected([1, 2, 3, 1, 2], 5, uid % 2) for uid in range(5)]


def test_newcomer_waits_for_a_slot_and_leaves_those_of_siblings():
    engine = Engine.of(n_slots=3)
    engine.scheduler.add(make(0, [1, 2, 3], 4, n=2))
    newcomer, late = make(2, [3, 3], 4), make(3, [2, 2], 4)
    engine.scheduler.add(newcomer)
    engine.scheduler.add(late)
    engine.step()
    assert (newcomer.state, late.state) == (SequenceState.RUNNING, SequenceState.WAITING)
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_least_recently_used_snapshot_goes_first():
    engine = Engine.of(n_snapshots=2)
    prompts = [[uid] * 5 for uid in range(3)]
    for uid, prompt in enumerate([prompts[0], prompts[1], prompts[0], prompts[2]]):
        engine.scheduler.add(make(uid, prompt, 1))
        engine.run()
    found = []
    for uid, prompt in enumerate([prompts[0], prompts[1]]):
        seq = make(10 + uid, prompt, 1)
        engine.scheduler.add(seq)
        engine.run()
        found.append(seq.cached_tokens)
    assert found == [4, 0]


def test_snapshot_goes_with_its_page():
    engine = Engine.of(n_pages=4, n_snapshots=2)
    first = make(0, [1] * 5, 1)
    engine.scheduler.add(first)
    engine.run()
    engine.scheduler.add(make(1, [2] * 7, 1))  # takes all pages
    engine.run()
    again = make(2, [1] * 5, 1)
    engine.scheduler.add(again)
    engine.run()
    assert again.cached_tokens == 0


def test_step_that_was_not_committed_sends_those_in_it_back_to_their_snapshots():
    engine = Engine.of(prefill_tokens=8)
    seq = make(0, [1, 2, 3, 0] * 3, 3)
    engine.scheduler.add(seq)
    engine.step()
    engine.step()
    assert seq.computed == 12
    engine.step(fails_after=9)
    plan = engine.step()
    assert plan.prefill == [SequenceChunk(seq, 8, 12)]
    engine.run()
    assert seq.tokens == expected([1, 2, 3, 0] * 3, 3, 0)
