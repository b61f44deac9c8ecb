"""The config.json of a random model: shapes, and what differs between the families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from palestra.testing.random_tower import SEEING, seeing_config

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tie: bool
    max_positions: int = 4096
    experts: tuple[int, int, int] = (8, 2, 48)
    """In families that have experts: how many, how many of them for a token, and their width."""


SHAPES = {
    "micro": Shape(64, 2, 4, 2, 16, 128, 512, tie=False),
    "tiny": Shape(256, 4, 4, 2, 64, 768, 4096, tie=True, experts=(16, 4, 192)),
    "small": Shape(640, 12, 10, 5, 64, 1920, 8192, tie=True, experts=(32, 4, 480)),
    # The published Qwen3 sizes.
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936, tie=True, max_positions=40960),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, 151936, tie=True, max_positions=40960),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288, 151936, tie=False, max_positions=40960),
    "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 128, 6144, 151936, tie=False, max_positions=40960, experts=(128, 8, 768)),
    # The published Qwen3.5 sizes.
    "qwen3.5-4b": Shape(2560, 32, 16, 4, 256, 9216, 248320, tie=True, max_positions=262144),
    "qwen3.5-9b": Shape(4096, 32, 16, 4, 256, 12288, 248320, tie=False, max_positions=262144),
    "gpt-oss-20b": Shape(2880, 24, 64, 8, 64, 2880, 201088, tie=False, max_positions=131072, experts=(32, 4, 2880)),
    "qwen3.5-35b-a3b": Shape(2048, 40, 16, 2, 256, 512, 248320, tie=False, max_positions=262144, experts=(256, 8, 512)),
    "nemotron-3-nano": Shape(
        2688, 26, 32, 2, 128, 1856, 131072, tie=False, max_positions=262144, experts=(128, 6, 1856)
    ),
    "gemma4-12b": Shape(3840, 48, 16, 8, 256, 15360, 262144, tie=True, max_positions=262144),
    "gemma4-26b-a4b": Shape(2816, 30, 16, 8, 256, 2112, 262144, tie=True, max_positions=262144, experts=(128, 8, 704)),
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "sliding_window": 64,  # short enough that a test prompt notices it
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "model_type": "qwen3_5_text",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "model_type": "qwen3_5_moe_text",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "linear_conv_kernel_dim": 4,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 64,  # 128 in the published ones, which a test prompt would not notice
        "swiglu_limit": 7.0,
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "sliding_window": None,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "sliding_window": 64,  # 4096 in the published ones
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "use_sliding_window": False,
    },
    "granite": {  # with the published multipliers, random layers would not be heard
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.5,
        "logits_scaling": 1.25,
        "mlp_bias": False,
        "residual_multiplier": 0.7,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 64,  # 512 or 1024 in the published ones
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma4_text",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 64,  # 512 or 1024 in the published ones
        "use_double_wide_mlp": True,
    },
    "gemma4_moe": {
        "architectures": ["Gemma4ForCausalLM"],
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "model_type": "gemma4_text",
        "num_global_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 64,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "routed_scaling_factor": 2.5,
        "topk_group": 2,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "mamba_hidden_act": "silu",
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "rope_theta": 1e4,
        "routed_scaling_factor": 2.5,
        "time_step_min": 1e-9,  # transformers clamps time steps to this in one of its two forms, and others nowhere
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "seed_oss": {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
    },
}
"""What differs between the families in config.json, with the values their published models use."""

HYBRID = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next"})
SIGMOID = frozenset({"glm4_moe", "glm4_moe_lite", "deepseek_v3", "nemotron_h"})
SPARSE = SIGMOID | {"qwen3_moe", "qwen3_5_moe", "qwen3_next", "gpt_oss", "gemma4_moe"}
GEMMA4 = frozenset({"gemma4", "gemma4_moe"})
LATENT = frozenset({"glm4_moe_lite", "deepseek_v3"})
YARN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"truncate": False},
    "deepseek_v3": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "ministral3": {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
"""Families whose published models have this rope scaling, and what they add to it."""
YARN_FACTOR = 32
FULL, SLIDING = "full_attention", "sliding_attention"


def _gemma4_as_published(layers: int) -> dict[str, Any]:
    """What larger ones have: five layers with a window for each without, whose values are its keys, and no inputs of
    each layer's own."""
    return {
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": [SLIDING if (i + 1) % 6 else FULL for i in range(layers)],
        "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "use_double_wide_mlp": False,
    }


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("qwen3", {}),
    "qwen3-4b": ("qwen3", {}),
    "qwen3-8b": ("qwen3", {}),
    "qwen3-30b-a3b": ("qwen3_moe", {}),
    "qwen3.5-4b": ("qwen3_5", {}),
    "qwen3.5-9b": ("qwen3_5", {}),
    "qwen3.5-35b-a3b": ("qwen3_5_moe", {}),
    "gpt-oss-20b": ("gpt_oss", {}),
    "nemotron-3-nano": ("nemotron_h", {"mamba_head_dim": 64, "n_groups": 8}),
    "gemma4-12b": ("gemma4", _gemma4_as_published(48)),
    "gemma4-26b-a4b": ("gemma4_moe", _gemma4_as_published(30)),
}
"""The family of each published shape, and what differs there from our small models of it."""


def pick(what: str, table: dict[str, T], name: str) -> T:
    if name not in table:
        raise ValueError(f"unknown {what} '{name}'; known: {', '.join(table)}")
    return table[name]


