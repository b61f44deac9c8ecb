"""What one layer of a model is: records that a family's entry combines.

Owns: the shapes and options of each mechanism. Never touches: config files, weights, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GATE_SLOPE = 1.702  # of gpt-oss's activation: with it x sigmoid(slope x) is close to GELU


@dataclass(frozen=True, slots=True)
class RopeSpec:
    type: str
    theta: float
    dim: int
    """Dimensions of a head that are rotated: the first ones."""
    parameters: dict[str, Any]
    """The raw fields of the scaling (factor, low_freq_factor, beta_fast, …)."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention; its heads are the model's."""

    window: int | None = None
    """How many tokens back a position sees; None is all of them."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    is_gated: bool = False
    """`q_proj` holds a gate beside each head's queries; its sigmoid multiplies what the head returns."""
    has_sinks: bool = False
    """Each head has a learned logit that takes its share of the attention and returns nothing."""


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
    def conv_state_shape(self) -> tuple[int, int]:
        """The inputs that the convolution of the next position still sees."""
        return self.conv_kernel - 1, self.conv_size


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Dense SwiGLU."""

    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Mixture of experts: a router picks some SwiGLUs for each token and weighs what they return."""

    n_experts: int
    per_token: int
    """How many experts a token visits."""
    size: int
    """Width inside of an expert."""
    normalises: bool
    """The weights of the chosen experts sum to 1; otherwise they are their shares among all experts."""
    shared_size: int = 0
    """Width of an expert that every token visits, behind a gate of its own; 0: there is none."""
    has_bias: bool = False
    """Router and experts add biases."""
    limit: float | None = None
    """The activation is gpt-oss's, clamped to this; None: SwiGLU."""
    is_interleaved: bool = False
    """Files have all matrices transposed, and rows of gate and up by turns."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: AttentionSpec | DeltaNetSpec
    mlp: MlpSpec | ExpertsSpec = MlpSpec()
