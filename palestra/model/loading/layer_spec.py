"""Records that describe one layer of a model; a family's entry combines them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention layers, as configs name them; each may have a rope of its own."""
UNROTATED = "none"
"""The rope of layers that know no positions."""
Activation = Literal["silu", "gelu_tanh", "relu2"]
"""What the gate of a feed-forward network goes through; with `relu2` there is no gate: relu(up x) squared."""
Router = Literal["softmax", "sigmoid"]
"""What makes weights of a router's scores. With sigmoids, a bias on each expert has a say in the choice only."""
GATE_SLOPE = 1.702  # of gpt-oss's activation: with it x sigmoid(slope x) is close to GELU


@dataclass(frozen=True, slots=True)
class RopeSpec:
    type: str
    theta: float
    dim: int
    """Dimensions of a head that are rotated: the first ones."""
    parameters: dict[str, Any]
    """The raw fields of the scaling (factor, low_freq_factor, beta_fast, …)."""
    is_wide: bool = False
    """Cosines and sines stay in float32, whatever the model's type."""
    query_beta: float = 0.0
    """Queries are multiplied by 1 + beta ln(1 + position // original length)."""
    sections: tuple[int, int, int] | None = None
    """How many pairs of dimensions turn by time, height and width, by turns. None: a position is one number."""

    @property
    def max_positions(self) -> float:
        """The length at which the frequencies end: behind it, longrope would need others for the whole sequence."""
        return self.parameters["original_max_position_embeddings"] if self.type == "longrope" else math.inf


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of attention: how many there are for queries, and for keys and values, and their width."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention."""

    window: int | None = None
    """How many tokens back a position sees; None is all of them."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "row"] | None = None
    """Queries and keys are normalised, per head or over all heads at once."""
    rope: str = FULL
    """Which of the model's ropes rotates queries and keys."""
    scale: float | None = None
    """What multiplies the scores; None: head_dim ** -0.5."""
    is_scale_in_norm: bool = False
    """The norm of queries multiplies by it, in float32, so that queries are rounded once."""
    is_fused: bool = False
    """Files have q, k and v as rows of one `qkv_proj`."""
    is_gated: bool = False
    """`q_proj` holds a gate beside each head's queries; its sigmoid multiplies what the head returns."""
    has_sinks: bool = False
    """Each head has a learned logit that takes its share of the attention and returns nothing."""
    heads: HeadShape | None = None
    """None: those of the model."""
    kv_source: int | None = None
    """The layer whose keys and values it reads; None: it has its own."""
    has_value_norm: bool = False
    """Values are normalised per head, without a factor."""
    values_are_keys: bool = False
    """There is no projection of values: they are the keys before their norm."""

    def query_factor(self, heads: HeadShape) -> float:
        """The factor of queries, since attention divides by the root of their width."""
        return 1.0 if self.scale is None else self.scale * heads.head_dim**0.5

    def projections(self, heads: HeadShape) -> list[tuple[str, int]]:
        """The projections in files of queries, keys and values, with their output sizes."""
        if self.is_fused:
            return [("qkv_proj", heads.q_size + 2 * heads.kv_size)]
        queries, keys, values = ("q_proj", heads.q_size * (1 + self.is_gated)), ("k_proj", heads.kv_size), "v_proj"
        if self.kv_source is not None:
            return [queries]
        return [queries, keys] if self.values_are_keys else [queries, keys, (values, heads.kv_size)]


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Attention whose keys and values are made of one compressed row for all heads; that row is what is cached."""

    q_rank: int | None
    """Width that queries are compressed to; None: they are not."""
    kv_rank: int
    rope_dim: int
    """Rotated dimensions of a head; those of the keys are shared by all heads."""
    nope_dim: int
    """Dimensions of a head that know no positions."""
    value_dim: int
    scale: float
    has_bias: bool = False
    """On the compressing projections and on the last one."""
    is_paired: bool = True
    """Rotated dimensions stand in pairs, and not in halves."""
    rope: str = FULL

    @property
    def row_size(self) -> int:
        """Numbers that are cached of a token: the compressed row, and the rotated part of its keys."""
        return self.kv_rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated delta net: a causal convolution, then a recurrence over a matrix per head."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    is_interleaved: bool = False
    """One projection has queries, keys, values and gates of each key head beside each other."""

    @property
    def key_size(self) -> int:
        return self.n_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.n_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.n_value_heads, self.key_dim, self.value_dim

    @property
    def output_shape(self) -> tuple[int, int]:
        return self.n_value_heads, self.value_dim

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """The inputs that the convolution of the next position still sees."""
        return self.conv_kernel - 1, self.conv_size


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2: a causal convolution, then a state space whose decay depends on the token."""

    n_heads: int
    head_dim: int
    n_groups: int
    """Heads of a group share what writes to the state (B) and what reads it (C)."""
    state_size: int
    conv_kernel: int
    has_conv_bias: bool = True

    @property
    def inner_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def in_size(self) -> int:
        """Rows of the one projection before it: gates, what is convolved, and time steps."""
        return self.inner_size + self.conv_size + self.n_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.n_heads, self.state_size, self.head_dim

    @property
    def output_shape(self) -> tuple[int, int]:
        return self.n_heads, self.head_dim

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        return self.conv_kernel - 1, self.conv_size


