"""What a config.json says, and what it leaves to its class."""

from __future__ import annotations

import pytest
import torch

from palestra.model import ModelSpec, UnsupportedModel
from palestra.model.attention.kv_cache import KVCache
from palestra.model.loading.families import FAMILIES
from palestra.model.loading.layer_spec import AttentionSpec
from palestra.model.loading.parameter_counts import count_idle_parameters, count_parameters

WRAPPER = "Qwen3_5ForConditionalGeneration"


@pytest.mark.parametrize("architecture", [WRAPPER, "Qwen3_5ForCausalLM"])
def test_absent_fields_mean_what_the_class_says(architecture):
    import transformers

    config: dict = {"architectures": [architecture]}
    spec = ModelSpec.from_config(config | ({"text_config": {}} if architecture == WRAPPER else {}))
    truth = transformers.Qwen3_5TextConfig()
    kinds = ["linear_attention" if n in spec.delta_nets else "full_attention" for n in range(spec.n_layers)]
    assert kinds == truth.layer_types
    delta_net = spec.delta_nets[0]
    assert (delta_net.n_key_heads, delta_net.n_value_heads) == (
        truth.linear_num_key_heads,
        truth.linear_num_value_heads,
    )
    assert (delta_net.key_dim, delta_net.value_dim) == (truth.linear_key_head_dim, truth.linear_value_head_dim)
    assert delta_net.conv_kernel == truth.linear_conv_kernel_dim
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim) == (truth.num_attention_heads, truth.num_key_value_heads, 256)
    assert (spec.vocab_size, spec.hidden_size, spec.max_positions) == (
        truth.vocab_size,
        truth.hidden_size,
        truth.max_position_embeddings,
    )
    assert (spec.rope.dim, spec.rope.theta) == (64, truth.rope_parameters["rope_theta"])
    assert not spec.tie_embeddings


def test_layers_are_told_by_kind_or_by_interval():
    config = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "full_attention_interval": 2}
    assert list(ModelSpec.from_config(config).delta_nets) == [0, 2]
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert list(ModelSpec.from_config(config | {"layer_types": kinds}).delta_nets) == [1, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, "must name all 32 layers"),
        (
            {"layer_types": ["mamba"] * 32},
            "layer_types names 'mamba'; supported in this family: full_attention, linear",
        ),
        ({"linear_num_key_heads": 5}, r"linear_num_value_heads \(32\) is not a multiple of linear_num_key_heads \(5\)"),
        ({"linear_value_head_dim": 0}, "'linear_value_head_dim' must be a positive whole number"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq' are not supported"),
    ],
)
def test_contradiction_is_named(fields, message):
    with pytest.raises(UnsupportedModel, match=message):
        ModelSpec.from_config({"architectures": [WRAPPER], "text_config": fields})


