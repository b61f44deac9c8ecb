"""Makes the layers of a family from its config.json: each combines some mechanisms."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import ConfigFields
from palestra.model.loading.layer_spec import (
    FULL,
    GATE_SLOPE,
    SLIDING,
    UNROTATED,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadShape,
    LatentAttentionSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    Multipliers,
)

Layers = tuple[LayerSpec, ...]


def llama(config: ConfigFields, n: int) -> Layers:
    has_bias = config.flag("attention_bias")
    mixer = AttentionSpec(qkv_bias=has_bias, o_bias=has_bias)
    return (LayerSpec(mixer, MlpSpec(has_bias=config.flag("mlp_bias"))),) * n


def mistral(config: ConfigFields, n: int) -> Layers:
    return tuple(LayerSpec(AttentionSpec(window=window)) for window in _windows(config, [SLIDING] * n))


def qwen2(config: ConfigFields, n: int) -> Layers:
    return tuple(LayerSpec(AttentionSpec(window=window, qkv_bias=True)) for window in _qwen_windows(config, n))


def qwen3(config: ConfigFields, n: int) -> Layers:
    has_bias = config.flag("attention_bias")
    return tuple(
        LayerSpec(AttentionSpec(window=window, qkv_bias=has_bias, o_bias=has_bias, qk_norm="head"))
        for window in _qwen_windows(config, n)
    )


def qwen3_moe(config: ConfigFields, n: int) -> Layers:
    return _with_experts(config, qwen3(config, n), _experts(config, normalises=config.flag("norm_topk_prob")))


def qwen3_vl_moe(config: ConfigFields, n: int) -> Layers:
    experts = replace(_experts(config, normalises=True), may_be_transposed=True)
    return _with_experts(config, qwen3(config, n), experts)


def qwen3_5(config: ConfigFields, n: int, *, is_interleaved: bool = False) -> Layers:
    has_bias = config.flag("attention_bias")
    attention = LayerSpec(AttentionSpec(qkv_bias=has_bias, o_bias=has_bias, qk_norm="head", is_gated=True))
    delta_net = LayerSpec(
        DeltaNetSpec(
            n_key_heads=config.integer("linear_num_key_heads"),
            n_value_heads=config.integer("linear_num_value_heads"),
            key_dim=config.integer("linear_key_head_dim"),
            value_dim=config.integer("linear_value_head_dim"),
            conv_kernel=config.integer("linear_conv_kernel_dim"),
            is_interleaved=is_interleaved,
        )
    )
    _require_whole_groups(config)
    interval = config.integer("full_attention_interval")
    made = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n)]
    by_kind = {"full_attention": attention, "linear_attention": delta_net}
    return tuple(by_kind[kind] for kind in config.layer_types(n, by_kind, made))


def qwen3_5_moe(config: ConfigFields, n: int) -> Layers:
    return _with_experts(config, qwen3_5(config, n), _experts(config, normalises=True, has_shared=True))


def qwen3_next(config: ConfigFields, n: int) -> Layers:
    experts = _experts(config, normalises=config.flag("norm_topk_prob"), has_shared=True)
    return _with_experts(config, qwen3_5(config, n, is_interleaved=True), experts)


def gpt_oss(config: ConfigFields, n: int) -> Layers:
    has_bias = config.flag("attention_bias")
    n_experts, per_token = _expert_counts(config)
    if (slope := config.number("swiglu_alpha", GATE_SLOPE)) != GATE_SLOPE:
        raise UnsupportedModel(f"{config.source}: swiglu_alpha is {slope}; supported: {GATE_SLOPE}")
    size, limit = config.integer("intermediate_size"), config.number("swiglu_limit", 7.0)
    experts = ExpertsSpec(n_experts, per_token, size, normalises=True, has_bias=True, limit=limit, is_interleaved=True)
    return tuple(
        LayerSpec(AttentionSpec(window=window, qkv_bias=has_bias, o_bias=has_bias, has_sinks=True), experts)
        for window in _windows(config, [FULL if i % 2 else SLIDING for i in range(n)])
    )


def phi3(config: ConfigFields, n: int) -> Layers:
    return tuple(
        LayerSpec(AttentionSpec(window=window, is_fused=True), MlpSpec(is_fused=True))
        for window in _windows(config, [SLIDING] * n)
    )


def olmo2(config: ConfigFields, n: int) -> Layers:
    has_bias = config.flag("attention_bias")
    return (LayerSpec(AttentionSpec(qkv_bias=has_bias, o_bias=has_bias, qk_norm="row"), norms="after"),) * n


def olmo3(config: ConfigFields, n: int) -> Layers:
    """Three layers with a window, then one without; the window's rope is not scaled."""
    windows = _windows(config, [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(n)])
    return tuple(
        _attending(layer, window=window, rope=FULL if window is None else SLIDING)
        for layer, window in zip(olmo2(config, n), windows, strict=True)
    )


