"""The layout of an adapter's row: the place of each site's matrices, by the model and the LoRA's config alone.

A site is a place in a layer where products share an input x [rows, in]: y[:, its columns] += scale * (x A^T) B^T for
each of its p parts, such as q, k and v. The numbers of an adapter are one flat row, and in it stand, site by site,

A       [n_a, p, rank, in]       the parts' A under each other, so that x A^T is one product for all of them
B       [n_b, rank, out]         of each part in turn, transposed: `matrices` shows it as [out, rank]

n_a and n_b are 1 but in sites of experts, where each expert has its own A, its own B, or both.
With tensor parallelism a rank computes with a part of the row (`LayoutPart`): where outputs are divided, it has its
columns of B and all of A; where inputs are, its columns of A and all of B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.loading.layer_spec import AttentionSpec, LatentAttentionSpec, LayerSpec, MambaSpec, MlpSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.tensor_parallel import TensorShard
from palestra.types import LoraConfig


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
SITE_ENTRIES = 4  # one A, and B matrices of up to three projections
OWN_ENTRY = 3
"""In place of a third B: what each expert has for itself where others share it, A of gate and up or B of down."""


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
        """The offsets at which each site's A and its B matrices begin, from `site_entry` on; -1 where there is none."""
        last = max(site_entry(name) for name in self.sites)
        row = np.full(last + SITE_ENTRIES, -1, np.int64)
        for name, site in self.sites.items():
            entry = site_entry(name)
            row[entry : entry + 1 + len(site.parts)] = [site.a_offset, *(p.b_offset for p in site.parts)]
            if site.experts is not None and min(site.experts) > 1:
                own = entry if name[1] == "gate_up" else entry + 1
                row[own], row[entry + OWN_ENTRY] = -1, row[own]
        return row

    @cached_property
    def has_own_matrices(self) -> bool:
        """Experts have all matrices for themselves; otherwise they share one of each two."""
        return any(site.experts is not None and min(site.experts) > 1 for site in self.sites.values())


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


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """What one of several ranks that share every layer computes of an adapter. The gradient of what is whole is a sum
    over ranks."""

    shard: TensorShard
    whole: Layout
    own: Layout

    def read(self, row: Tensor, part: Tensor) -> None:
        """Copies this rank's part of a whole row."""
        wholes, parts = self._matrices(row, part)
        for name, own in parts.items():
            own.copy_(wholes[name])

    def write(self, part: Tensor, row: Tensor) -> None:
        """Makes a row of a part, so that the rows of all ranks add up: zeros where others have numbers. What all ranks
        compute alike is the first one's."""
        row.zero_()
        wholes, parts = self._matrices(row, part)
        left_out = set() if self.shard.rank == 0 else self._undivided()
        for name, own in parts.items():
            if name not in left_out:
                wholes[name].copy_(own)

    def _matrices(self, row: Tensor, part: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the matrices of the part, and where they are in the whole row."""
        parts, wholes = self.own.matrices(part), self.whole.matrices(row)
        for name, own in parts.items():
            for axis, size in enumerate(own.shape):
                if wholes[name].shape[axis] != size:
                    wholes[name] = wholes[name].narrow(axis, self.shard.rank * size, size)
        return wholes, parts

    def _undivided(self) -> set[str]:
        """Matrices of sites that every rank computes as a whole."""
        names: set[str] = set()
        for name, own in self.own.sites.items():
            whole = self.whole.sites[name]
            if (own.in_size, own.parts[0].out_size) == (whole.in_size, whole.parts[0].out_size):
                names |= {f"{part.module}.lora_{kind}.weight" for part in own.parts for kind in "AB"}
        return names
