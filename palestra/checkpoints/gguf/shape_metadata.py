"""The shape of a model as metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palestra.checkpoints.gguf.families import GgufFamily, attention_interval
from palestra.model.loading.layer_spec import SLIDING, AttentionSpec, DeltaNetSpec, ExpertsSpec, RopeSpec
from palestra.model.loading.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter


def add_shape(writer: GGUFWriter, spec: ModelSpec, family: GgufFamily) -> None:
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(_context(spec, family))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.n_layers)
    if spec.experts:
        _add_experts(writer, next(iter(spec.experts.values())))
    writer.add_feed_forward_length(_feed_forward(spec))
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(_by_layer([heads.n_kv_heads for heads in spec.heads] or [spec.n_kv_heads]))
    writer.add_key_length(spec.rope.dim if family.is_gemma4 else spec.head_dim)
    writer.add_value_length(spec.rope.dim if family.is_gemma4 else spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    if spec.multipliers.logit_cap is not None:
        writer.add_final_logit_softcapping(spec.multipliers.logit_cap)
    if family.says_multipliers:
        _add_multipliers(writer, spec)
    if family.is_gemma4:
        _add_gemma4(writer, spec)
    if family.has_delta_nets:
        _add_delta_nets(writer, spec)
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


def _by_layer(numbers: list[int]) -> int | list[int]:
    """One number where all layers have the same."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _feed_forward(spec: ModelSpec) -> int | list[int]:
    """Of what has experts alone some readers ask for it, and none uses it."""
    networks = [layer.mlp.beside if isinstance(layer.mlp, ExpertsSpec) else layer.mlp for layer in spec.layers]
    sizes = [spec.dense_size(network) for network in networks if network is not None]
    return _by_layer(sizes) if sizes else next(iter(spec.experts.values())).size


def _add_gemma4(writer: GGUFWriter, spec: ModelSpec) -> None:
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    writer.add_embedding_length_per_layer_input(spec.layers[0].per_layer_input)
    writer.add_shared_kv_layers(sum(mixer.kv_source is not None for mixer in mixers))
    writer.add_key_length_swa(spec.head_dim)
    writer.add_value_length_swa(spec.head_dim)
    writer.add_rope_dimension_count_swa(spec.head_dim)


def _add_delta_nets(writer: GGUFWriter, spec: ModelSpec) -> None:
    """In the words that the format has for state spaces: groups are key heads, and time steps value heads."""
    writer.add_full_attention_interval(attention_interval(spec) or 0)
    if (net := next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaNetSpec)), None)) is None:
        return
    writer.add_ssm_conv_kernel(net.conv_kernel)
    writer.add_ssm_state_size(net.key_dim)
    writer.add_ssm_group_count(net.n_key_heads)
    writer.add_ssm_time_step_rank(net.n_value_heads)
    writer.add_ssm_inner_size(net.value_size)


def _add_experts(writer: GGUFWriter, experts: ExpertsSpec) -> None:
    writer.add_expert_count(experts.n_experts)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.size)
    if experts.shared_size:
        writer.add_expert_shared_feed_forward_length(experts.shared_size)


def _context(spec: ModelSpec, family: GgufFamily) -> int:
    """Where readers of the format know no windows, the context ends before one would hide something."""
    if spec.sliding_window is None or family.has_windows:
        return spec.max_positions
    return min(spec.sliding_window, spec.max_positions)


def _add_rope(writer: GGUFWriter, rope: RopeSpec) -> None:
    from gguf import RopeScalingType

    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.sections is not None:
        writer.add_rope_dimension_sections([*rope.sections, 0])
    if rope.type not in ("linear", "yarn"):  # llama3's scaling is a tensor of the file
        return
    writer.add_rope_scaling_type(RopeScalingType[rope.type.upper()])
    writer.add_rope_scaling_factor(rope.parameters["factor"])
    if rope.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.parameters.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.parameters.get("beta_slow") or 1.0)