def random_config(
    family: str,
    shape: Shape,
    vocab_size: int | None = None,
    tie: bool | None = None,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the config.json of such a model, without its tokens and its dtype."""
    if family in SEEING:
        own = dict(overrides or {})
        tower = own.pop("vision_config", {})
        return seeing_config(SEEING[family], random_config(SEEING[family].text, shape, vocab_size, tie, own), tower)
    overrides = overrides or {}
    config = (
        {"model_type": family}
        | pick("family", FAMILIES | {name: {} for name in SEEING}, family)
        | {
            "attention_dropout": 0.0,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate,
            "max_position_embeddings": shape.max_positions,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "tie_word_embeddings": shape.tie if tie is None else tie,
            "use_cache": True,
            "vocab_size": shape.vocab if vocab_size is None else vocab_size,
        }
    )
    theta = config.pop("rope_theta")
    if not overrides.keys() & {"rope_theta", "rope_scaling"}:
        config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
        if factor := config.pop("partial_rotary_factor", None):
            config["rope_parameters"]["partial_rotary_factor"] = factor
        if family in YARN:
            config["rope_parameters"] |= _yarn(shape) | YARN[family]
        if family == "gemma3":
            plain = config["rope_parameters"]
            linear = {"rope_type": "linear", "factor": 8.0}
            config["rope_parameters"] = {FULL: plain | linear, SLIDING: plain | {"rope_theta": 1e4}}
        if family in GEMMA4:
            plain = config["rope_parameters"]
            proportional = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
            config["rope_parameters"] = {FULL: plain | proportional, SLIDING: plain | {"rope_theta": 1e4}}
        if family == "olmo3":
            plain = config["rope_parameters"]
            config["rope_parameters"] = {FULL: plain | _yarn(shape), SLIDING: plain}
    if family in HYBRID:
        config |= _delta_nets(shape)
    if family in SPARSE:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if family in SIGMOID:
            names = ("n_routed_experts", *names[1:])
        if family == "gemma4_moe":
            names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        if family == "gpt_oss":
            names = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
        config |= dict(zip(names, shape.experts, strict=True))
    if family in HYBRID & SPARSE:
        config["shared_expert_intermediate_size"] = config["moe_intermediate_size"]
    if family in GEMMA4:
        config |= _gemma4(shape, config)
    if family == "nemotron_h":
        config |= _mambas(shape)
        for absent in ("hidden_act", "num_hidden_layers", "rope_parameters"):
            config.pop(absent, None)
    if family in LATENT:
        del config["head_dim"]
        config |= _latents(shape)
    if family == "gemma3":
        config["query_pre_attn_scalar"] = shape.head_dim
    if family in ("olmo3", "gemma3"):
        config["layer_types"] = [FULL if is_last else SLIDING for is_last in _lasts(shape)]
    if family == "smollm3":
        config["no_rope_layers"] = [int(not is_last) for is_last in _lasts(shape)]
    config |= overrides
    if family in ("qwen2", "qwen3"):
        config.setdefault("max_window_layers", config["num_hidden_layers"])
        config.setdefault("layer_types", _layer_types(config))
    return config


def is_hybrid(config: dict[str, Any]) -> bool:
    return "linear_num_key_heads" in config


def _delta_nets(shape: Shape) -> dict[str, Any]:
    """Every fourth layer attends, or the last one of a small model; heads as in the published sizes."""
    kinds = [FULL if is_last else "linear_attention" for is_last in _lasts(shape)]
    return {
        "layer_types": kinds,
        "linear_key_head_dim": shape.head_dim // 2,
        "linear_num_key_heads": shape.heads,
        "linear_num_value_heads": 2 * shape.heads,
        "linear_value_head_dim": shape.head_dim // 2,
    }


def _gemma4(shape: Shape, config: dict[str, Any]) -> dict[str, Any]:
    """Every other layer has no window; of four layers and more, the second half reads the keys of the first."""
    more: dict[str, Any] = {
        "global_head_dim": 2 * shape.head_dim,
        "layer_types": [FULL if i % 2 else SLIDING for i in range(shape.layers)],
    }
    if not config.get("enable_moe_block"):
        more |= {
            "hidden_size_per_layer_input": shape.hidden // 8,
            "num_kv_shared_layers": shape.layers // 2 if shape.layers > 3 else 0,
            "vocab_size_per_layer_input": config["vocab_size"],
        }
    return more


def _mambas(shape: Shape) -> dict[str, Any]:
    """Two layers, a mixer and a network, for each of the shape's; every fourth mixer attends, the first network is
    dense."""
    mixers = [FULL if is_last else "linear_attention" for is_last in _lasts(shape)]
    networks = ["mlp" if i == 0 else "moe" for i in range(shape.layers)]
    return {
        "layers_block_type": [kind for pair in zip(mixers, networks, strict=True) for kind in pair],
        "mamba_head_dim": 3 * shape.head_dim // 4,
        "mamba_num_heads": 2 * shape.heads,
        "moe_shared_expert_intermediate_size": 2 * shape.experts[2],
        "n_groups": shape.kv_heads,
        "ssm_state_size": shape.head_dim,
    }


def _latents(shape: Shape) -> dict[str, Any]:
    return {
        "kv_lora_rank": shape.hidden // 4,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": 3 * shape.hidden // 8,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.head_dim // 2,
        "v_head_dim": 3 * shape.head_dim // 4,
    }


def _lasts(shape: Shape) -> list[bool]:
    """Returns which layers are the last of four, or of the model if that is smaller."""
    interval = min(4, shape.layers)
    return [(i + 1) % interval == 0 for i in range(shape.layers)]


def _yarn(shape: Shape) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": float(YARN_FACTOR),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": shape.max_positions // YARN_FACTOR,
    }


def _layer_types(config: dict[str, Any]) -> list[str]:
    first_windowed = config["max_window_layers"] if config["use_sliding_window"] else config["num_hidden_layers"]
    return [SLIDING if layer >= first_windowed else FULL for layer in range(config["num_hidden_layers"])]
