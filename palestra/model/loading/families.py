"""The table of supported families: from the architecture's name to the mechanisms its layers combine.

Owns: what each transformers class computes and what it assumes of fields that config.json leaves out. Never touches:
files, weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import Config, ConfigFields
from palestra.model.loading.layer_spec import GATE_SLOPE, AttentionSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, MlpSpec
from palestra.util.suggest import nearest

Layers = tuple[LayerSpec, ...]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    layers: Callable[[ConfigFields, int], Layers]
    """Each layer of a config with so many layers."""
    defaults: Config = field(default_factory=dict)
    """What an absent field means to the transformers class, where that is not what it means to Llama's."""
    has_partial_rope: bool = False
    has_offset_norms: bool = False
    """Norms multiply by 1 + their weight, in float32. Not so the delta net's own norm."""


def _llama(config: ConfigFields, n: int) -> Layers:
    has_bias = config.flag("attention_bias")
    mixer = AttentionSpec(qkv_bias=has_bias, o_bias=has_bias)
    return (LayerSpec(mixer, MlpSpec(has_bias=config.flag("mlp_bias"))),) * n


def _mistral(config: ConfigFields, n: int) -> Layers:
    return tuple(LayerSpec(AttentionSpec(window=window)) for window in _windows(config, [SLIDING] * n))


def _qwen2(config: ConfigFields, n: int) -> Layers:
    return tuple(LayerSpec(AttentionSpec(window=window, qkv_bias=True)) for window in _qwen_windows(config, n))


def _qwen3(config: ConfigFields, n: int) -> Layers:
    has_bias = config.flag("attention_bias")
    return tuple(
        LayerSpec(AttentionSpec(window=window, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True))
        for window in _qwen_windows(config, n)
    )


def _qwen3_moe(config: ConfigFields, n: int) -> Layers:
    return _with_experts(config, _qwen3(config, n), _experts(config, normalises=config.flag("norm_topk_prob")))


def _qwen3_5(config: ConfigFields, n: int, *, is_interleaved: bool = False) -> Layers:
    has_bias = config.flag("attention_bias")
    attention = LayerSpec(AttentionSpec(qkv_bias=has_bias, o_bias=has_bias, qk_norm=True, is_gated=True))
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


def _qwen3_5_moe(config: ConfigFields, n: int) -> Layers:
    return _with_experts(config, _qwen3_5(config, n), _experts(config, normalises=True, has_shared=True))


def _qwen3_next(config: ConfigFields, n: int) -> Layers:
    experts = _experts(config, normalises=config.flag("norm_topk_prob"), has_shared=True)
    return _with_experts(config, _qwen3_5(config, n, is_interleaved=True), experts)


def _gpt_oss(config: ConfigFields, n: int) -> Layers:
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


def _experts(config: ConfigFields, *, normalises: bool, has_shared: bool = False) -> ExpertsSpec:
    n_experts, per_token = _expert_counts(config)
    shared_size = config.integer("shared_expert_intermediate_size") if has_shared else 0
    return ExpertsSpec(n_experts, per_token, config.integer("moe_intermediate_size"), normalises, shared_size)


def _expert_counts(config: ConfigFields) -> tuple[int, int]:
    """How many experts there are, and how many of them a token visits."""
    n_experts = config.one_of("num_experts", "num_local_experts")
    per_token = config.one_of("num_experts_per_tok", "experts_per_token")
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


_QWEN3_MOE = Family(
    "qwen3_moe",
    _qwen3_moe,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
)
_HYBRID = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
"""What the transformers classes of Qwen3.5 and Qwen3-Next have in common."""
_HYBRID_MOE = _HYBRID | {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_5 = Family(
    "qwen3_5",
    _qwen3_5,
    defaults=_HYBRID
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    has_partial_rope=True,
    has_offset_norms=True,
)
_QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    _qwen3_5_moe,
    defaults=_HYBRID_MOE
    | {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256},
    has_partial_rope=True,
    has_offset_norms=True,
)
_QWEN3_NEXT = Family(
    "qwen3_next",
    _qwen3_next,
    defaults=_HYBRID_MOE
    | {
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    has_partial_rope=True,
    has_offset_norms=True,
)

_GPT_OSS = Family(
    "gpt_oss",
    _gpt_oss,
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama),
    "MistralForCausalLM": Family("mistral", _mistral, defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, defaults={"sliding_window": 4096}),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, defaults={"sliding_window": 4096}),
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "GptOssForCausalLM": _GPT_OSS,
}


def family_of(config: Config, source: str) -> tuple[str, Family]:
    """The first architecture that is known, and its family."""
    named = config.get("architectures") or []
    for name in named:
        if name in FAMILIES:
            return name, FAMILIES[name]
    found = ", ".join(map(repr, named)) or "nothing"
    raise UnsupportedModel(
        f"{source}: field 'architectures' names {found}; supported: {', '.join(FAMILIES)}{_nearest(named, config)}"
    )


LACKING = {
    "kv_lora_rank": "multi-head latent attention",
    "ssm_state_size": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "final_logit_softcapping": "soft-capped logits",
    "query_pre_attn_scalar": "Gemma's scaling of queries",
    "no_rope_layers": "layers without positions",
    "n_group": "routers that choose groups of experts",
    "embedding_multiplier": "multipliers on embeddings and residuals",
    "parallel_attn": "attention and MLP side by side",
}
"""Mechanisms that no family here has, by fields of config.json that tell of them."""


def _nearest(named: list[str], config: Config) -> str:
    """The supported architecture whose name is most like it, and what that lacks, as far as the config tells."""
    near = nearest(named[0], FAMILIES) if named else None
    if near is None:
        return ""
    text = config.get("text_config")
    fields = config | (text if isinstance(text, dict) else {})
    lacking = dict.fromkeys(what for field, what in LACKING.items() if fields.get(field) is not None)
    return f"; the nearest is {near}{', which lacks ' + ' and '.join(lacking) if lacking else ''}"


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
