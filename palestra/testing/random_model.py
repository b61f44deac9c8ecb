"""Random models in real Hugging Face folders, for tests, benchmarks and demos."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from palestra.testing.random_config import SHAPES, is_hybrid, pick, random_config
from palestra.testing.random_parameter import Kind, Parameter
from palestra.testing.random_tokenizer import GEMMA_IMAGE_TOKENS, IMAGE_TOKENS, write_tokenizer
from palestra.testing.random_tower import seeing_family, tower_parameters, wrapped

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

OLMO = frozenset({"olmo2", "olmo3"})
NORMS_BEFORE = ("input_layernorm", "post_attention_layernorm")
NORMS_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA3, GEMMA4 = "gemma3_text", "gemma4_text"
NORMS = dict.fromkeys(OLMO, NORMS_AFTER) | {GEMMA3: (*NORMS_BEFORE, "pre_feedforward_layernorm", NORMS_AFTER[1])}
LOGIT_STD = 2.5  # 0.02 initialisation leaves logits within 0.3 of each other; this gives an entropy near ln(vocab) - 3


def make_random_model(
    folder: str | Path,
    *,
    family: str = "qwen3",
    shape: str = "micro",
    seed: int = 0,
    dtype: str = "float32",
    vocab_size: int | None = None,
    tie: bool | None = None,
    context: int | None = None,
    shards: int = 1,
    overrides: dict[str, Any] | None = None,
    has_weights: bool = True,
) -> Path:
    """Write a model that `transformers` loads. The weights depend on seed, names and shapes, not on shards; without
    them, the folder is for an engine that draws them itself.

    `overrides` replaces keys of config.json before the weights are made. With `rope_theta` or `rope_scaling` in it,
    the file has these older keys instead of `rope_parameters`.
    """
    if context is not None and context < 1:
        raise ValueError(f"context must be at least 1, not {context}")
    sizes = pick("shape", SHAPES, shape)
    sizes = replace(sizes, max_positions=context or sizes.max_positions)
    config = random_config(family, sizes, vocab_size, tie, overrides)
    torch_dtype = pick("dtype", DTYPES, dtype)
    if shards < 1:
        raise ValueError(f"shards must be at least 1, not {shards}")
    _split(list(parameters_of(config)), shards)  # refuses too many shards before anything is written
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text, seeing = config.get("text_config", config), seeing_family(config)
    images = () if seeing is None else GEMMA_IMAGE_TOKENS if seeing.is_gemma else IMAGE_TOKENS
    ids = write_tokenizer(folder, text["vocab_size"], text["max_position_embeddings"], images=images)
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": ids.turn_end, "pad_token_id": ids.end_of_text}
    if seeing is not None and ids.image is not None:
        start, end = ("boi", "eoi") if seeing.is_gemma else ("vision_start", "vision_end")
        image = {f"{start}_token_id": ids.image.start, f"{end}_token_id": ids.image.end}
        tokens |= {"image_token_id": ids.image.image} | image
        _write_json(folder / "preprocessor_config.json", seeing.preprocessor)
    _write_json(folder / "config.json", tokens | config | {"dtype": dtype})
    _write_json(
        folder / "generation_config.json",
        {"do_sample": True, "eos_token_id": [ids.turn_end, ids.end_of_text], "pad_token_id": ids.end_of_text},
    )
    if has_weights:
        _write_weights(folder, config, seed, torch_dtype, shards)
    return folder


def parameters_of(config: dict[str, Any]) -> Iterator[Parameter]:
    """Names and shapes as the family's published checkpoints have them."""
    if "vision_config" in config:
        yield from wrapped(parameters_of(config["text_config"]))
        yield from tower_parameters(config)
        return
    if "layers_block_type" in config:
        yield from _nemotron_parameters(config)
        return
    if config["model_type"] == GEMMA4:
        yield from _gemma4_parameters(config)
        return
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    norm = "offset_norm" if is_hybrid(config) or config["model_type"] == GEMMA3 else "norm"
    mlp_bias = bool(config.get("mlp_bias"))
    yield Parameter("model.embed_tokens.weight", (config["vocab_size"], hidden), "embedding")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in NORMS.get(config["model_type"], NORMS_BEFORE):
            yield Parameter(f"{prefix}.{name}.weight", (hidden,), norm)
        if (config.get("layer_types") or {layer: None})[layer] == "linear_attention":
            yield from _delta_net_parameters(config, f"{prefix}.linear_attn")
        elif "kv_lora_rank" in config:
            yield from _latent_parameters(config, f"{prefix}.self_attn")
        else:
            yield from _attention_parameters(config, f"{prefix}.self_attn", norm)
        if config["model_type"] == "gpt_oss":
            yield from _gpt_oss_parameters(config, prefix)
        elif "n_routed_experts" in config and layer >= config["first_k_dense_replace"]:
            yield from _sigmoid_expert_parameters(config, f"{prefix}.mlp")
        elif "num_experts" in config and layer not in config.get("mlp_only_layers", ()):
            yield from _expert_parameters(config, f"{prefix}.mlp")
        elif config["model_type"] == "phi3":
            yield Parameter(f"{prefix}.mlp.gate_up_proj.weight", (2 * inner, hidden), "projection")
            yield Parameter(f"{prefix}.mlp.down_proj.weight", (hidden, inner), "projection")
        else:
            yield from _mlp_parameters(f"{prefix}.mlp", hidden, inner, mlp_bias)
    yield Parameter("model.norm.weight", (hidden,), norm)
    if not config["tie_word_embeddings"]:
        yield Parameter("lm_head.weight", (config["vocab_size"], hidden), "embedding")


