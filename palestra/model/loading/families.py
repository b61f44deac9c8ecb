"""The table of supported families: from the architecture's name to the mechanisms its layers combine.

A new family is an entry here and a function in `family_layers`. What a family multiplies queries by goes into the
queries: attention always divides by the square root of `head_dim`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from palestra.model.errors import UnsupportedModel
from palestra.model.loading import family_layers as build
from palestra.model.loading.config_fields import Config, ConfigFields
from palestra.model.loading.family_layers import Layers
from palestra.model.loading.gemma_tower_spec import read_gemma_tower_spec
from palestra.model.loading.layer_spec import Multipliers
from palestra.model.loading.qwen_tower_spec import TowerDefaults
from palestra.model.loading.tower_spec import TowerSpec
from palestra.util.suggest import nearest


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    layers: Callable[[ConfigFields, int], Layers]
    """Each layer of a config with so many layers."""
    defaults: Config = field(default_factory=dict)
    """What an absent field means to the transformers class, where that is not what it means to Llama's."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The field that names the activation, and what it has to say, if there is one."""
    norm_eps: str = "rms_norm_eps"
    """The field that says what norms add before they divide."""
    rope_names: dict[str, str] = field(default_factory=dict)
    """Rope types that this family has beside the usual ones, by what its files call them."""
    has_partial_rope: bool = False
    has_local_rope: bool = False
    """Layers with a window have a rope of their own, which is not scaled."""
    has_wide_rope: bool = False
    """Cosines and sines stay in float32."""
    rope_sections: tuple[int, int, int] | None = None
    """Pairs of dimensions that turn by time, height and width (`mrope_section`). None: positions are one number."""
    tower: Callable[[Config, str], TowerSpec | None] | None = None
    """Reads the vision tower's spec from a config and the name of its file; None: its pictures are not read."""
    has_query_scaling: bool = False
    """Queries grow with the logarithm of their position (`llama_4_scaling_beta`)."""
    has_wide_norms: bool = False
    """Norms multiply in float32, before the result is rounded."""
    has_offset_norms: bool = False
    """Norms multiply by 1 + their weight, in float32. Not so the delta net's own norm."""
    multipliers: Callable[[ConfigFields], Multipliers] = lambda config: Multipliers()


_QWEN3_MOE = Family(
    "qwen3_moe",
    build.qwen3_moe,
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
_QWEN3_5_TOWER = TowerDefaults(image_token=248056, start_token=248053, end_token=248054).read
_QWEN3_5 = Family(
    "qwen3_5",
    build.qwen3_5,
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
    rope_sections=(11, 11, 10),
    tower=_QWEN3_5_TOWER,
)
_QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    build.qwen3_5_moe,
    defaults=_HYBRID_MOE
    | {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256},
    has_partial_rope=True,
    has_offset_norms=True,
    rope_sections=(11, 11, 10),
    tower=_QWEN3_5_TOWER,
)
_QWEN3_VL = Family(
    "qwen3_vl",
    build.qwen3,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
    },
    rope_sections=(24, 20, 20),
    tower=TowerDefaults(image_token=151655, start_token=151652, end_token=151653, deepstack_layers=(8, 16, 24)).read,
)
_QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    build.qwen3_vl_moe,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    rope_sections=(24, 20, 20),
    tower=_QWEN3_VL.tower,
)
_QWEN3_NEXT = Family(
    "qwen3_next",
    build.qwen3_next,
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
    build.gpt_oss,
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

_MINISTRAL3 = Family(
    "ministral3",
    build.mistral,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    has_query_scaling=True,
)
_PHI3 = Family(
    "phi3",
    build.phi3,
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    rope_names={"longrope": "longrope", "su": "longrope", "yarn": "longrope"},  # "su" and "yarn": at first
    has_partial_rope=True,
)
_OLMO = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
"""What the transformers classes of OLMo 2 and 3 have in common."""
_SMOLLM3 = Family(
    "smollm3",
    build.smollm3,
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
)
_GRANITE = Family(
    "granite",
    build.granite,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    multipliers=build.granite_multipliers,
)
_SEED_OSS = Family(
    "seed_oss",
    build.seed_oss,
    defaults={
        "vocab_size": 155136,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    },
)
_GEMMA3 = Family(
    "gemma3",
    build.gemma3,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    has_local_rope=True,
    has_offset_norms=True,
    multipliers=build.gemma_multipliers,
)
_GEMMA4 = Family(
    "gemma4",
    build.gemma4,
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "tie_word_embeddings": True,
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    rope_names={"proportional": "proportional"},
    has_partial_rope=True,
    has_local_rope=True,
    has_wide_norms=True,
    multipliers=build.gemma_multipliers,
    tower=read_gemma_tower_spec,
)
_GLM4_MOE = Family(
    "glm4_moe",
    build.glm4_moe,
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    has_partial_rope=True,
)
_GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    build.glm4_moe_lite,
    defaults={
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
)
_NEMOTRON_H = Family(
    "nemotron_h",
    build.nemotron_h,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    activation=("mlp_hidden_act", "relu2"),
    norm_eps="layer_norm_epsilon",
    has_wide_norms=True,
)
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    build.deepseek_v3,
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", build.llama),
    "MistralForCausalLM": Family("mistral", build.mistral, defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", build.qwen2, defaults={"sliding_window": 4096}),
    "Qwen3ForCausalLM": Family("qwen3", build.qwen3, defaults={"sliding_window": 4096}),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL_MOE,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "GptOssForCausalLM": _GPT_OSS,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Phi3ForCausalLM": _PHI3,
    "Olmo2ForCausalLM": Family("olmo2", build.olmo2, defaults=_OLMO, has_wide_rope=True, has_wide_norms=True),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        build.olmo3,
        defaults=_OLMO | {"sliding_window": 4096, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
        has_local_rope=True,
        has_wide_rope=True,
        has_wide_norms=True,
    ),
    "SmolLM3ForCausalLM": _SMOLLM3,
    "GraniteForCausalLM": _GRANITE,
    "SeedOssForCausalLM": _SEED_OSS,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "Glm4MoeLiteForCausalLM": _GLM4_MOE_LITE,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "NemotronHForCausalLM": _NEMOTRON_H,
}

WRAPPERS = {
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
"""Architectures around text models of several families, by the `model_type` of these."""


def family_of(config: Config, source: str) -> tuple[str, Family]:
    """The first architecture that is known, and its family."""
    named = config.get("architectures") or []
    for name in named:
        if name in FAMILIES:
            return name, FAMILIES[name]
        if name in WRAPPERS:
            return name, _wrapped(name, config, source)
    found, known = ", ".join(map(repr, named)) or "nothing", ", ".join([*FAMILIES, *WRAPPERS])
    raise UnsupportedModel(
        f"{source}: field 'architectures' names {found}; supported: {known}{_nearest(named, config)}"
    )


def _wrapped(name: str, config: Config, source: str) -> Family:
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if kind not in WRAPPERS[name]:
        raise UnsupportedModel(
            f"{source}: {name} around a text model of type {kind!r}; supported: {', '.join(WRAPPERS[name])}"
        )
    return FAMILIES[WRAPPERS[name][kind]]


LACKING = {
    "attn_logit_softcapping": "soft-capped attention scores",
    "attention_chunk_size": "chunked attention",
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
