"""Random models that see: a text model of another family, wrapped with a small vision tower of Qwen's or Gemma's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from palestra.testing.random_parameter import Parameter

PATCH, MERGE = 8, 2
"""Small, so that a small picture takes few positions: 16 x 16 pixels each."""
PREPROCESSOR = {
    "do_convert_rgb": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": MERGE,
    "patch_size": PATCH,
    "size": {"longest_edge": 65536, "shortest_edge": 1024},
    "temporal_patch_size": 2,
}
GEMMA_PREPROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "max_soft_tokens": 70,
    "patch_size": PATCH,
    "pooling_kernel_size": MERGE,
}


@dataclass(frozen=True, slots=True)
class SeeingFamily:
    text: str
    """The family of its text model."""
    architecture: str
    model_type: str
    text_type: str
    has_deepstack: bool = False
    looks_ahead: bool = False
    """Rows of a picture see each other, in layers with a window."""

    @property
    def is_gemma(self) -> bool:
        return self.model_type == "gemma4"

    @property
    def preprocessor(self) -> dict[str, Any]:
        return GEMMA_PREPROCESSOR if self.is_gemma else PREPROCESSOR


SEEING = {
    "qwen3_vl": SeeingFamily("qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", True),
    "qwen3_vl_moe": SeeingFamily(
        "qwen3_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text", True
    ),
    "qwen3_5_vl": SeeingFamily("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text"),
    "qwen3_5_moe_vl": SeeingFamily(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text"
    ),
    "gemma4_vl": SeeingFamily("gemma4", "Gemma4ForConditionalGeneration", "gemma4", "gemma4_text"),
    "gemma4_moe_vl": SeeingFamily(
        "gemma4_moe", "Gemma4ForConditionalGeneration", "gemma4", "gemma4_text", looks_ahead=True
    ),
}


def seeing_family(config: dict[str, Any]) -> SeeingFamily | None:
    """The family of a config with a tower; None where it has none."""
    if "vision_config" not in config:
        return None
    return next(one for one in SEEING.values() if config["architectures"] == [one.architecture])


def seeing_config(family: SeeingFamily, text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """`text`: the config of the text model alone. `tower`: fields of the tower's that are not the usual ones."""
    inner = {name: value for name, value in text.items() if name != "architectures"}
    inner["model_type"] = family.text_type
    if family.looks_ahead:
        inner["use_bidirectional_attention"] = "vision"
    if not family.is_gemma:
        rope = inner["rope_parameters"]
        pairs = int(inner["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        turned = pairs // 3
        inner["rope_parameters"] = rope | {"mrope_section": [pairs - 2 * turned, turned, turned]}
    hidden = inner["hidden_size"]
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "text_config": inner,
        "tie_word_embeddings": inner["tie_word_embeddings"],
        "vision_config": (_gemma_tower if family.is_gemma else _qwen_tower)(family, hidden) | tower,
    }


def _qwen_tower(family: SeeingFamily, hidden: int) -> dict[str, Any]:
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 2 * hidden,
        "model_type": family.model_type,
        "num_heads": 4,
        "num_position_embeddings": 64,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    return tower | ({"deepstack_visual_indexes": [0]} if family.has_deepstack else {})


def _gemma_tower(family: SeeingFamily, hidden: int) -> dict[str, Any]:
    return {
        "head_dim": hidden // 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 2 * hidden,
        "model_type": "gemma4_vision",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "patch_size": PATCH,
        "pooling_kernel_size": MERGE,
        "position_embedding_size": 1024,
        "standardize": family.looks_ahead,
    }


def wrapped(text: Iterator[Parameter]) -> Iterator[Parameter]:
    """The text model's parameters under the names that they have beside a tower."""
    for parameter in text:
        yield replace(parameter, name=parameter.name.replace("model.", "model.language_model.", 1))


def tower_parameters(config: dict[str, Any]) -> Iterator[Parameter]:
    """`config`: of a model that sees."""
    tower = config["vision_config"]
    if tower["model_type"] == "gemma4_vision":
        yield from _gemma_parameters(tower, config["text_config"]["hidden_size"])
    else:
        yield from _qwen_parameters(tower)


def _gemma_parameters(tower: dict[str, Any], out: int) -> Iterator[Parameter]:
    hidden, inner, prefix = tower["hidden_size"], tower["intermediate_size"], "model.vision_tower"
    yield Parameter(f"{prefix}.patch_embedder.input_proj.weight", (hidden, 3 * tower["patch_size"] ** 2), "projection")
    table = (2, tower["position_embedding_size"], hidden)
    yield Parameter(f"{prefix}.patch_embedder.position_embedding_table", table, "embedding")
    for n in range(tower["num_hidden_layers"]):
        layer = f"{prefix}.encoder.layers.{n}"
        for half in ("input_layernorm", "post_attention_layernorm"):
            yield Parameter(f"{layer}.{half}.weight", (hidden,), "norm")
        for half in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield Parameter(f"{layer}.{half}.weight", (hidden,), "norm")
        for name in ("q", "k", "v", "o"):
            yield Parameter(f"{layer}.self_attn.{name}_proj.linear.weight", (hidden, hidden), "projection")
        for name in ("q", "k"):
            yield Parameter(f"{layer}.self_attn.{name}_norm.weight", (tower["head_dim"],), "small_norm")
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield Parameter(f"{layer}.mlp.{name}_proj.linear.weight", shape, "projection")
    if tower["standardize"]:
        yield Parameter(f"{prefix}.std_bias", (hidden,), "bias")
        yield Parameter(f"{prefix}.std_scale", (hidden,), "norm")
    yield Parameter("model.embed_vision.embedding_projection.weight", (out, hidden), "projection")


def _qwen_parameters(tower: dict[str, Any]) -> Iterator[Parameter]:
    hidden, inner, out = tower["hidden_size"], tower["intermediate_size"], tower["out_hidden_size"]
    merged, prefix = hidden * MERGE**2, "model.visual"

    def product(name: str, *shape: int) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}.{name}.weight", shape, "projection")
        yield Parameter(f"{prefix}.{name}.bias", shape[:1], "bias")

    def norm(name: str, size: int) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}.{name}.weight", (size,), "norm")
        yield Parameter(f"{prefix}.{name}.bias", (size,), "bias")

    def merger(name: str, normed: int) -> Iterator[Parameter]:
        yield from norm(f"{name}.norm", normed)
        yield from product(f"{name}.linear_fc1", merged, merged)
        yield from product(f"{name}.linear_fc2", out, merged)

    frames, patch = tower["temporal_patch_size"], tower["patch_size"]
    yield Parameter(f"{prefix}.patch_embed.proj.weight", (hidden, 3, frames, patch, patch), "kernel")
    yield Parameter(f"{prefix}.patch_embed.proj.bias", (hidden,), "bias")
    yield Parameter(f"{prefix}.pos_embed.weight", (tower["num_position_embeddings"], hidden), "embedding")
    for n in range(tower["depth"]):
        for name in ("norm1", "norm2"):
            yield from norm(f"blocks.{n}.{name}", hidden)
        yield from product(f"blocks.{n}.attn.qkv", 3 * hidden, hidden)
        yield from product(f"blocks.{n}.attn.proj", hidden, hidden)
        yield from product(f"blocks.{n}.mlp.linear_fc1", inner, hidden)
        yield from product(f"blocks.{n}.mlp.linear_fc2", hidden, inner)
    yield from merger("merger", hidden)
    for n in range(len(tower.get("deepstack_visual_indexes", ()))):
        yield from merger(f"deepstack_merger_list.{n}", merged)