def _gemma4_parameters(config: dict[str, Any]) -> Iterator[Parameter]:
    hidden, n, width = (config[f] for f in ("hidden_size", "num_hidden_layers", "hidden_size_per_layer_input"))
    yield Parameter("model.embed_tokens.weight", (config["vocab_size"], hidden), "embedding")
    if width:
        yield Parameter("model.embed_tokens_per_layer.weight", (config["vocab_size"], n * width), "embedding")
        yield Parameter("model.per_layer_model_projection.weight", (n * width, hidden), "projection")
        yield Parameter("model.per_layer_projection_norm.weight", (width,), "norm")
    n_own = n - config.get("num_kv_shared_layers", 0)
    for layer in range(n):
        prefix, is_own = f"model.layers.{layer}", layer < n_own
        for name in (*NORMS_BEFORE, "pre_feedforward_layernorm", NORMS_AFTER[1]):
            yield Parameter(f"{prefix}.{name}.weight", (hidden,), "norm")
        yield from _gemma4_attention(config, layer, is_own)
        is_wide = config.get("use_double_wide_mlp") and not is_own
        yield from _mlp_parameters(f"{prefix}.mlp", hidden, config["intermediate_size"] * (2 if is_wide else 1))
        if config.get("enable_moe_block"):
            yield from _gemma4_experts(config, prefix)
        if width:
            yield Parameter(f"{prefix}.per_layer_input_gate.weight", (width, hidden), "projection")
            yield Parameter(f"{prefix}.per_layer_projection.weight", (hidden, width), "projection")
            yield Parameter(f"{prefix}.post_per_layer_input_norm.weight", (hidden,), "norm")
        yield Parameter(f"{prefix}.layer_scalar", (1,), "norm")
    yield Parameter("model.norm.weight", (hidden,), "norm")
    if not config["tie_word_embeddings"]:
        yield Parameter("lm_head.weight", (config["vocab_size"], hidden), "embedding")


def _gemma4_attention(config: dict[str, Any], layer: int, is_own: bool) -> Iterator[Parameter]:
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}.self_attn"
    is_full = config["layer_types"][layer] == "full_attention"
    is_joined = is_full and config.get("attention_k_eq_v")
    dim = config["global_head_dim" if is_full else "head_dim"]
    keys = config["num_global_key_value_heads" if is_joined else "num_key_value_heads"] * dim
    queries = config["num_attention_heads"] * dim
    shapes = {"q": (queries, hidden), "o": (hidden, queries)}
    yield Parameter(f"{prefix}.q_norm.weight", (dim,), "small_norm")
    if is_own:
        yield Parameter(f"{prefix}.k_norm.weight", (dim,), "small_norm")
        shapes |= {"k": (keys, hidden)} if is_joined else {"k": (keys, hidden), "v": (keys, hidden)}
    yield from _projections(prefix, shapes, dict.fromkeys(shapes, False))


