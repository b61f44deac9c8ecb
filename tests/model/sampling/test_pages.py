"""The page pool against a reference model that remembers what every page was said to contain."""

from dataclasses import dataclass, field

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from palestra.model.sampling.kv_page_pool import OutOfPages, PageNode, PagePool
from tests.properties import examples

SIZE = 2
VERSIONS = st.sampled_from(["a", ("b", 1)])
TOKENS = st.lists(st.integers(0, 1), max_size=5 * SIZE)


def lookup(pool: PagePool, version: object, tokens: list[int], limit: int) -> list[int]:
    return pool.hold(pool.find(version, tokens, limit))


@dataclass
class Holder:
    """A sequence, as far as pages are concerned."""

    version: object
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    known: PageNode | None = None
    """Where an earlier search ended."""


class PagePoolMachine(RuleBasedStateMachine):
    @initialize(n_pages=st.integers(1, 9))
    def start(self, n_pages):
        self.pool = PagePool(n_pages, SIZE)
        self.holders: list[Holder] = []
        self.content: dict[int, tuple] = {}

    def pick(self, data) -> Holder:
        assume(self.holders)
        return data.draw(st.sampled_from(self.holders))

    @rule(version=VERSIONS, tokens=TOKENS, limit=st.integers(0, 12))
    def begin(self, version, tokens, limit):
        before = self.pool.available
        pages = lookup(self.pool, version, tokens, limit)
        assert len(pages) * SIZE <= min(limit, len(tokens))
        for index, page in enumerate(pages):
            assert self.content[page] == (version, tuple(tokens[: (index + 1) * SIZE]))
            assert self.pool.is_shared(page)
        assert before - len(pages) <= self.pool.available <= before
        self.holders.append(Holder(version, tokens, pages, self.pool.find(version, tokens, limit)))

    @rule(data=st.data(), n=st.integers(1, 3))
    def compute(self, data, n):
        """Fill the next n pages and publish them at once, or leave that to a later call."""
        holder = self.pick(data)
        for _ in range(n):
            end = (len(holder.pages) + 1) * SIZE
            if end > len(holder.tokens) or not self.pool.available:
                break
            page = self.pool.allocate()
            assert not self.pool.is_shared(page)
            assert all(page not in other.pages for other in self.holders)
            holder.pages.append(page)
            self.content[page] = (holder.version, tuple(holder.tokens[:end]))
        if data.draw(st.booleans()):
            self.publish(holder)

    @rule(data=st.data())
    def publish_later(self, data):
        self.publish(self.pick(data))

    def publish(self, holder):
        self.pool.publish(holder.version, holder.tokens, holder.pages, len(holder.pages))
        again = lookup(self.pool, holder.version, holder.tokens, len(holder.tokens))
        if holder.known is not None:
            found = self.pool.find(holder.version, holder.tokens, len(holder.tokens))
            assert self.pool.find(holder.version, holder.tokens, len(holder.tokens), holder.known) is found
        assert len(again) >= len(holder.pages), "a published chain is found whole"
        self.pool.release_all(again)

    @rule(data=st.data())
    def fork(self, data):
        holder = self.pick(data)
        for page in holder.pages:
            self.pool.share(page)
            assert self.pool.is_shared(page)
        self.holders.append(Holder(holder.version, holder.tokens, list(holder.pages)))

    @rule(data=st.data(), leaves_first=st.booleans())
    def end(self, data, leaves_first):
        holder = self.pick(data)
        self.holders.remove(holder)
        if leaves_first:
            self.pool.release_all(holder.pages)
        else:
            for page in holder.pages:
                self.pool.release(page)

    @rule(version=VERSIONS)
    def forget(self, version):
        before = self.pool.available
        self.pool.forget(version)
        assert self.pool.available == before
        assert lookup(self.pool, version, [0] * 10, 10) == lookup(self.pool, version, [1] * 10, 10) == []

    @invariant()
    def books_add_up(self):
        held = [page for holder in self.holders for page in holder.pages]
        assert self.pool.available == self.pool.n_pages - len(set(held))
        self.pool.check()
        for page in set(held):
            if held.count(page) > 1:
                assert self.pool.is_shared(page)

    @invariant()
    def nothing_held_changes(self):
        for holder in self.holders:
            for index, page in enumerate(holder.pages):
                assert self.content[page] == (holder.version, tuple(holder.tokens[: (index + 1) * SIZE]))

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for holder in self.holders:
            self.pool.release_all(holder.pages)
        taken = [self.pool.allocate() for _ in range(self.pool.n_pages)]
        assert sorted(taken) == list(range(self.pool.n_pages)), "everything can be had again"
        with pytest.raises(OutOfPages):
            self.pool.allocate()


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = examples(120, stateful_step_count=30)