def smollm3(config: ConfigFields, n: int) -> Layers:
    interval = config.integer("no_rope_layer_interval")
    rotated = config.get("no_rope_layers") or [(i + 1) % interval for i in range(n)]
    if not isinstance(rotated, list) or len(rotated) < n:
        raise UnsupportedModel(f"{config.source}: no_rope_layers, where given, must name all {n} layers")
    if config.flag("use_sliding_window"):
        raise UnsupportedModel(f"{config.source}: use_sliding_window is not supported in this family")
    return tuple(_attending(layer, rope=FULL if rotated[i] else UNROTATED) for i, layer in enumerate(llama(config, n)))


def granite(config: ConfigFields, n: int) -> Layers:
    scale = config.number("attention_multiplier", 1.0)
    return tuple(_attending(layer, scale=scale) for layer in llama(config, n))


def granite_multipliers(config: ConfigFields) -> Multipliers:
    if (divisor := config.number("logits_scaling", 1.0)) == 0:
        raise UnsupportedModel(f"{config.source}: field 'logits_scaling' must not be 0")
    return Multipliers(
        embedding=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        logits=1.0 / divisor,
    )


def seed_oss(config: ConfigFields, n: int) -> Layers:
    mixer = AttentionSpec(qkv_bias=config.flag("attention_bias"), o_bias=config.flag("attention_out_bias"))
    return (LayerSpec(mixer, MlpSpec(has_bias=config.flag("mlp_bias"))),) * n


def gemma3(config: ConfigFields, n: int) -> Layers:
    """Five layers with a window, then one without."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise UnsupportedModel(f"{config.source}: {name} is {config.get(name)!r}, which is not supported")
    has_bias, interval = config.flag("attention_bias"), config.integer("sliding_window_pattern")
    scale = config.integer("query_pre_attn_scalar") ** -0.5
    mixer = AttentionSpec(qkv_bias=has_bias, o_bias=has_bias, qk_norm="head", scale=scale)
    windows = _windows(config, [FULL if (i + 1) % interval == 0 else SLIDING for i in range(n)])
    return tuple(
        LayerSpec(
            replace(mixer, window=window, rope=FULL if window is None else SLIDING),
            MlpSpec(activation="gelu_tanh"),
            norms="around",
        )
        for window in windows
    )


def gemma_multipliers(config: ConfigFields) -> Multipliers:
    cap = config.number("final_logit_softcapping", 0.0) if config.has("final_logit_softcapping") else None
    return Multipliers(embedding=config.integer("hidden_size") ** 0.5, rounds_embedding=True, logit_cap=cap)


def gemma4(config: ConfigFields, n: int) -> Layers:
    """Five layers with a window, then one without, whose heads are wider; the last ones read others' keys."""
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel(f"{config.source}: use_bidirectional_attention is 'all', which is not supported")
    kinds = config.layer_types(n, (SLIDING, FULL), [SLIDING if (i + 1) % 6 else FULL for i in range(n)])
    kinds = [*kinds[:-1], FULL]
    n_own = n - config.count("num_kv_shared_layers")
    mixers = _gemma4_attention(config, kinds, n_own)
    mlp, width = MlpSpec(activation="gelu_tanh"), config.count("hidden_size_per_layer_input")
    wide = replace(mlp, size=2 * config.integer("intermediate_size")) if config.flag("use_double_wide_mlp") else mlp
    if width and config.integer("vocab_size_per_layer_input") != config.integer("vocab_size"):
        raise UnsupportedModel(f"{config.source}: vocab_size_per_layer_input is not vocab_size")
    experts = _gemma4_experts(config, mlp) if config.flag("enable_moe_block") else None
    return tuple(
        LayerSpec(
            mixer,
            experts or (mlp if i < n_own else wide),
            norms="around",
            per_layer_input=width,
            has_scalar=True,
        )
        for i, mixer in enumerate(mixers)
    )


