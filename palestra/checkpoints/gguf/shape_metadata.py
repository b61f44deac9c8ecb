"""The shape of a model as metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.checkpoints.gguf.readability import attention_interval
from palestra.model.attention.rope import Rotary
from palestra.model.loading.layer_spec import (
    SLIDING,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    MambaSpec,
    RopeSpec,
)
from palestra.model.loading.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter


def add_shape(writer: GGUFWriter, spec: ModelSpec, family: GgufFamily) -> None:
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(_context(spec, family))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(_feed_forward(spec))
    writer.add_head_count(spec.n_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    if spec.multipliers.logit_cap is not None:
        writer.add_final_logit_softcapping(spec.multipliers.logit_cap)
    if family.says_multipliers:
        _add_multipliers(writer, spec)
    if spec.experts:
        _add_experts(writer, spec)
    _add_heads(writer, spec, family)
    _add_states(writer, spec, family)
    _add_rope(writer, spec.rope, family)
    if spec.tower is not None and spec.tower.deepstack_layers:  # what reads pictures is a file of its own
        writer.add_num_deepstack_layers(len(spec.tower.deepstack_layers))
    if family.architecture == "phi3":
        writer.add_sliding_window(0)  # without it readers take the model for one with a window
    if spec.sliding_window is not None and family.has_windows:
        writer.add_sliding_window(spec.sliding_window)
        writer.add_sliding_window_pattern([one is not None for one in spec.windows])
        if SLIDING in spec.ropes:
            writer.add_rope_freq_base_swa(spec.ropes[SLIDING].theta)


def _context(spec: ModelSpec, family: GgufFamily) -> int:
    """Where readers of the format know no windows, the context ends before one would hide something."""
    if spec.sliding_window is None or family.has_windows:
        return spec.max_positions
    return min(spec.sliding_window, spec.max_positions)


def _by_layer(numbers: list[int]) -> int | list[int]:
    """One number where all layers have the same."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _feed_forward(spec: ModelSpec) -> int | list[int]:
    """Returns the width of dense networks, or of experts where there are none, since some readers ask for it; 0 for
    layers without a network."""
    sizes = []
    for layer in spec.layers:
        network = layer.mlp.beside if isinstance(layer.mlp, ExpertsSpec) else layer.mlp
        experts = layer.mlp.size if isinstance(layer.mlp, ExpertsSpec) else 0
        sizes.append(experts if network is None else spec.dense_size(network))
    if all(layer.mlp is not None for layer in spec.layers) and len(spec.experts) < spec.n_layers and spec.experts:
        return spec.intermediate_size  # that of the dense layers before those with experts
    return _by_layer(sizes)


def _add_heads(writer: GGUFWriter, spec: ModelSpec, family: GgufFamily) -> None:
    mixers = [layer.mixer for layer in spec.layers]
    latent = mixers[0]
    if isinstance(latent, LatentAttentionSpec):  # one head of keys, which all heads of queries read
        writer.add_head_count_kv(1)
        writer.add_key_length(latent.kv_rank + latent.rope_dim)
        writer.add_value_length(latent.kv_rank)
        writer.add_key_length_mla(latent.nope_dim + latent.rope_dim)
        writer.add_value_length_mla(latent.value_dim)
        writer.add_kv_lora_rank(latent.kv_rank)
        if latent.q_rank is not None:
            writer.add_q_lora_rank(latent.q_rank)
        return
    heads = [heads.n_kv_heads for heads in spec.heads]
    if family.has_single_parts:  # by which readers know what a layer is
        heads = [n if isinstance(mixer, AttentionSpec) else 0 for n, mixer in zip(heads, mixers, strict=True)]
    width = spec.rope.dim if family.is_gemma4 else spec.head_dim
    writer.add_head_count_kv(_by_layer(heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    if family.is_gemma4:
        writer.add_embedding_length_per_layer_input(spec.layers[0].per_layer_input)
        writer.add_shared_kv_layers(sum(isinstance(m, AttentionSpec) and m.kv_source is not None for m in mixers))
        writer.add_key_length_swa(spec.head_dim)
        writer.add_value_length_swa(spec.head_dim)
        writer.add_rope_dimension_count_swa(spec.head_dim)


def _add_states(writer: GGUFWriter, spec: ModelSpec, family: GgufFamily) -> None:
    """In the words that the format has for Mamba: a delta net's groups are key heads, its time steps value heads."""
    if family.has_delta_nets:
        writer.add_full_attention_interval(attention_interval(spec) or 0)
    if family.has_single_parts:
        writer.add_layer_norm_eps(spec.norm_eps)
    found = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaNetSpec | MambaSpec)), None)
    if found is None:
        return
    writer.add_ssm_conv_kernel(found.conv_kernel)
    if isinstance(found, DeltaNetSpec):
        states = found.key_dim, found.n_key_heads, found.n_value_heads, found.value_size
    else:
        states = found.state_size, found.n_groups, found.n_heads, found.n_heads * found.head_dim
    writer.add_ssm_state_size(states[0])
    writer.add_ssm_group_count(states[1])
    writer.add_ssm_time_step_rank(states[2])
    writer.add_ssm_inner_size(states[3])


def _add_multipliers(writer: GGUFWriter, spec: ModelSpec) -> None:
    mixer = spec.layers[0].mixer
    if isinstance(mixer, AttentionSpec) and mixer.scale is not None:
        writer.add_attention_scale(mixer.scale)
    writer.add_embedding_scale(spec.multipliers.embedding)
    writer.add_residual_scale(spec.multipliers.residual)
    writer.add_logit_scale(1 / spec.multipliers.logits)  # by which readers divide


def _add_experts(writer: GGUFWriter, spec: ModelSpec) -> None:
    from gguf import ExpertGatingFuncType

    first, experts = next(iter(spec.experts.items()))
    writer.add_expert_count(experts.n_experts)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.size)
    if experts.shared_size:
        writer.add_expert_shared_feed_forward_length(experts.shared_size)
    if experts.router != "sigmoid":
        return
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(experts.normalises)
    writer.add_expert_weights_scale(experts.scale)
    writer.add_expert_shared_count(experts.shared_size // experts.size)
    writer.add_leading_dense_block_count(first)
    if experts.groups[0] > 1:
        writer.add_expert_group_count(experts.groups[0])
        writer.add_expert_group_used_count(experts.groups[1])


def _add_rope(writer: GGUFWriter, rope: RopeSpec, family: GgufFamily) -> None:
    from gguf import RopeScalingType

    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.sections is not None:
        writer.add_rope_dimension_sections([*rope.sections, 0])
    if rope.type == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope.parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(Rotary.of(rope).attention_scale)
    if rope.type not in ("linear", "yarn"):  # other scalings are tensors of the file
        return
    writer.add_rope_scaling_type(RopeScalingType[rope.type.upper()])
    writer.add_rope_scaling_factor(rope.parameters["factor"])
    if rope.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.parameters.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.parameters.get("beta_slow") or 1.0)
        if family.has_latent_attention:
            writer.add_rope_scaling_yarn_log_mul(0.1)  # readers expect a tenth of mscale_all_dim here, and 1 elsewhere
        if family.has_query_scale:
            writer.add_rope_scaling_yarn_log_mul(1.0)
            writer.add_attn_temperature_scale(rope.query_beta)
