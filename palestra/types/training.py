"""Training requests: data, losses, optimizer parameters. Plain records, no tensors."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from msgspec import Struct

LOGPROB_ROUNDING = 2e-5
"""Log-probabilities closer than this are equal: float32 passes over other batches were seen 4e-6 apart."""


class TextChunk(Struct, frozen=True, tag="text"):
    """A run of token ids in a prompt."""

    tokens: tuple[int, ...]


class ImageChunk(Struct, frozen=True, tag="image"):
    """A picture in a prompt; it stands for as many positions as it has rows for the text model. The picture itself is
    sent once beside the data."""

    digest: str


class TensorData(Struct, frozen=True, kw_only=True):
    """A small array on the wire: little-endian, row-major; sparse rows (CSR) when the indices are given."""

    data: bytes
    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...]
    crow_indices: bytes | None = None
    """int64, rows + 1; unlisted cells are 0."""
    col_indices: bytes | None = None
    """int64, one per value."""


class RoutedExperts(Struct, frozen=True, kw_only=True):
    """The experts that each position of a sequence visited, in the order in which the router named them."""

    data: bytes
    """Unsigned little-endian ids of `routed_bytes` each; a position whose bits are all set was not recorded."""
    shape: tuple[int, int, int]
    """Positions, layers with experts, experts per token."""


def routed_bytes(n_experts: int) -> int:
    """Bytes of an id in `RoutedExperts`; 255 and 65535 are not ids."""
    return 1 if n_experts <= 255 else 2


class Datum(Struct, frozen=True, kw_only=True):
    """One training example: a prompt as chunks, and what the loss needs for each position."""

    chunks: tuple[TextChunk | ImageChunk, ...]
    loss_inputs: dict[str, TensorData]
    """Inputs of the loss; position i is about predicting token i + 1."""
    routing: RoutedExperts | None = None
    """The experts that its tokens have to visit, as recorded while they were sampled. None: the router chooses."""

    @classmethod
    def of_tokens(cls, tokens: list[int] | tuple[int, ...], **loss_inputs: TensorData) -> Datum:
        return cls(chunks=(TextChunk(tuple(tokens)),), loss_inputs=loss_inputs)


class LossName(StrEnum):
    """The losses of `forward_backward`, as Tinker names them."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"


Checkpointing = bool | Literal["offload"]
"""Whether activations are computed again in the backward pass; `offload`: what is kept for that waits in the host's
memory."""


class LoraConfig(Struct, frozen=True, kw_only=True):
    """What a LoRA adapter is made with: rank, scale, seed, and which layers it changes."""

    rank: int = 32
    alpha: float = 32.0
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    per_expert: bool = False
    """Every expert of a mixture has an A and a B of its own, as PEFT lays them out. Otherwise, as in Tinker, gate and
    up have one A for all experts, and down has one B."""


class AdamParams(Struct, frozen=True, kw_only=True):
    """AdamW for one step; the defaults are Tinker's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Global norm over the adapter; 0 or less is off."""