def test_sizes_of_the_published_models():
    """As published: what a sequence's states and a token's keys and values take in bfloat16."""
    sizes = {"hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 9216, "tie_word_embeddings": True}
    spec = ModelSpec.from_config({"architectures": [WRAPPER], "text_config": sizes})
    assert spec.state_bytes(2) >> 20 == 49
    assert spec.kv_numbers_per_token * 2 == 32 << 10
    assert 4.0e9 < count_parameters(spec) < 4.4e9


def test_gpt_oss_alone_means_the_published_120b():
    spec = ModelSpec.from_config({"architectures": ["GptOssForCausalLM"]})
    assert (spec.n_layers, spec.hidden_size, spec.head_dim, spec.has_sinks) == (36, 2880, 64, True)
    assert spec.windows[:3] == (128, None, 128)
    assert (spec.rope.type, spec.rope.theta, spec.rope.parameters["truncate"]) == ("yarn", 150000.0, False)
    assert 1.1e11 < count_parameters(spec) < 1.2e11


@pytest.mark.parametrize(
    "architecture",
    [
        "Ministral3",
        "Phi3",
        "Olmo2",
        "Olmo3",
        "SmolLM3",
        "Granite",
        "SeedOss",
        "Gemma3",
        "Glm4Moe",
        "Glm4MoeLite",
        "DeepseekV3",
    ],
)
def test_absent_fields_of_later_families_mean_what_the_class_says(architecture):
    import transformers

    heads = {"head_dim": 128} if architecture == "Glm4Moe" else {}  # the class's own default has half a pair to rotate
    spec = ModelSpec.from_config({"architectures": [f"{architecture}ForCausalLM"]} | heads)
    truth = getattr(transformers, f"{architecture}TextConfig", getattr(transformers, f"{architecture}Config"))()
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (
        truth.vocab_size,
        truth.hidden_size,
        truth.intermediate_size,
    )
    n_kv_heads = 1 if spec.kv_sides == 1 else truth.num_key_value_heads
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads) == (
        truth.num_hidden_layers,
        truth.num_attention_heads,
        n_kv_heads,
    )
    assert (spec.max_positions, spec.norm_eps) == (truth.max_position_embeddings, truth.rms_norm_eps)
    assert spec.tie_embeddings == truth.tie_word_embeddings
    ropes = truth.rope_parameters
    ropes = ropes if "full_attention" in ropes else {"full_attention": ropes}
    for kind, rope in ropes.items():
        found = spec.ropes[kind]
        assert (found.type, found.theta) == (rope.get("rope_type") or rope["type"], rope["rope_theta"])
    kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
    assert getattr(truth, "layer_types", None) in (None, kinds)
    rotated = [layer.mixer.rope != "none" for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    assert getattr(truth, "no_rope_layers", None) in (None, [int(is_rotated) for is_rotated in rotated])


def test_gemma_3_4b_says_five_fields_and_means_the_rest():
    rope = {"factor": 8.0, "rope_type": "linear"}
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    spec = ModelSpec.from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": sizes | {"rope_scaling": rope}}
    )
    assert 3.8e9 < count_parameters(spec) < 3.9e9
    assert (spec.windows[4:6], spec.tie_embeddings) == ((1024, None), True)
    full, local = spec.ropes["full_attention"], spec.ropes["sliding_attention"]
    assert (full.type, full.theta, local.type, local.theta) == ("linear", 1e6, "default", 1e4)


def test_compressed_rows_are_what_is_cached_of_a_token():
    """As published: 576 numbers in each layer, whatever the number of heads."""
    spec = ModelSpec.from_config({"architectures": ["DeepseekV3ForCausalLM"]})
    assert spec.kv_numbers_per_token == 61 * 576
    assert 670e9 < count_parameters(spec) < 672e9
    flash = ModelSpec.from_config({"architectures": ["Glm4MoeLiteForCausalLM"]})
    assert flash.kv_numbers_per_token == 47 * 576
    assert 29e9 < count_parameters(flash) < 31e9
    cache = KVCache(flash, 2, 8, dtype=torch.bfloat16, device=torch.device("meta"))
    assert sum(stack.numel() for _, stack in cache._stacks) == 2 * 8 * flash.kv_numbers_per_token


def test_nemotron_nano_has_its_published_size():
    """What a token and a sequence cost follows from six attention layers and twenty-three Mamba layers."""
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    }
    spec = ModelSpec.from_config(config)
    assert 31.5e9 < count_parameters(spec) < 31.7e9
    assert (spec.n_layers, len(spec.mambas), len(spec.experts), len(spec.attention_layers)) == (52, 23, 23, 6)
    assert (spec.kv_numbers_per_token * 2, round(spec.state_bytes(2) / 2**20)) == (6144, 47)
    with pytest.raises(UnsupportedModel, match="layers_block_type names 'X'"):
        ModelSpec.from_config(config | {"hybrid_override_pattern": "MXE"})