def _gemma4_attention(config: ConfigFields, kinds: list[str], n_own: int) -> list[AttentionSpec]:
    own, has_bias = kinds[:n_own], config.flag("attention_bias")
    if not set(kinds) <= set(own):
        raise UnsupportedModel(f"{config.source}: num_kv_shared_layers leaves no layer of each kind with its own keys")
    window, is_joined = config.integer("sliding_window"), config.flag("attention_k_eq_v")
    return [
        AttentionSpec(
            window=window if kind == SLIDING else None,
            qkv_bias=has_bias,
            o_bias=has_bias,
            qk_norm="head",
            rope=kind,
            scale=1.0,
            is_scale_in_norm=True,
            heads=_gemma4_heads(config, i, kind),
            kv_source=None if i < n_own else n_own - 1 - own[::-1].index(kind),
            has_value_norm=i < n_own,
            values_are_keys=is_joined and kind == FULL and i < n_own,
        )
        for i, kind in enumerate(kinds)
    ]


def _gemma4_heads(config: ConfigFields, i: int, kind: str) -> HeadShape | None:
    """Older files say what layers without a window have, newer ones what differs in each layer."""
    n_heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if config.has("per_layer_config"):
        own: Any = config.get("per_layer_config").get(str(i), {})
        if not own:
            return None
        shape = n_heads, own.get("num_key_value_heads", kv_heads), own.get("head_dim", config.integer("head_dim"))
    elif kind == SLIDING:
        return None
    else:
        is_joined = config.flag("attention_k_eq_v") and config.has("num_global_key_value_heads")
        kv_heads = config.integer("num_global_key_value_heads") if is_joined else kv_heads
        shape = n_heads, kv_heads, config.integer("global_head_dim")
    if n_heads % shape[1]:
        raise UnsupportedModel(f"{config.source}: layer {i} has {shape[1]} key heads for {n_heads} of queries")
    return HeadShape(*shape)


def _gemma4_experts(config: ConfigFields, beside: MlpSpec) -> ExpertsSpec:
    n_experts, per_token = _expert_counts(config)
    size = config.integer("moe_intermediate_size")
    return ExpertsSpec(n_experts, per_token, size, normalises=True, activation=beside.activation, beside=beside)


def glm4_moe(config: ConfigFields, n: int) -> Layers:
    qk_norm = "head" if config.flag("use_qk_norm") else None
    layer = LayerSpec(AttentionSpec(qkv_bias=config.flag("attention_bias"), qk_norm=qk_norm))
    return _behind_dense(config, (layer,) * n, _sigmoid_experts(config))


def glm4_moe_lite(config: ConfigFields, n: int) -> Layers:
    layers, experts = (LayerSpec(_latent_attention(config)),) * n, _sigmoid_experts(config)
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return _behind_dense(config, layers, experts)
    if not isinstance(kinds, list) or len(kinds) != n or not set(kinds) <= {"dense", "sparse"}:
        raise UnsupportedModel(
            f"{config.source}: mlp_layer_types must say of all {n} layers if they are dense or sparse"
        )
    return tuple(
        replace(layer, mlp=experts) if kind == "sparse" else layer for layer, kind in zip(layers, kinds, strict=True)
    )


