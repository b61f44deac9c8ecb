"""Records of the scheduler: sequences, chunks of them, and the plan of one step."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from palestra.model.sampling.kv_page_pool import PageNode

if TYPE_CHECKING:
    from palestra.model.vision.placed import PlacedPictures

StateMove = tuple[int | None, int]
"""Copy of a recurrent state: source row, or None for zeros, and target row."""
PENDING = -1
"""Stands in a sequence for the token that was drawn last, as long as only the device knows it."""


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
    """Prompt, then what was generated. Where a picture stands, the ids of its rows, which are below 0."""
    prompt_len: int
    max_len: int
    """Prompt plus the most tokens that may be generated."""
    adapter_slot: int = -1
    """Adapter slot; rows of one slot are adjacent in a plan. -1 for none."""
    compute_from: int | None = None
    """The caller needs the prompt computed from this position on, so only what is before may come from the cache.
    None: it needs nothing, or has got it."""
    siblings: "list[Sequence]" = field(default_factory=list)
    """Other samples of the same prompt, which wait until this one has computed it."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in `pages`."""
    state_slot: int | None = None
    """The slot of its recurrent state, which has seen the first `computed` tokens; None where there is none."""
    keep_at: tuple[int, ...] = ()
    """Positions at which a snapshot of that state is to be kept."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache at first start."""
    state: SequenceState = SequenceState.WAITING
    arrival: int = -1
    has_started: bool = False
    leader: "Sequence | None" = field(default=None, repr=False)
    """Whose `siblings` this one is in."""
    found: PageNode | None = field(default=None, repr=False)
    """While it waits: where the last look into the cache ended."""
    pictures: "PlacedPictures | None" = field(default=None, repr=False)
    """Those of its prompt."""
    is_mixed: bool = False
    """Whether `pages` has keys and values of older weights too, so that other sequences may not find them."""

    @property
    def cache_limit(self) -> int:
        """Tokens that may come from the cache: at least one position is left to compute, for its logits."""
        limit = len(self.tokens) - 1
        return limit if self.compute_from is None else min(limit, self.compute_from)

    @property
    def snapshot_limit(self) -> int:
        """Tokens that a snapshot may stand for. Behind the prompt states come from steps, not from chunks: what was
        generated must be computed as it was, or its numbers would depend on who else was there."""
        return min(self.cache_limit, self.prompt_len)


class SequenceChunk(Struct, frozen=True, gc=False):
    """Positions `start` to `end` (exclusive) of a sequence."""

    seq: Sequence
    start: int
    end: int


@dataclass(slots=True)
class StepPlan:
    """One step of the model. Rows are numbered through `decode` first, then `prefill`."""

    decode: list[Sequence] = field(default_factory=list)
    """Each computes the one position `seq.computed`."""
    prefill: list[SequenceChunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source page, target page), before the step writes: in this order, or all reads before all writes."""
    prefill_budget: int = 0
    """Tokens of prompts that it may have."""
    prefill_tokens: int = 0
    rows: list[SequenceChunk] = field(default_factory=list)
    """Both together, as they were planned."""
    state_moves: list[StateMove] = field(default_factory=list)
    """Copies of recurrent states before the step, in this order."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Rows that get a copy of a state after the step, by that state's slot."""


class Ready(Struct, frozen=True, gc=False):
    """The last logits of plan row `row` are the next-token distribution of each of `seqs`."""

    row: int
    seqs: list[Sequence]
