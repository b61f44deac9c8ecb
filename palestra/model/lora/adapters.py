"""LoRA adapters: where their numbers live, how they come and go.

An adapter is one flat row. Rows of the same layout (rank, alpha, what is trained) are stacked, so that a batch of
adapters is one batched product, a step is one pass over rows, and a copy is one memory copy. Stacks grow with the
adapters in use. Owns: creation, snapshots, freeing. Never touches: batches, losses, files.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.errors import AdapterError
from palestra.model.loading.layer_spec import AttentionSpec, LatentAttentionSpec, LayerSpec, MambaSpec, MlpSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.tensor_share import WHOLE, TensorShare
from palestra.model.lora.layout_part import LayoutPart
from palestra.types import LoraConfig

Rows = Literal["weights", "compute", "grads", "partial", "exp_avg", "exp_avg_sq"]
"""What there is of an adapter. `compute` is what products read, and `partial` the gradient that they add to: where
ranks share every layer, both are this rank's part, and all others are whole at every rank. Elsewhere `partial` is
`grads`."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection inside a site: its B matrix and the columns of the site's output it adds to."""

    module: str
    """As Hugging Face names it: "self_attn.q_proj", "lm_head", …"""
    b_offset: int
    out_start: int
    out_size: int


@dataclass(frozen=True, slots=True)
class Site:
    """Projections that share an input, and so one stacked A: q, k, v together; gate and up together."""

    a_offset: int
    in_size: int
    parts: tuple[Projection, ...]
    experts: tuple[int, int] | None = None
    """How many A, and how many B of each part, a site of experts has: 1 for all of them, or one each."""

    @property
    def n_a(self) -> int:
        return 1 if self.experts is None else self.experts[0]

    @property
    def n_b(self) -> int:
        return 1 if self.experts is None else self.experts[1]


SiteName = tuple[int, str]
"""(layer, one of SITE_KINDS), or UNEMBED."""
UNEMBED: SiteName = (-1, "unembed")
SITE_KINDS = (
    *("qkv", "o", "gate_up", "down", "z", "shared_gate_up", "shared_down", "q_up"),
    *("latent_in", "latent_out"),
)
LARGE_ROW = 64 << 20  # numbers; 256 MB. Most adapters of dense models are smaller, those of experts larger
SITE_ENTRIES = 4  # one A, and B matrices of up to three projections


def site_entry(name: SiteName) -> int:
    """Column of a site in tables that have one row for each layout: the same for every layout of a model."""
    layer, kind = name
    return 0 if name == UNEMBED else (1 + layer * len(SITE_KINDS) + SITE_KINDS.index(kind)) * SITE_ENTRIES


@dataclass(frozen=True)
class Layout:
    """Where each matrix of an adapter stands in its flat row."""

    rank: int
    scale: float
    sites: dict[SiteName, Site]
    size: int
    is_interleaved: bool = False
    """The base's files have experts' matrices transposed, and rows of gate and up by turns."""
    are_experts_gated: bool = True
    mamba_tail: int = 0
    """Rows of a Mamba's one projection behind those that are trained."""

    @classmethod
    def of(cls, spec: ModelSpec, config: LoraConfig) -> Layout:
        sites: dict[SiteName, Site] = {}
        offset = 0
        for name, in_size, outputs, experts in _sites(spec, config):
            n_a, n_b = experts or (1, 1)
            a_offset, offset = offset, offset + n_a * len(outputs) * config.rank * in_size
            parts, out_start = [], 0
            for module, out_size in outputs:
                parts.append(Projection(module, offset, out_start, out_size))
                offset += n_b * out_size * config.rank
                out_start += out_size
            sites[name] = Site(a_offset, in_size, tuple(parts), experts)
        is_interleaved = any(experts.is_interleaved for experts in spec.experts.values())
        are_gated = all(experts.is_gated for experts in spec.experts.values())
        tail = next((mamba.in_size - 2 * mamba.inner_size for mamba in spec.mambas.values()), 0)
        return cls(config.rank, config.alpha / config.rank, sites, offset, is_interleaved, are_gated, tail)

    def matrices(self, row: Tensor) -> dict[str, Tensor]:
        """Every A and B under its Hugging Face module name, as views of a flat row: [rank, in] and [out, rank], with
        an axis before them where the module is one of experts."""
        found, rank = {}, self.rank
        for site in self.sites.values():
            axis = () if site.experts is None else (-1,)
            n, size = len(site.parts), site.n_a * len(site.parts) * rank * site.in_size
            stacked = row[site.a_offset : site.a_offset + size].view(*axis, n, rank, site.in_size)
            for i, part in enumerate(site.parts):
                b = row[part.b_offset : part.b_offset + site.n_b * part.out_size * rank]
                found[f"{part.module}.lora_A.weight"] = stacked.select(-3, i)
                found[f"{part.module}.lora_B.weight"] = b.view(*axis, rank, part.out_size).mT
        return found

    @cached_property
    def offset_row(self) -> NDArray[np.int64]:
        """Where each site's A and its B matrices begin, from `site_entry` on; -1 where there is none."""
        last = max(site_entry(name) for name in self.sites)
        row = np.full(last + SITE_ENTRIES, -1, np.int64)
        for name, site in self.sites.items():
            entry = site_entry(name)
            row[entry : entry + 1 + len(site.parts)] = [site.a_offset, *(p.b_offset for p in site.parts)]
        return row


Outputs = list[tuple[str, int]]
"""Modules as the files name them, with their output sizes."""


SiteShape = tuple[SiteName, int, Outputs, tuple[int, int] | None]
"""A site's name, input size, outputs, and `experts`."""