def deepseek_v3(config: ConfigFields, n: int) -> Layers:
    return _behind_dense(config, (LayerSpec(_latent_attention(config)),) * n, _sigmoid_experts(config))


NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": FULL, "-": "mlp"}
NEMOTRON_OLD_NAMES = {"mamba": "linear_attention", "attention": FULL}


def nemotron_h(config: ConfigFields, n: int) -> Layers:
    """Each layer is one mechanism; how many there are, the list of them says."""
    for name in ("use_bias", "mlp_bias", "mamba_proj_bias", "sliding_window"):
        if config.get(name):
            raise UnsupportedModel(f"{config.source}: {name} is {config.get(name)!r}, which is not supported")
    has_bias, experts = config.flag("attention_bias"), _nemotron_experts(config)
    by_kind = {
        "linear_attention": LayerSpec(_mamba(config), None),
        FULL: LayerSpec(AttentionSpec(qkv_bias=has_bias, o_bias=has_bias, rope=UNROTATED), None),
        "mlp": LayerSpec(None, MlpSpec(activation="relu2")),
        "moe": LayerSpec(None, experts),
    }
    return tuple(by_kind[kind] for kind in _nemotron_kinds(config, by_kind))


def _nemotron_kinds(config: ConfigFields, known: Collection[str]) -> list[str]:
    """Older files have a letter for each layer, and other names."""
    letters = config.get("hybrid_override_pattern")
    kinds: Any = config.get("layers_block_type")
    if letters is not None and not config.has("layers_block_type"):
        kinds = [NEMOTRON_LETTERS.get(letter, letter) for letter in letters]
    if not isinstance(kinds, list) or not kinds:
        raise UnsupportedModel(f"{config.source}: layers_block_type must be a list of layers' kinds, found {kinds!r}")
    kinds = [NEMOTRON_OLD_NAMES.get(kind, kind) for kind in kinds]
    if odd := [kind for kind in kinds if kind not in known]:
        raise UnsupportedModel(
            f"{config.source}: layers_block_type names {odd[0]!r}; supported in this family: {', '.join(known)}"
        )
    return kinds


