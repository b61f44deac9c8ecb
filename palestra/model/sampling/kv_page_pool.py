"""Pages of the key/value cache, and the prefix cache: who holds which page, and which are found by tokens.

Owns: reference counts, the free list, the prefix trie, eviction. Never touches: tensors, sequences, time.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


class OutOfPages(RuntimeError):
    """Every page is in use."""


@dataclass(slots=True, eq=False)
class PageNode:
    """One published page. A child hangs on its parent object, so it cannot be reached through another one."""

    version: Hashable
    parent: "PageNode | None" = None
    """None only at the root of a version, which has no page."""
    tokens: tuple[int, ...] = ()
    page: int = -1
    depth: int = 0
    """Pages from the root to here, this one included."""
    children: "dict[tuple[int, ...], PageNode]" = field(default_factory=dict)
    snapshot: int | None = None
    """The recurrent state after this page, for models that have one: see `StateSlots`."""
    is_live: bool = True
    """False once it left the trie; pages may still point at it until they are published again or freed.
    What lies between a live node and its root is live too."""


class PagePool:
    """A page is free, in use (held at least once), or cached: no longer held but published, so still findable."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 1 or page_size < 1:
            raise ValueError(f"a page pool needs n_pages >= 1 and page_size >= 1, got {n_pages} and {page_size}")
        self.n_pages = n_pages
        self.page_size = page_size
        self._refs = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        # An OrderedDict, because the first key of a plain dict is slow to find once many before it were deleted.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._nodes: list[PageNode | None] = [None] * n_pages
        """Where a page's tokens sit in the trie; the node may belong to another page with the same tokens."""
        self._roots: dict[Hashable, PageNode] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can still hand out."""
        return len(self._free) + len(self._cached)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def allocate(self) -> int:
        if not self._free:
            self._evict()
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def share(self, page: int) -> None:
        self._require_held(page)
        self._refs[page] += 1

    def release(self, page: int) -> None:
        self._require_held(page)
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if self._is_published(page):
            self._cached[page] = None
        else:
            self._reclaim(page)

    def release_all(self, pages: Sequence[int]) -> None:
        """Release one sequence's pages, last first, so that leaves are evicted before the prefix they need."""
        for page in reversed(pages):
            self.release(page)

    def is_shared(self, page: int) -> bool:
        """Whether writing to it could be seen by anyone but its one holder."""
        node = self._nodes[page]  # `_is_published`, without the call: this is asked for every row of every step
        return self._refs[page] > 1 or (node is not None and node.is_live and node.page == page)

    def find(
        self, version: Hashable, tokens: Sequence[int], limit: int, known: PageNode | None = None
    ) -> PageNode | None:
        """The end of the longest cached prefix of at most `limit` tokens. Nothing is held by this.

        With the answer of an earlier call for the same tokens as `known`, only what is new is looked at.
        """
        node = known if known and known.is_live else self._roots.get(version)
        if node is None:
            return None
        for index in range(node.depth, min(limit, len(tokens)) // self.page_size):
            child = node.children.get(self._key(tokens, index))
            if child is None:
                break
            node = child
        return node if node.depth else None

    def hold(self, node: PageNode | None) -> list[int]:
        """The pages up to one that was just found, each now held by the caller too."""
        pages: list[int] = []
        while node and node.parent:
            self._cached.pop(node.page, None)
            self._refs[node.page] += 1
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def publish(self, version: Hashable, tokens: Sequence[int], pages: Sequence[int], count: int) -> None:
        """Make the first `count` of the caller's pages findable: they are full and will not change.

        Where the same tokens are published already, that page stays and the caller's remains private. Pages whose
        ancestors were evicted are put back along with them. Walks only the pages not yet in the trie.
        """
        first = count
        while first and not self._live_node(pages[first - 1]):
            first -= 1
        if first == count:
            return
        node = self._live_node(pages[first - 1]) if first else None
        node = node or self._roots.setdefault(version, PageNode(version))
        for index in range(first, count):
            self._require_held(pages[index])
            node = self._insert(node, self._key(tokens, index), pages[index])

    def node_of(self, page: int) -> PageNode | None:
        """Returns the node at which a page's tokens are published."""
        return self._live_node(page)

    def forget(self, version: Hashable) -> None:
        """Drop a version from the cache: its idle pages are free at once, those in use when released."""
        root = self._roots.pop(version, None)
        for node in root.children.values() if root else ():
            self._retire(node)

    def check(self) -> None:
        """Raise AssertionError if the books do not add up. Slow: for tests."""
        free, cached = set(self._free), set(self._cached)
        in_use = {page for page, refs in enumerate(self._refs) if refs > 0}
        assert min(self._refs) >= 0, "negative reference count"
        assert len(free) == len(self._free), "page twice in the free list"
        assert len(free) + len(cached) + len(in_use) == self.n_pages, "page lost or in two places"
        assert free | cached | in_use == set(range(self.n_pages)), "page lost or in two places"
        published = self._check_trie()
        assert cached <= published <= cached | in_use, "cached page not findable, or free page findable"
        assert all(self._nodes[page] is None for page in free), "free page remembers its tokens"
        assert published == {page for page in range(self.n_pages) if self._is_published(page)}

    def _check_trie(self) -> set[int]:
        found: list[int] = []
        stack = list(self._roots.values())
        assert all(root.children for root in stack), "empty root kept"
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert (child.is_live, child.version, child.tokens) == (True, node.version, key)
                assert (child.parent, child.depth) == (node, node.depth + 1)
                assert self._nodes[child.page] is child
                assert len(key) == self.page_size
                found.append(child.page)
                stack.append(child)
        assert len(found) == len(set(found)), "page published twice"
        return set(found)

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _require_held(self, page: int) -> None:
        if self._refs[page] < 1:
            raise ValueError(f"page {page} is not held")

    def _live_node(self, page: int) -> PageNode | None:
        node = self._nodes[page]
        return node if node and node.is_live else None

    def _is_published(self, page: int) -> bool:
        node = self._live_node(page)
        return node is not None and node.page == page

    def _insert(self, parent: PageNode, tokens: tuple[int, ...], page: int) -> PageNode:
        node = parent.children.get(tokens)
        if node is None:
            node = PageNode(parent.version, parent, tokens, page, parent.depth + 1)
            parent.children[tokens] = node
        self._nodes[page] = node
        return node

    def _evict(self) -> None:
        """Free the least recently used cached page, and with it whatever can only be found through it."""
        if not self._cached:
            raise OutOfPages(f"all {self.n_pages} pages of the key/value cache are in use")
        node = self._nodes[next(iter(self._cached))]
        assert node is not None
        assert node.parent is not None
        del node.parent.children[node.tokens]
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.version]
        self._retire(node)

    def _retire(self, top: PageNode) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.is_live = False
            if self._refs[node.page] == 0:
                del self._cached[node.page]
                self._reclaim(node.page)

    def _reclaim(self, page: int) -> None:
        self._nodes[page] = None
        self._free.append(page)