def _sites(spec: ModelSpec, config: LoraConfig) -> list[SiteShape]:
    found: list[SiteShape] = []
    for n, layer in enumerate(spec.layers):
        if config.train_attn:
            found += [((n, kind), size, outputs, None) for kind, size, outputs in _mixer_sites(spec, n, layer)]
        if config.train_mlp:
            found += _mlp_sites(spec, n, layer, config)
    if config.train_unembed:
        found.append((UNEMBED, spec.hidden_size, [("lm_head", spec.vocab_size)], None))
    return found


def _mlp_sites(spec: ModelSpec, n: int, layer: LayerSpec, config: LoraConfig) -> list[SiteShape]:
    """Routers and the gate of a shared expert are not trained. Experts have Tinker's names: w1 is gate, w3 is up, w2 is
    down; without a gate, w1 is up."""
    h, name, mlp = spec.hidden_size, f"model.layers.{n}.{layer.module('mlp')}", layer.mlp
    if mlp is None:
        return []
    if isinstance(mlp, MlpSpec):
        return _dense_sites(n, "", name, h, spec.dense_size(mlp), mlp)
    every, i, width, dense = mlp.n_experts, mlp.size, mlp.latent_size or h, []
    if mlp.beside is not None:  # its experts stand beside its dense network, in files too
        dense = _dense_sites(n, "shared_", name, h, spec.dense_size(mlp.beside), mlp.beside)
        name = f"model.layers.{n}"
    elif mlp.shared_size:
        shared = MlpSpec(activation=mlp.activation)
        dense = _dense_sites(n, "shared_", f"{name}.{mlp.shared_name}", h, mlp.shared_size, shared)
    a_of_up, b_of_down = (every, every) if config.per_expert else (1, 1)
    gate_up = [(f"{name}.experts.{w}", i) for w in (("w1", "w3") if mlp.is_gated else ("w1",))]
    latents = []
    if mlp.latent_size is not None:
        latents = [
            ((n, "latent_in"), h, [(f"{name}.fc1_latent_proj", width)], None),
            ((n, "latent_out"), width, [(f"{name}.fc2_latent_proj", h)], None),
        ]
    return [
        ((n, "gate_up"), width, gate_up, (a_of_up, every)),
        ((n, "down"), i, [(f"{name}.experts.w2", width)], (every, b_of_down)),
        *latents,
        *dense,
    ]


def _dense_sites(n: int, kind: str, name: str, h: int, i: int, mlp: MlpSpec) -> list[SiteShape]:
    gate_up = [(f"{name}.gate_proj", i), (f"{name}.up_proj", i)]
    if not mlp.is_gated:
        gate_up = [(f"{name}.up_proj", i)]
    elif mlp.is_fused:
        gate_up = [(f"{name}.gate_up_proj", 2 * i)]
    return [((n, f"{kind}gate_up"), h, gate_up, None), ((n, f"{kind}down"), i, [(f"{name}.down_proj", h)], None)]


def _mixer_sites(spec: ModelSpec, n: int, layer: LayerSpec) -> list[tuple[str, int, Outputs]]:
    """Kind, input size and outputs of each. Decays and betas of a delta net are not trained, nor is what a Mamba writes
    to its state and reads it with."""
    mixer, h = layer.mixer, spec.hidden_size
    if mixer is None:
        return []
    if isinstance(mixer, MambaSpec):
        name, inner = f"model.layers.{n}.{layer.module('mamba')}", mixer.inner_size
        gate_x = [(f"{name}.gate_proj", inner), (f"{name}.x_proj", inner)]
        return [("qkv", h, gate_x), ("o", inner, [(f"{name}.out_proj", h)])]
    if isinstance(mixer, AttentionSpec):
        name = f"model.layers.{n}.{layer.module('self_attn')}"
        qkv = [(f"{name}.{part}", size) for part, size in mixer.projections(spec.heads[n])]
        return [("qkv", h, qkv), ("o", spec.heads[n].q_size, [(f"{name}.o_proj", h)])]
    if isinstance(mixer, LatentAttentionSpec):
        name = f"model.layers.{n}.self_attn"
        q_a = (
            (f"{name}.q_proj", spec.n_heads * mixer.qk_dim)
            if mixer.q_rank is None
            else (f"{name}.q_a_proj", mixer.q_rank)
        )
        compress = [q_a, (f"{name}.kv_a_proj_with_mqa", mixer.row_size)]
        return [("qkv", h, compress), ("o", spec.n_heads * mixer.value_dim, [(f"{name}.o_proj", h)])]
    name, keys, values = f"model.layers.{n}.linear_attn", mixer.key_size, mixer.value_size
    if mixer.is_interleaved:
        joined = [(f"{name}.in_proj_qkvz", mixer.conv_size + values)]
        return [("qkv", h, joined), ("o", values, [(f"{name}.out_proj", h)])]
    qkv = [(f"{name}.in_proj_q", keys), (f"{name}.in_proj_k", keys), (f"{name}.in_proj_v", values)]
    return [("qkv", h, qkv), ("z", h, [(f"{name}.in_proj_z", values)]), ("o", values, [(f"{name}.out_proj", h)])]


class Stack:
    """The rows of all adapters of one layout. Gradients and moments exist once somebody trains."""

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
        share: TensorShare = WHOLE,
    ):
        """`share`: what this process computes of them, where several share every layer."""
        self.spec, self.dtype, self.device, self.max_rank = spec, dtype, torch.device(device), max_rank
        self.share, self._own_spec = share, share.spec(spec)
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
            if self.share.ranks > 1:
                part = LayoutPart(self.share, layout, Layout.of(self._own_spec, config))
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
