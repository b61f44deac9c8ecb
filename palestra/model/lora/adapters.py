"""LoRA adapters: where their numbers live, how they come and go.

An adapter is one flat row. Rows of the same layout (rank, alpha, what is trained) are stacked, so that a batch of
adapters is one batched product, a step is one pass over rows, and a copy is one memory copy. Stacks grow with the
adapters in use.

Weights change only between `pool.before_change(a)` and `pool.after_change(a)`: the first gives live snapshots their own
copy, the second renews `weights_id`, which keys the prefix cache. Without them a sampler reads stale pages.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from msgspec import structs
from torch import Tensor

from palestra.model.errors import AdapterError
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.tensor_parallel import WHOLE, TensorShard
from palestra.model.lora.layout import Layout, LayoutPart, SiteName
from palestra.types import LoraConfig

Rows = Literal["weights", "compute", "grads", "partial", "exp_avg", "exp_avg_sq"]
"""What there is of an adapter. `compute` is what products read, and `partial` the gradient that they add to: where
ranks share every layer, both are this rank's part, and all others are whole at every rank. Elsewhere `partial` is
`grads`."""


LARGE_ROW = 64 << 20  # numbers; 256 MB. Most adapters of dense models are smaller, those of experts larger


class Stack:
    """The rows of all adapters of one layout. Gradients and moments exist once an adapter is trained."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, part: LayoutPart | None = None):
        self.layout, self.part, self.dtype, self.device = layout, part, dtype, device
        self.own_layout = layout if part is None else part.own
        """Where products find what they read and write: `compute` and `partial` rows."""
        self.capacity = 0
        self.pins = 0
        """Passes between their forward and backward: slots must stay where they are."""
        self.moves = 0
        """How often rows got another place in memory."""
        self._rows: dict[Rows, Tensor] = {}
        self._refs: list[int] = []
        self._views: dict[tuple[Rows, SiteName, int], Tensor] = {}
        self._picked: dict[tuple[SiteName, int], Tensor] = {}
        self._picked_for: tuple[int, ...] = ()

    def take_slot(self) -> int:
        try:
            slot = self._refs.index(0)
        except ValueError:
            slot = self.capacity
            self._grow(self.capacity + max(1, self.capacity // 2))
        self._refs[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        self._refs[slot] -= 1

    @property
    def can_take(self) -> bool:
        """Whether one more row belongs here. A large one gets a stack of its own: to grow one would copy it."""
        return self.layout.size < LARGE_ROW or not any(self._refs)

    @property
    def size_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    @property
    def is_sparse(self) -> bool:
        return sum(r > 0 for r in self._refs) * 2 <= self.capacity

    @torch.inference_mode(False)  # a request may end, and free its snapshot, inside a sampler's step
    def compact(self) -> dict[int, int]:
        """Gives back the memory of unused slots; tells where each used one went."""
        used = [slot for slot, refs in enumerate(self._refs) if refs]
        index = torch.tensor(used, dtype=torch.int64, device=self.device)
        self._rows = {kind: rows.index_select(0, index) for kind, rows in self._rows.items()} if used else {}
        self._refs = [self._refs[slot] for slot in used]
        self.capacity = len(used)
        self.moves += 1
        self._views.clear()
        self._picked.clear()
        return {old: new for new, old in enumerate(used)}

    @torch.inference_mode(False)
    def rows(self, kind: Rows) -> Tensor:
        """[capacity, size]; gradient and moment rows start as zeros."""
        if self.part is None and kind == "partial":
            kind = "grads"
        if self.part is None and kind == "compute" and self.dtype == torch.float32:
            kind = "weights"
        if kind not in self._rows:
            dtype = self.dtype if kind == "compute" else torch.float32
            size = self.own_layout.size if kind in ("compute", "partial") else self.layout.size
            self._rows[kind] = torch.zeros(self.capacity, size, dtype=dtype, device=self.device)
        return self._rows[kind]

    def has(self, kind: Rows) -> bool:
        return kind in self._rows

    def a(self, kind: Rows, name: SiteName) -> Tensor:
        """[capacity, parts * rank, in]: the stacked A matrices of a site. Sites of experts: [capacity, n_a, …]."""
        site = self.own_layout.sites[name]
        shape = (len(site.parts) * self.layout.rank, site.in_size)
        return self._view(kind, name, -1, site.a_offset, shape if site.experts is None else (site.n_a, *shape))

    def b(self, kind: Rows, name: SiteName, part: int) -> Tensor:
        """[capacity, rank, out]: B transposed, which its gradient and the products with it like better on a CPU. Sites
        of experts: [capacity, n_b, rank, out]."""
        site = self.own_layout.sites[name]
        p = site.parts[part]
        shape = (self.layout.rank, p.out_size)
        return self._view(kind, name, part, p.b_offset, shape if site.experts is None else (site.n_b, *shape))

    def changed(self, slot: int) -> None:
        """The float32 weights of a slot were written: bring the compute copy along."""
        if self.part is not None:
            self.part.read(self.rows("weights")[slot], self.rows("compute")[slot])
        elif self.dtype != torch.float32:
            self.rows("compute")[slot].copy_(self.rows("weights")[slot])
        self._picked.clear()

    def collect_gradient(self, slot: int) -> None:
        """Moves what products have added to a slot's partial gradient to its gradient, which other ranks add theirs
        to."""
        if self.part is not None:
            partial = self.rows("partial")[slot]
            self.part.write(partial, self.rows("grads")[slot])
            partial.zero_()

    def picked(self, name: SiteName, part: int, slots: tuple[int, ...], index: Tensor) -> Tensor:
        """Compute matrices of scattered slots (part -1: A), gathered once while the weights and the batch stay."""
        if self._picked_for != slots:
            self._picked.clear()
            self._picked_for = slots
        key = (name, part)
        if key not in self._picked:
            whole = self.a("compute", name) if part < 0 else self.b("compute", name, part)
            self._picked[key] = whole.index_select(0, index)
        return self._picked[key]

    def _view(self, kind: Rows, name: SiteName, part: int, offset: int, shape: tuple[int, ...]) -> Tensor:
        key = (kind, name, part)
        if key not in self._views:
            end = offset + math.prod(shape)
            self._views[key] = self.rows(kind)[:, offset:end].view(self.capacity, *shape)
        return self._views[key]

    @torch.inference_mode(False)
    def _grow(self, capacity: int) -> None:
        self._refs += [0] * (capacity - self.capacity)
        self._views.clear()
        self._picked.clear()
        for kind, old in self._rows.items():
            self._rows[kind] = torch.zeros(capacity, old.shape[1], dtype=old.dtype, device=self.device)
            self._rows[kind][: len(old)] = old
        self.capacity = capacity
        self.moves += 1


@dataclass(eq=False, slots=True)
class Adapter:
    """A handle. `weights_id` names the very numbers: equal ids, equal weights."""

    uid: int
    config: LoraConfig
    stack: Stack
    slot: int
    weights_id: int
    frozen: bool = False
    """Snapshots sample; they are never trained."""
    steps: int = 0
    """Optimizer steps taken: Adam's bias correction counts them."""
    has_gradient: bool = False
    unfinished: int = 0
    """Forward passes whose backward has not ended: until then what is accumulated is not a gradient."""
    epoch: int = 0
    """Counts discarded gradients: a pass begun before one has nothing to add to."""
    freed: bool = False
    original: Adapter | None = None
    """The adapter whose slot a snapshot still reads."""
    aliases: list[Adapter] = field(default_factory=list)
    """Snapshots that still read this adapter's own slot."""

    def row(self, kind: Rows) -> Tensor:
        if self.freed:
            raise AdapterError(f"adapter {self.uid} was freed; create it again")
        return self.stack.rows(kind)[self.slot]


class AdapterPool:
    """All adapters of one base model."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_rank: int = 256,
        shard: TensorShard = WHOLE,
    ):
        """`shard`: what this process computes of them, where several share every layer."""
        self.spec, self.dtype, self.device, self.max_rank = spec, dtype, torch.device(device), max_rank
        self.shard, self._own_spec = shard, shard.spec(spec)
        self._stacks: dict[tuple[LoraConfig, bool], list[Stack]] = {}
        self._adapters: dict[int, Adapter] = {}
        self._uids = itertools.count()
        self._weights_ids = itertools.count(1)  # 0 is the base model

    def create(self, config: LoraConfig | None = None) -> Adapter:
        """A fresh adapter with PEFT's default start: A uniform, B zero, so it changes nothing yet."""
        config = config or LoraConfig()
        self.check(config)
        adapter = self._place(config, frozen=False, weights_id=next(self._weights_ids))
        self.clear_training_state(adapter)  # the slot may have had another owner
        _initialise(adapter)
        adapter.stack.changed(adapter.slot)
        return adapter

    def snapshot(self, adapter: Adapter) -> Adapter:
        """Today's weights, frozen. Costs nothing until the original changes: then they are copied once."""
        self.require(adapter)
        adapter.stack.share(adapter.slot)
        twin = self._register(adapter.config, adapter.stack, adapter.slot, adapter.weights_id, frozen=True)
        twin.original = adapter.original if adapter.frozen else adapter
        if twin.original is not None:
            twin.original.aliases.append(twin)
        return twin

    def freeze(self, config: LoraConfig, row: Tensor) -> Adapter:
        """A snapshot from stored weights."""
        self.check(config)
        size = Layout.of(self.spec, config).size
        if row.shape != (size,):
            raise AdapterError(f"stored weights have shape {list(row.shape)}, this model needs [{size}]")
        adapter = self._place(config, frozen=True, weights_id=next(self._weights_ids))
        adapter.row("weights").copy_(row)
        adapter.stack.changed(adapter.slot)
        return adapter

    def detach(self, adapter: Adapter, *, moments: bool = False) -> Adapter:
        """A copy in main memory and outside the pool: other threads may read it while the pool moves its rows."""
        self.require(adapter)
        stack = Stack(adapter.stack.layout, torch.float32, torch.device("cpu"))
        copy = Adapter(adapter.uid, adapter.config, stack, stack.take_slot(), adapter.weights_id, adapter.frozen)
        copy.steps = adapter.steps
        kinds: tuple[Rows, ...] = ("weights", "exp_avg", "exp_avg_sq") if moments else ("weights",)
        for kind in kinds:
            if adapter.stack.has(kind):
                copy.row(kind).copy_(adapter.row(kind))
        return copy

    def before_change(self, adapter: Adapter) -> None:
        """Call before writing an adapter's weights: snapshots that read them get their own copy."""
        self.require(adapter)
        if adapter.frozen:
            raise AdapterError("this adapter is a snapshot for sampling and cannot change; train the original")
        if adapter.aliases:
            copy = self._place(adapter.config, frozen=True, weights_id=adapter.weights_id)
            copy.row("weights").copy_(adapter.row("weights"))
            copy.stack.changed(copy.slot)
            for alias in adapter.aliases:
                copy.stack.share(copy.slot)
                adapter.stack.release(adapter.slot)  # the adapter itself still holds it
                alias.stack, alias.slot, alias.original = copy.stack, copy.slot, None
            adapter.aliases.clear()
            self.free(copy)

    def after_change(self, adapter: Adapter) -> None:
        adapter.weights_id = next(self._weights_ids)
        adapter.stack.changed(adapter.slot)

    def free(self, adapter: Adapter) -> None:
        self.require(adapter)
        adapter.freed = True
        if adapter.original is not None:
            adapter.original.aliases.remove(adapter)
        for alias in adapter.aliases:
            alias.original = None
        del self._adapters[adapter.uid]
        adapter.stack.release(adapter.slot)
        self._tidy(adapter.stack)

    def clear_training_state(self, adapter: Adapter) -> None:
        """Fresh optimizer, no gradient."""
        for kind in ("exp_avg", "exp_avg_sq"):
            if adapter.stack.has(kind):
                adapter.row(kind).zero_()
        adapter.steps = 0
        self.discard_gradient(adapter)

    def discard_gradient(self, adapter: Adapter) -> None:
        for kind in ("grads", "partial"):
            if adapter.stack.has(kind):
                adapter.row(kind).zero_()
        adapter.has_gradient, adapter.unfinished, adapter.epoch = False, 0, adapter.epoch + 1

    def pin(self, adapter: Adapter) -> tuple[Stack, int]:
        """Keeps a slot in place and out of other hands, even if its adapter is freed; `unpin` ends it."""
        adapter.stack.share(adapter.slot)
        adapter.stack.pins += 1
        return adapter.stack, adapter.slot

    def unpin(self, stack: Stack, slot: int) -> None:
        stack.pins -= 1
        stack.release(slot)
        self._tidy(stack)

    def require(self, adapter: Adapter) -> None:
        if adapter.freed:
            raise AdapterError(f"adapter {adapter.uid} was freed; create it again")

    @property
    def size_bytes(self) -> int:
        return sum(s.size_bytes for stacks in self._stacks.values() for s in stacks)

    def _place(self, config: LoraConfig, *, frozen: bool, weights_id: int) -> Adapter:
        # Trained and frozen rows live apart: frozen ones carry no gradients and moments.
        stacks = self._stacks.setdefault((structs.replace(config, seed=None), frozen), [])
        stack = next((s for s in stacks if s.can_take), None)
        if stack is None:
            layout, part = Layout.of(self.spec, config), None
            if self.shard.ranks > 1:
                part = LayoutPart(self.shard, layout, Layout.of(self._own_spec, config))
            stack = Stack(layout, self.dtype, self.device, part)
            stacks.append(stack)
        return self._register(config, stack, stack.take_slot(), weights_id, frozen)

    def _register(self, config: LoraConfig, stack: Stack, slot: int, weights_id: int, frozen: bool) -> Adapter:
        adapter = Adapter(next(self._uids), config, stack, slot, weights_id, frozen)
        self._adapters[adapter.uid] = adapter
        return adapter

    def _tidy(self, stack: Stack) -> None:
        """Closes the gaps when half of a stack is unused, unless a backward pass still counts on its slots."""
        if stack.pins or not stack.is_sparse:
            return
        moved = stack.compact()
        for adapter in self._adapters.values():
            if adapter.stack is stack:
                adapter.slot = moved[adapter.slot]

    def check(self, config: LoraConfig) -> None:
        if not 1 <= config.rank <= self.max_rank:
            raise AdapterError(f"LoRA rank {config.rank} is outside 1..{self.max_rank} (the configured maximum)")
        if not (config.train_attn or config.train_mlp or config.train_unembed):
            raise AdapterError("nothing to train: set at least one of train_attn, train_mlp, train_unembed")
        if not (config.alpha > 0 and math.isfinite(config.alpha)):
            raise AdapterError(f"LoRA alpha is {config.alpha}; it must be a number above 0")
        if config.seed is not None and not -(1 << 63) <= config.seed < 1 << 64:
            raise AdapterError(f"LoRA seed {config.seed} does not fit into 64 bits")


def _initialise(adapter: Adapter) -> None:
    """PEFT's default: A uniform in +-1/sqrt(in), B zero. Drawn on the CPU: the same numbers on every device."""
    generator = torch.Generator()
    if adapter.config.seed is None:
        generator.seed()
    else:
        generator.manual_seed(adapter.config.seed)
    row, rank = adapter.row("weights").zero_(), adapter.stack.layout.rank
    for site in adapter.stack.layout.sites.values():
        n, bound = site.n_a * len(site.parts) * rank * site.in_size, site.in_size**-0.5
        row[site.a_offset : site.a_offset + n].copy_(torch.empty(n).uniform_(-bound, bound, generator=generator))