def _gemma4_experts(config: dict[str, Any], prefix: str) -> Iterator[Parameter]:
    hidden, n, size = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        yield Parameter(f"{prefix}.{name}.weight", (hidden,), "norm")
    yield Parameter(f"{prefix}.router.proj.weight", (n, hidden), "projection")
    yield Parameter(f"{prefix}.router.scale", (hidden,), "norm")
    yield Parameter(f"{prefix}.router.per_expert_scale", (n,), "norm")
    yield Parameter(f"{prefix}.experts.gate_up_proj", (n, 2 * size, hidden), "projection")
    yield Parameter(f"{prefix}.experts.down_proj", (n, hidden, size), "projection")


def _nemotron_parameters(config: dict[str, Any]) -> Iterator[Parameter]:
    hidden, vocab = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    yield Parameter("backbone.embeddings.weight", vocab, "embedding")
    for n, kind in enumerate(config["layers_block_type"]):
        prefix = f"backbone.layers.{n}"
        yield Parameter(f"{prefix}.norm.weight", (hidden,), "norm")
        match kind:
            case "linear_attention":
                yield from _mamba_parameters(config, f"{prefix}.mixer")
            case "full_attention":
                yield from _attention_parameters(config, f"{prefix}.mixer", "norm")
            case "moe":
                yield from _sigmoid_expert_parameters(config, f"{prefix}.mixer")
            case _:
                yield from _plain_mlp_parameters(f"{prefix}.mixer", hidden, config["intermediate_size"])
    yield Parameter("backbone.norm_f.weight", (hidden,), "norm")
    if not config["tie_word_embeddings"]:
        yield Parameter("lm_head.weight", vocab, "embedding")


def _mamba_parameters(config: dict[str, Any], prefix: str) -> Iterator[Parameter]:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    yield Parameter(f"{prefix}.in_proj.weight", (inner + channels + heads, hidden), "projection")
    yield Parameter(f"{prefix}.out_proj.weight", (hidden, inner), "projection")
    yield Parameter(f"{prefix}.conv1d.weight", (channels, 1, config["conv_kernel"]), "conv")
    yield Parameter(f"{prefix}.conv1d.bias", (channels,), "bias")
    yield Parameter(f"{prefix}.A_log", (heads,), "log_decay")
    yield Parameter(f"{prefix}.D", (heads,), "norm")
    yield Parameter(f"{prefix}.dt_bias", (heads,), "norm")
    yield Parameter(f"{prefix}.norm.weight", (inner,), "norm")