def test_gemma4_layers_read_the_keys_of_the_last_one_of_their_kind():
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {"num_hidden_layers": 12, "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
    }
    spec = ModelSpec.from_config(config)
    assert spec.kv_sources == {7: 6, 8: 6, 9: 6, 10: 6, 11: 5}
    assert {spec.heads[n].head_dim for n in (5, 11)} == {512}
    assert spec.kv_numbers_per_token == 2 * 4 * (6 * 256 + 512)
    assert [spec.dense_size(layer.mlp) for layer in spec.layers[6:8]] == [9216, 18432]
    assert spec.multipliers.logit_cap is None
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        ModelSpec.from_config({"architectures": ["Gemma4ForCausalLM"], "use_bidirectional_attention": "all"})


def test_longrope_ends_where_its_short_factors_end():
    """Phi-3-mini-128k: behind the original length the whole sequence would need other frequencies."""
    rope = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    spec = ModelSpec.from_config(
        {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 131072, "rope_scaling": rope}
    )
    assert (spec.rope.type, spec.max_positions, spec.rope.parameters["factor"]) == ("longrope", 4096, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "must name all 36 layers"),
        ({"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"}, "supported: 'gelu_pytorch_tanh'"),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_group": 3}, r"n_group \(3\) must divide the 128 experts"),
        ({"architectures": ["Glm4MoeForCausalLM"], "first_k_dense_replace": -1}, "must be a number of layers"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["dense"]}, "of all 47 layers if they are"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 0}, "'kv_lora_rank' must be a positive whole"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "'logits_scaling' must not be 0"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor must be a list of 48 numbers",
        ),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, "needs the field 'short_factor"),
        ({"architectures": ["Olmo3ForCausalLM"], "rope_parameters": {"full_attention": 3}}, "must be an object"),
    ],
)
def test_odd_field_of_a_later_family_is_named(fields, message):
    with pytest.raises(UnsupportedModel, match=message):
        ModelSpec.from_config(fields)


def test_another_slope_of_gpt_oss_activation_is_refused():
    with pytest.raises(UnsupportedModel, match=r"swiglu_alpha is 1\.5; supported: 1\.702"):
        ModelSpec.from_config({"architectures": ["GptOssForCausalLM"], "swiglu_alpha": 1.5})


@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_moe", "qwen3_5_moe", "qwen3_next", "granite", "gemma3", "deepseek_v3"]
)
def test_counted_parameters_are_those_of_the_files(random_model, family):
    from safetensors.torch import load_file

    folder = random_model(family)
    stored = load_file(folder / "model.safetensors")
    norms = sum(t.numel() for name, t in stored.items() if name.endswith(("q_norm.weight", "k_norm.weight")))
    assert count_parameters(ModelSpec.from_folder(folder)) == sum(t.numel() for t in stored.values()) - norms


def test_every_architecture_has_a_family_of_its_own_name():
    names = {"llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "qwen3_next", "gpt_oss"}
    names |= {
        "ministral3",
        "phi3",
        "olmo2",
        "olmo3",
        "smollm3",
        "granite",
        "seed_oss",
        "gemma3",
        "glm4_moe",
        "glm4_moe_lite",
        "deepseek_v3",
        "nemotron_h",
        "gemma4",
        "qwen3_vl",
        "qwen3_vl_moe",
    }
    assert {family.name for family in FAMILIES.values()} == names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 8, "num_local_experts": 4}, r"num_experts \(8\) and num_local_experts \(4\) contradict"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, r"num_experts_per_tok \(8\) is more than there are experts"),
        ({"mlp_only_layers": [99]}, r"mlp_only_layers \(\[99\]\) must be numbers of its 24 layers"),
        ({"num_experts": "many"}, "'num_experts' must be a positive whole number"),
    ],
)
def test_contradiction_among_experts_is_named(fields, message):
    with pytest.raises(UnsupportedModel, match=message):
        ModelSpec.from_config({"architectures": ["Qwen3MoeForCausalLM"]} | fields)


def test_active_parameters_are_those_of_the_published_models():
    sizes = {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True}
    spec = ModelSpec.from_config({"architectures": ["Qwen3MoeForCausalLM"]} | sizes)
    assert 30.4e9 < count_parameters(spec) < 30.6e9
    assert 3.2e9 < count_parameters(spec) - count_idle_parameters(spec) < 3.4e9
