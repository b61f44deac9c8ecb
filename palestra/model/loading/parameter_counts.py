"""Counts the parameters of a model by its spec alone."""

from __future__ import annotations

from palestra.model.loading.layer_spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
)
from palestra.model.loading.spec import ModelSpec


def count_parameters(spec: ModelSpec) -> int:
    """All of the text model's but its biases."""
    h = spec.hidden_size
    norms = sum(_n_norms(layer) for layer in spec.layers) * h
    mixers = sum(_mixer_parameters(spec, n) for n in range(spec.n_layers))
    mlps = sum(_mlp_parameters(spec, layer) for layer in spec.layers)
    per_layer = sum(layer.per_layer_input for layer in spec.layers)
    embeddings = spec.vocab_size * (h * (1 if spec.tie_embeddings else 2) + per_layer)
    return mixers + norms + mlps + embeddings + 3 * h * per_layer + h


def count_idle_parameters(spec: ModelSpec) -> int:
    """Counts the parameters of experts that a token does not visit."""
    return sum(_expert_parameters(spec, e) * (e.n_experts - e.per_token) for e in spec.experts.values())


def _n_norms(layer: LayerSpec) -> int:
    beside = 3 if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.beside is not None else 0
    halves = 1 if layer.is_half else 4 if layer.norms == "around" else 2
    return halves + beside + (layer.per_layer_input > 0)


def _mixer_parameters(spec: ModelSpec, n: int) -> int:
    mixer, h = spec.layers[n].mixer, spec.hidden_size
    if mixer is None:
        return 0
    if isinstance(mixer, AttentionSpec):
        kv = 0 if mixer.kv_source is not None else 1 if mixer.values_are_keys else 2
        return h * ((2 + mixer.is_gated) * spec.heads[n].q_size + kv * spec.heads[n].kv_size)
    if isinstance(mixer, LatentAttentionSpec):
        return _latent_parameters(spec, mixer)
    if isinstance(mixer, MambaSpec):
        per_channel = (mixer.conv_kernel + mixer.has_conv_bias) * mixer.conv_size
        return h * (mixer.in_size + mixer.inner_size) + per_channel + 3 * mixer.n_heads + mixer.inner_size
    linears = h * (mixer.conv_size + 2 * mixer.value_size + 2 * mixer.n_value_heads)
    return linears + mixer.conv_kernel * mixer.conv_size + 2 * mixer.n_value_heads + mixer.value_dim


def _latent_parameters(spec: ModelSpec, mixer: LatentAttentionSpec) -> int:
    h, heads = spec.hidden_size, spec.n_heads
    values = heads * mixer.value_dim
    kv = h * mixer.row_size + mixer.kv_rank * (heads * mixer.nope_dim + values + 1)
    queries = heads * mixer.qk_dim
    return kv + h * values + (h * queries if mixer.q_rank is None else mixer.q_rank * (h + queries + 1))


def _mlp_parameters(spec: ModelSpec, layer: LayerSpec) -> int:
    mlp = layer.mlp
    if mlp is None:
        return 0
    if isinstance(mlp, MlpSpec):
        return _dense_parameters(spec, mlp)
    h = spec.hidden_size
    shared = h * (mlp.n_products * mlp.shared_size + mlp.is_shared_gated) if mlp.shared_size else 0
    biases = mlp.n_experts if mlp.router == "sigmoid" else 0
    beside = 0 if mlp.beside is None else _dense_parameters(spec, mlp.beside) + mlp.n_experts + h
    latents = 2 * h * (mlp.latent_size or 0)
    return mlp.n_experts * (_expert_parameters(spec, mlp) + h) + latents + shared + biases + beside


def _dense_parameters(spec: ModelSpec, mlp: MlpSpec) -> int:
    return (2 + mlp.is_gated) * spec.hidden_size * spec.dense_size(mlp)


def _expert_parameters(spec: ModelSpec, mlp: ExpertsSpec) -> int:
    return mlp.n_products * (mlp.latent_size or spec.hidden_size) * mlp.size