def _mamba(config: ConfigFields) -> MambaSpec:
    if (activation := config.get("mamba_hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"{config.source}: mamba_hidden_act is {activation!r}; supported: 'silu'")
    heads, groups = config.one_of("mamba_num_heads"), config.one_of("n_groups", "mamba_n_groups")
    if heads % groups:
        raise UnsupportedModel(f"{config.source}: mamba_num_heads ({heads}) is not a multiple of n_groups ({groups})")
    return MambaSpec(
        n_heads=heads,
        head_dim=config.integer("mamba_head_dim"),
        n_groups=groups,
        state_size=config.integer("ssm_state_size"),
        conv_kernel=config.one_of("conv_kernel", "mamba_d_conv"),
        has_conv_bias=config.flag("use_conv_bias"),
    )


def _nemotron_experts(config: ConfigFields) -> ExpertsSpec:
    latent = config.get("moe_latent_size")
    return replace(
        _sigmoid_experts(config),
        shared_size=config.integer("moe_shared_expert_intermediate_size"),
        activation="relu2",
        latent_size=None if latent is None else config.integer("moe_latent_size"),
    )


def _attending(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The same layer, with another attention."""
    assert isinstance(layer.mixer, AttentionSpec)
    return replace(layer, mixer=replace(layer.mixer, **changes))


def _latent_attention(config: ConfigFields) -> LatentAttentionSpec:
    nope, turned = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    return LatentAttentionSpec(
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        rope_dim=turned,
        nope_dim=nope,
        value_dim=config.integer("v_head_dim"),
        scale=(nope + turned) ** -0.5 * _latent_scale(config) ** 2,
        has_bias=config.flag("attention_bias"),
        is_paired=bool(config.get("rope_interleave", True)),
    )


def _latent_scale(config: ConfigFields) -> float:
    """Returns what scaled ropes multiply queries and keys by, beside what they do to cosines and sines."""
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_scaled = isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type") or "default") != "default"
    weight = rope.get("mscale_all_dim") if is_scaled else None
    return 0.1 * weight * math.log(rope["factor"]) + 1.0 if weight and rope.get("factor", 1.0) > 1 else 1.0


def _sigmoid_experts(config: ConfigFields) -> ExpertsSpec:
    n_experts, per_token = _expert_counts(config)
    size, groups = config.integer("moe_intermediate_size"), config.integer("n_group", default=1)
    kept = config.integer("topk_group", default=1)
    if n_experts % groups or kept > groups:
        raise UnsupportedModel(
            f"{config.source}: n_group ({groups}) must divide the {n_experts} experts, and be no less than "
            f"topk_group ({kept})"
        )
    return ExpertsSpec(
        n_experts,
        per_token,
        size,
        normalises=config.flag("norm_topk_prob"),
        shared_size=size * config.integer("n_shared_experts"),
        is_shared_gated=False,
        router="sigmoid",
        groups=(groups, kept),
        scale=config.number("routed_scaling_factor", 1.0),
    )


def _behind_dense(config: ConfigFields, layers: Layers, experts: ExpertsSpec) -> Layers:
    """Experts in each layer behind the first ones."""
    first = config.get("first_k_dense_replace", 0)
    if not isinstance(first, int) or first < 0:
        raise UnsupportedModel(f"{config.source}: first_k_dense_replace ({first!r}) must be a number of layers")
    return tuple(layer if i < first else replace(layer, mlp=experts) for i, layer in enumerate(layers))


def _experts(config: ConfigFields, *, normalises: bool, has_shared: bool = False) -> ExpertsSpec:
    n_experts, per_token = _expert_counts(config)
    shared_size = config.integer("shared_expert_intermediate_size") if has_shared else 0
    return ExpertsSpec(n_experts, per_token, config.integer("moe_intermediate_size"), normalises, shared_size)


def _expert_counts(config: ConfigFields) -> tuple[int, int]:
    """Returns the number of experts, and how many of them a token visits."""
    n_experts = config.one_of("num_experts", "num_local_experts", "n_routed_experts")
    per_token = config.one_of("num_experts_per_tok", "experts_per_token", "top_k_experts")
    if per_token > n_experts:
        raise UnsupportedModel(
            f"{config.source}: num_experts_per_tok ({per_token}) is more than there are experts ({n_experts})"
        )
    return n_experts, per_token


def _with_experts(config: ConfigFields, layers: Layers, experts: ExpertsSpec) -> Layers:
    """Experts in each layer that the config does not name as dense."""
    step, dense = config.integer("decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < len(layers) for i in dense):
        raise UnsupportedModel(
            f"{config.source}: mlp_only_layers ({dense!r}) must be numbers of its {len(layers)} layers"
        )
    return tuple(
        layer if i in dense or (i + 1) % step else replace(layer, mlp=experts) for i, layer in enumerate(layers)
    )


def _require_whole_groups(config: ConfigFields) -> None:
    keys, values = (config.integer(f"linear_num_{x}_heads") for x in ("key", "value"))
    if values % keys:
        raise UnsupportedModel(
            f"{config.source}: linear_num_value_heads ({values}) is not a multiple of linear_num_key_heads ({keys})"
        )


def _qwen_windows(config: ConfigFields, n: int) -> list[int | None]:
    if not config.flag("use_sliding_window"):
        return [None] * n
    first = config.get("max_window_layers", 28)
    return _windows(config, [SLIDING if i >= first else FULL for i in range(n)])


def _windows(config: ConfigFields, made: list[str]) -> list[int | None]:
    """The window of each layer. `made` are their kinds, unless the config says of each what it does."""
    window: Any = config.get("sliding_window")
    if window is None:
        return [None] * len(made)
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModel(f"{config.source}: sliding_window ({window!r}) must be a positive whole number")
    return [window if kind == SLIDING else None for kind in config.layer_types(len(made), (SLIDING, FULL), made)]
