"""The shape of a model as metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.model.loading.layer_spec import SLIDING, AttentionSpec, ExpertsSpec, RopeSpec
from palestra.model.loading.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter


def add_shape(writer: GGUFWriter, spec: ModelSpec, family: GgufFamily) -> None:
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(_context(spec, family))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.n_layers)
    if family.has_experts:
        _add_experts(writer, next(iter(spec.experts.values())))
    else:
        writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    if spec.multipliers.logit_cap is not None:
        writer.add_final_logit_softcapping(spec.multipliers.logit_cap)
    if family.says_multipliers:
        _add_multipliers(writer, spec)
    _add_rope(writer, spec.rope)
    if spec.sliding_window is not None and family.has_windows:
        writer.add_sliding_window(spec.sliding_window)
        writer.add_sliding_window_pattern([one is not None for one in spec.windows])
        if SLIDING in spec.ropes:
            writer.add_rope_freq_base_swa(spec.ropes[SLIDING].theta)


def _add_multipliers(writer: GGUFWriter, spec: ModelSpec) -> None:
    mixer = spec.layers[0].mixer
    if isinstance(mixer, AttentionSpec) and mixer.scale is not None:
        writer.add_attention_scale(mixer.scale)
    writer.add_embedding_scale(spec.multipliers.embedding)
    writer.add_residual_scale(spec.multipliers.residual)
    writer.add_logit_scale(1 / spec.multipliers.logits)  # by which readers divide


def _add_experts(writer: GGUFWriter, experts: ExpertsSpec) -> None:
    writer.add_feed_forward_length(experts.size)  # which some readers ask for, and none uses
    writer.add_expert_count(experts.n_experts)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.size)


def _context(spec: ModelSpec, family: GgufFamily) -> int:
    """Where readers of the format know no windows, the context ends before one would hide something."""
    if spec.sliding_window is None or family.has_windows:
        return spec.max_positions
    return min(spec.sliding_window, spec.max_positions)


def _add_rope(writer: GGUFWriter, rope: RopeSpec) -> None:
    from gguf import RopeScalingType

    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.type not in ("linear", "yarn"):  # llama3's scaling is a tensor of the file
        return
    writer.add_rope_scaling_type(RopeScalingType[rope.type.upper()])
    writer.add_rope_scaling_factor(rope.parameters["factor"])
    if rope.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.parameters.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.parameters.get("beta_slow") or 1.0)