def _attention_parameters(config: dict[str, Any], prefix: str, norm: Kind) -> Iterator[Parameter]:
    hidden, dim, family = config["hidden_size"], config["head_dim"], config["model_type"]
    queries, keys = (config[f"num_{x}_heads"] * dim for x in ("attention", "key_value"))
    gated = queries * (2 if is_hybrid(config) else 1)
    bias = bool(config.get("attention_bias"))
    qkv_bias = family == "qwen2" or bias
    if family == "phi3":
        yield Parameter(f"{prefix}.qkv_proj.weight", (queries + 2 * keys, hidden), "projection")
        yield Parameter(f"{prefix}.o_proj.weight", (hidden, queries), "projection")
        return
    if family in OLMO:
        yield Parameter(f"{prefix}.q_norm.weight", (queries,), norm)
        yield Parameter(f"{prefix}.k_norm.weight", (keys,), norm)
    elif (
        family in ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", GEMMA3)
        or is_hybrid(config)
        or config.get("use_qk_norm")
    ):
        yield Parameter(f"{prefix}.q_norm.weight", (dim,), norm)
        yield Parameter(f"{prefix}.k_norm.weight", (dim,), norm)
    shapes = {"q": (gated, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    o_bias = bool(config.get("attention_out_bias", bias)) and family != "glm4_moe"
    yield from _projections(prefix, shapes, {"q": qkv_bias, "k": qkv_bias, "v": qkv_bias, "o": o_bias})


def _latent_parameters(config: dict[str, Any], prefix: str) -> Iterator[Parameter]:
    hidden, heads, kv, turned = (
        config[f] for f in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    plain, values, q = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    shapes = {
        "q_a_proj": (q, hidden),
        "q_b_proj": (heads * (plain + turned), q),
        "kv_a_proj_with_mqa": (kv + turned, hidden),
        "kv_b_proj": (heads * (plain + values), kv),
        "o_proj": (hidden, heads * values),
    }
    if q is None:
        del shapes["q_a_proj"], shapes["q_b_proj"]
        shapes["q_proj"] = (heads * (plain + turned), hidden)
    else:
        yield Parameter(f"{prefix}.q_a_layernorm.weight", (q,), "norm")
    yield Parameter(f"{prefix}.kv_a_layernorm.weight", (kv,), "norm")
    for name, shape in shapes.items():
        yield Parameter(f"{prefix}.{name}.weight", shape, "projection")


def _mlp_parameters(prefix: str, hidden: int, inner: int, has_bias: bool = False) -> Iterator[Parameter]:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    yield from _projections(prefix, shapes, dict.fromkeys(shapes, has_bias))


def _plain_mlp_parameters(prefix: str, hidden: int, inner: int) -> Iterator[Parameter]:
    """Yields the parameters of an MLP without a gate."""
    shapes = {"up": (inner, hidden), "down": (hidden, inner)}
    yield from _projections(prefix, shapes, dict.fromkeys(shapes, False))


def _expert_parameters(config: dict[str, Any], prefix: str) -> Iterator[Parameter]:
    hidden, n, size = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    yield Parameter(f"{prefix}.gate.weight", (n, hidden), "projection")
    if config["model_type"] == "qwen3_vl_moe_text":
        yield Parameter(f"{prefix}.experts.gate_up_proj", (n, hidden, 2 * size), "projection")
        yield Parameter(f"{prefix}.experts.down_proj", (n, size, hidden), "projection")
    elif config["model_type"] == "qwen3_5_moe_text":
        yield Parameter(f"{prefix}.experts.gate_up_proj", (n, 2 * size, hidden), "projection")
        yield Parameter(f"{prefix}.experts.down_proj", (n, hidden, size), "projection")
    else:
        for expert in range(n):
            yield from _mlp_parameters(f"{prefix}.experts.{expert}", hidden, size)
    if shared := config.get("shared_expert_intermediate_size"):
        yield from _mlp_parameters(f"{prefix}.shared_expert", hidden, shared)
        yield Parameter(f"{prefix}.shared_expert_gate.weight", (1, hidden), "projection")


def _sigmoid_expert_parameters(config: dict[str, Any], prefix: str) -> Iterator[Parameter]:
    hidden, n, size = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    yield Parameter(f"{prefix}.gate.weight", (n, hidden), "projection")
    yield Parameter(f"{prefix}.gate.e_score_correction_bias", (n,), "bias")
    if config["model_type"] != "nemotron_h":
        for expert in range(n):
            yield from _mlp_parameters(f"{prefix}.experts.{expert}", hidden, size)
        yield from _mlp_parameters(f"{prefix}.shared_experts", hidden, size * config["n_shared_experts"])
        return
    latent = config.get("moe_latent_size")
    for expert in range(n):
        yield from _plain_mlp_parameters(f"{prefix}.experts.{expert}", latent or hidden, size)
    yield from _plain_mlp_parameters(f"{prefix}.shared_experts", hidden, config["moe_shared_expert_intermediate_size"])
    if latent is not None:
        yield Parameter(f"{prefix}.fc1_latent_proj.weight", (latent, hidden), "projection")
        yield Parameter(f"{prefix}.fc2_latent_proj.weight", (hidden, latent), "projection")


def _gpt_oss_parameters(config: dict[str, Any], prefix: str) -> Iterator[Parameter]:
    hidden, n, size = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    yield Parameter(f"{prefix}.self_attn.sinks", (config["num_attention_heads"],), "norm")
    yield Parameter(f"{prefix}.mlp.router.weight", (n, hidden), "projection")
    yield Parameter(f"{prefix}.mlp.router.bias", (n,), "bias")
    for name, shape in {"gate_up_proj": (hidden, 2 * size), "down_proj": (size, hidden)}.items():
        yield Parameter(f"{prefix}.mlp.experts.{name}", (n, *shape), "projection")
        yield Parameter(f"{prefix}.mlp.experts.{name}_bias", (n, shape[1]), "bias")


def _projections(prefix: str, shapes: dict[str, tuple[int, int]], biased: dict[str, bool]) -> Iterator[Parameter]:
    for name, shape in shapes.items():
        yield Parameter(f"{prefix}.{name}_proj.weight", shape, "projection")
        if biased[name]:
            yield Parameter(f"{prefix}.{name}_proj.bias", shape[:1], "bias")


def _delta_net_parameters(config: dict[str, Any], prefix: str) -> Iterator[Parameter]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values, channels = heads * config["linear_value_head_dim"], 2 * keys + heads * config["linear_value_head_dim"]
    rows = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    if config["model_type"] == "qwen3_next":
        rows = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * heads}
    for name, n in rows.items():
        yield Parameter(f"{prefix}.{name}.weight", (n, hidden), "projection")
    yield Parameter(f"{prefix}.out_proj.weight", (hidden, values), "projection")
    yield Parameter(f"{prefix}.conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"]), "conv")
    yield Parameter(f"{prefix}.A_log", (heads,), "log_decay")
    yield Parameter(f"{prefix}.dt_bias", (heads,), "norm")
    yield Parameter(f"{prefix}.norm.weight", (config["linear_value_head_dim"],), "norm")