RecurrenceSpec = DeltaNetSpec | MambaSpec
MixerSpec = AttentionSpec | LatentAttentionSpec | RecurrenceSpec


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Dense feed-forward network."""

    activation: Activation = "silu"
    has_bias: bool = False
    is_fused: bool = False
    """Files have gate and up as rows of one `gate_up_proj`."""
    size: int | None = None
    """Width inside; None: the model's `intermediate_size`."""

    @property
    def is_gated(self) -> bool:
        return self.activation != "relu2"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Mixture of experts: a router picks some small networks for each token and weighs what they return."""

    n_experts: int
    per_token: int
    """How many experts a token visits."""
    size: int
    """Width inside of an expert."""
    normalises: bool
    """The weights of the chosen experts sum to 1; otherwise they are their shares among all experts."""
    shared_size: int = 0
    """Width of an expert that every token visits; 0: there is none."""
    is_shared_gated: bool = True
    """That expert is behind a gate of its own."""
    router: Router = "softmax"
    groups: tuple[int, int] = (1, 1)
    """Into how many groups the router divides the experts, and from how many of these a token may choose."""
    scale: float = 1.0
    """Multiplies the weights of the chosen experts."""
    has_bias: bool = False
    """Router and experts add biases."""
    limit: float | None = None
    """The activation is gpt-oss's, clamped to this; None: SwiGLU."""
    is_interleaved: bool = False
    """Files have all matrices transposed, and rows of gate and up by turns."""
    may_be_transposed: bool = False
    """Files that have two matrices for all experts may have these transposed: their shapes say it."""
    activation: Activation = "silu"
    latent_size: int | None = None
    """Width of what experts read and return, between two projections; None: that of the residual stream."""
    beside: MlpSpec | None = None
    """A dense network that works beside the experts, each of the two with norms of its own."""

    @property
    def shared_name(self) -> str:
        return "shared_expert" if self.is_shared_gated else "shared_experts"

    @property
    def is_gated(self) -> bool:
        return self.activation != "relu2"

    @property
    def n_products(self) -> int:
        """Matrices of an expert."""
        return 3 if self.is_gated else 2


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: MixerSpec | None
    """None, as `mlp` may be, where a layer has one half only."""
    mlp: MlpSpec | ExpertsSpec | None = MlpSpec()
    norms: Literal["before", "after", "around"] = "before"
    """Whether a half of the layer normalises what it reads, what it adds to the residual stream, or both."""
    per_layer_input: int = 0
    """Width of an input of its own that enters behind the layer's halves; 0: there is none."""
    has_scalar: bool = False
    """At its end the layer multiplies the residual stream by a number of its own."""

    @property
    def is_half(self) -> bool:
        return self.mixer is None or self.mlp is None

    def module(self, usual: str) -> str:
        """Returns the name in files of one of the layer's halves; the only one of a layer is its `mixer`, whatever it
        does."""
        return "mixer" if self.is_half else usual


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constants on the way through the decoder."""

    embedding: float = 1.0
    rounds_embedding: bool = False
    """That factor is rounded to the model's type before it multiplies."""
    residual: float = 1.0
    """Multiplies what each half of a layer adds."""
    logits: float = 1.0
    logit_cap: float | None = None
    """Logits x become cap tanh(x / cap)."""
