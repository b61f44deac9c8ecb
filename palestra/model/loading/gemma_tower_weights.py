"""The weights of Gemma 4's vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palestra.model.loading.gemma_tower_spec import GemmaTowerSpec
from palestra.model.loading.tower_files import TowerFiles

PREFIXES = ("model.", "")
FIRST = "vision_tower.patch_embedder.input_proj.weight"
TOWER, ENTRY = "vision_tower.", "embed_vision.embedding_projection"


@dataclass(frozen=True, slots=True)
class Clipped:
    """A linear layer, and what clamps its input and its output."""

    weight: Tensor
    bounds: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Least and most of the input, least and most of the output; None where nothing is clamped."""


@dataclass(frozen=True, slots=True)
class GemmaTowerLayer:
    attention_norm: Tensor
    q: Clipped
    k: Clipped
    v: Clipped
    o: Clipped
    q_norm: Tensor
    k_norm: Tensor
    attention_out_norm: Tensor
    mlp_norm: Tensor
    gate: Clipped
    up: Clipped
    down: Clipped
    mlp_out_norm: Tensor


@dataclass(frozen=True, slots=True)
class GemmaTowerWeights:
    patches: Tensor
    """From the pixels of a patch to its row."""
    positions: Tensor
    """[2, table_size, hidden]: of columns, and of rows."""
    layers: list[GemmaTowerLayer]
    standard: tuple[Tensor, Tensor] | None
    """What is subtracted from pooled features, and what multiplies them then."""
    entry: Tensor
    """From pooled features to rows of the text model."""


class GemmaTowerReader:
    def __init__(self, files: TowerFiles, spec: GemmaTowerSpec):
        self.files, self.spec = files, spec

    def tower(self) -> GemmaTowerWeights:
        spec, hidden = self.spec, self.spec.hidden_size
        names = ("std_bias", "std_scale") if spec.is_standardised else ()
        standard = [self.get(name, hidden) for name in names]
        return GemmaTowerWeights(
            patches=self.get("patch_embedder.input_proj.weight", hidden, spec.patch_size),
            positions=self.get("patch_embedder.position_embedding_table", 2, spec.table_size, hidden),
            layers=[self.layer(f"encoder.layers.{n}") for n in range(spec.n_layers)],
            standard=(standard[0], standard[1]) if standard else None,
            entry=self.files.get(f"{ENTRY}.weight", spec.out_size, hidden),
        )

    def layer(self, name: str) -> GemmaTowerLayer:
        spec, hidden, inner = self.spec, self.spec.hidden_size, self.spec.inner_size
        queries, keys = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        return GemmaTowerLayer(
            attention_norm=self.get(f"{name}.input_layernorm.weight", hidden),
            q=self.clipped(f"{name}.self_attn.q_proj", queries, hidden),
            k=self.clipped(f"{name}.self_attn.k_proj", keys, hidden),
            v=self.clipped(f"{name}.self_attn.v_proj", keys, hidden),
            o=self.clipped(f"{name}.self_attn.o_proj", hidden, queries),
            q_norm=self.get(f"{name}.self_attn.q_norm.weight", spec.head_dim),
            k_norm=self.get(f"{name}.self_attn.k_norm.weight", spec.head_dim),
            attention_out_norm=self.get(f"{name}.post_attention_layernorm.weight", hidden),
            mlp_norm=self.get(f"{name}.pre_feedforward_layernorm.weight", hidden),
            gate=self.clipped(f"{name}.mlp.gate_proj", inner, hidden),
            up=self.clipped(f"{name}.mlp.up_proj", inner, hidden),
            down=self.clipped(f"{name}.mlp.down_proj", hidden, inner),
            mlp_out_norm=self.get(f"{name}.post_feedforward_layernorm.weight", hidden),
        )

    def clipped(self, name: str, *shape: int) -> Clipped:
        weight = self.get(f"{name}.linear.weight", *shape)
        if not self.spec.is_clipped:
            return Clipped(weight, None)
        low_in, high_in, low_out, high_out = (
            self.get(f"{name}.{side}_{end}") for side in ("input", "output") for end in ("min", "max")
        )
        return Clipped(weight, (low_in, high_in, low_out, high_out))

    def get(self, name: str, *shape: int) -> Tensor:
        return self.files.get(TOWER + name, *shape)