def draw(parameter: Parameter, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Draws in float32; each kind of device has numbers of its own."""
    # A generator per tensor: neither the order of writing nor another tensor's size moves the others.
    digest = hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    noise = torch.randn(parameter.shape, generator=generator, device=device)
    match parameter.kind:
        case "norm":
            return noise.mul_(0.1).add_(1.0)  # not 1, so that a forgotten norm weight shows
        case "small_norm":
            return noise.mul_(0.05).add_(0.5)  # without another scale on scores, each query would see one key only
        case "bias" | "offset_norm":  # 1 is added to the norm's
            return noise.mul_(0.1)
        case "conv":
            return noise.mul_(parameter.shape[-1] ** -0.5)
        case "kernel":
            return noise.mul_(math.prod(parameter.shape[1:]) ** -0.5)
        case "log_decay":
            return noise.mul_(0.7).sub_(2.0)  # slow: what came 50 tokens ago still counts
        case "embedding":
            return noise.mul_(LOGIT_STD * parameter.shape[1] ** -0.5)
        case "projection":
            # Unit variance through each layer: their sum outweighs the embedding in the residual stream, without
            # which a model with tied embeddings would only ever repeat its last token.
            return noise.mul_(parameter.shape[-1] ** -0.5)


def _write_weights(folder: Path, config: dict[str, Any], seed: int, dtype: torch.dtype, shards: int) -> None:
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    parts = _split(list(parameters_of(config)), shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        # One shard in memory at a time.
        tensors = {parameter.name: draw(parameter, seed).to(dtype) for parameter in part}
        name = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if shards > 1:
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _split(parameters: list[Parameter], shards: int) -> list[list[Parameter]]:
    """Consecutive runs of about the same number of tensors; no run is empty."""
    if shards > len(parameters):
        raise ValueError(f"{shards} shards for {len(parameters)} tensors")
    bounds = [len(parameters) * number // shards for number in range(shards + 1)]
    return [parameters[start:end] for start, end in pairwise(bounds)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