def cache(pool: PagePool, version: object, tokens: list[int]) -> list[int]:
    """Compute, publish and let go of all full pages of `tokens`."""
    pages = [pool.allocate() for _ in range(len(tokens) // pool.page_size)]
    pool.publish(version, tokens, pages, len(pages))
    pool.release_all(pages)
    return pages


def test_free_pages_are_taken_before_cached_ones_and_those_by_last_use():
    pool = PagePool(3, 2)
    (a,) = cache(pool, "v", [1, 1])
    (b,) = cache(pool, "v", [2, 2])
    pool.release_all(lookup(pool, "v", [1, 1], 2))
    assert pool.allocate() not in (a, b)
    assert [pool.allocate(), pool.allocate()] == [b, a]


def test_leaves_are_evicted_before_the_prefix_they_need():
    pool = PagePool(3, 2)
    pages = cache(pool, "v", [1, 2, 3, 4, 5, 6])
    assert pool.allocate() == pages[2]
    assert lookup(pool, "v", [1, 2, 3, 4, 5, 6], 6) == pages[:2]


def test_same_page_tokens_after_another_prefix_are_not_found():
    pool = PagePool(4, 2)
    cache(pool, "v", [1, 2, 3, 4])
    assert lookup(pool, "v", [9, 9, 3, 4], 4) == []
    assert lookup(pool, "w", [1, 2, 3, 4], 4) == []
    assert lookup(pool, "v", [3, 4], 2) == []


def test_second_copy_of_a_page_stays_private():
    pool = PagePool(4, 2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish("v", [1, 2], [first], 1)
    pool.publish("v", [1, 2], [second], 1)
    assert not pool.is_shared(second)
    assert lookup(pool, "v", [1, 2], 2) == [first]
    pool.release(second)
    assert pool.available == 3


def test_child_of_an_evicted_page_is_lost_and_then_published_again_with_its_own_parent():
    pool = PagePool(3, 2)
    tokens = [1, 2, 3, 4]
    (evicted,) = cache(pool, "v", tokens[:2])
    mine = [pool.allocate(), pool.allocate()]
    pool.publish("v", tokens, mine, 2)
    assert lookup(pool, "v", tokens, 4) == [evicted, mine[1]]
    pool.release_all([evicted, mine[1]])
    other = pool.allocate()
    assert other == evicted
    assert lookup(pool, "v", tokens, 4) == []
    pool.publish("v", [7, 7], [other], 1)
    assert lookup(pool, "v", [7, 7, 3, 4], 4) == [other]
    pool.publish("v", tokens, mine, 2)
    assert lookup(pool, "v", tokens, 4) == mine
    pool.check()


def test_forgotten_pages_in_use_can_be_written_again():
    pool = PagePool(2, 1)
    page = pool.allocate()
    pool.publish("v", [5], [page], 1)
    assert pool.is_shared(page)
    pool.forget("v")
    assert not pool.is_shared(page)
    pool.release(page)
    pool.check()
    assert pool.available == 2


def test_releasing_a_page_nobody_holds_is_an_error():
    pool = PagePool(1, 1)
    with pytest.raises(ValueError, match="page 0 is not held"):
        pool.release(0)
