#!/usr/bin/env python3
"""Model families, one line each: does Palestra compute what transformers computes?

    python tests/model/families_check.py                    # all that are supported; exit code 0 only if they pass
    python tests/model/families_check.py --families qwen3,qwen3_moe
    python tests/model/families_check.py --lora             # also LoRA gradients, against PEFT or autograd
    python tests/model/families_check.py --list             # and which ones are not supported yet
    python tests/model/families_check.py --verify-folders   # no Palestra: transformers must read back what was written

For each family a tiny model (under 1 M parameters) with seeded weights is written with transformers into a
temporary folder, in the layout of the published checkpoints, and opened with `palestra.model.load_model`. Compared
in float32:

  trainer   log-probabilities of the whole vocabulary at every position of ragged packed sequences
  sampler   greedy tokens and their log-probabilities: ragged prompts, a group of samples, a second turn that finds
            its first in the cache, small pages and chunks, and a cache so small that sequences are preempted
  lora      (--lora) the gradient of every A and B, and the log-probabilities under the adapter

Weights are redrawn so that nothing is neutral: norms, biases, sinks, routing biases and decays all differ from their
initial values, and a forgotten one shows. Only Palestra's public API is used (README, "The core as a library").
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCAB, HIDDEN, LAYERS = 512, 64, 4
LENGTHS = (5, 40, 17, 1, 150, 33, 40)  # past the windows (8), the delta net's chunks (64) and Mamba's (16)
PROMPTS = (3, 29, 70, 12, 1)
NEW_TOKENS = 12
TOLERANCE = 2e-4  # of a log-probability; or ten times what the reference itself differs by between float32 and 64
TIE = 1e-3  # two tokens this close may be swapped by rounding
RANK = 4

# ------------------------------------------------------------------ the families


@dataclass(frozen=True)
class Family:
    cls: str
    """The transformers class that is the truth."""
    config: dict[str, Any]
    layout: Callable[[dict[str, Tensor], dict[str, Any]], None] | None = None
    """Rewrites what transformers saved into what the hub has (weights and config.json, in place)."""
    prepare: Callable[[torch.nn.Module, dict[str, Tensor]], None] | None = None
    """Changes the reference's weights before saving and may leave tensors for `layout`."""
    mixes: str = ""
    """What it needs beyond the plain Llama block, in a few words."""


BASE = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN = BASE | GQA | {"head_dim": 16, "intermediate_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK_EXPERTS = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MROPE = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
QWEN3_VL = PLAIN | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 2, 2]}}
QWEN3_VL_VISION = VISION | {"depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 25}
QWEN3_5 = BASE | GQA | DELTA_NET | {"intermediate_size": 96, "rope_parameters": MROPE}
QWEN3_5_MOE = BASE | GQA | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 40, "rope_parameters": MROPE}
NEMOTRON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "layers_block_type": [
        "linear_attention",
        "moe",
        "full_attention",
        "moe",
        "mlp",
        "linear_attention",
        "full_attention",
        "moe",
    ],
    **GQA,
    "head_dim": 16,
    "intermediate_size": 96,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 40,
    "max_position_embeddings": 512,
    # transformers' chunked scan clamps dt at time_step_min, its one-step form does not: here neither does.
    "time_step_min": 1e-9,
    **DEEPSEEK_EXPERTS,
}
GEMMA4 = (
    BASE
    | GQA
    | {
        "head_dim": 16,
        "global_head_dim": 32,
        "intermediate_size": 96,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 30.0,
        "pad_token_id": 0,
    }
)
GEMMA4_SMALL = GEMMA4 | {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
}
GEMMA4_MOE = GEMMA4 | {
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 64,
}
GPT_OSS = (
    BASE
    | GQA
    | {
        "head_dim": 16,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    }
)


def fuse_experts(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """`experts.N.gate_proj.weight` … as one `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I]."""
    groups: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name in list(tensors):
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            groups.setdefault(found[1], {})[int(found[2]), found[3]] = tensors.pop(name)
    for prefix, parts in groups.items():
        count = 1 + max(number for number, _ in parts)
        gate_up = [torch.cat([parts[n, "gate_proj"], parts[n, "up_proj"]]) for n in range(count)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.down_proj"] = torch.stack([parts[n, "down_proj"] for n in range(count)])


def old_qwen3_moe(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """The spellings of the 2025 config files."""
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")


def add_mtp(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Multi-token-prediction weights, as published: to be ignored."""
    tensors["mtp.norm.weight"] = torch.ones(HIDDEN)
    tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.ones(96, HIDDEN)


def hub_qwen3_5_moe(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    fuse_experts(tensors, config)
    add_mtp(tensors, config)


def transpose_stacks(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """As published: transformers turns them when it loads them."""
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensors[name].mT


def glm_mtp(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """The prediction layer is stored as one layer more than there are."""
    tensors[f"model.layers.{LAYERS}.eh_proj.weight"] = torch.ones(HIDDEN, 2 * HIDDEN)
    tensors[f"model.layers.{LAYERS}.input_layernorm.weight"] = torch.ones(HIDDEN)


def old_gemma3(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    for name in ("layer_types", "_sliding_window_pattern"):
        config.pop(name, None)
    config["torch_dtype"] = config.pop("dtype")


def old_nemotron(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    kinds = config.pop("layers_block_type")
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def draw_mxfp4(model: torch.nn.Module, kept: dict[str, Tensor]) -> None:
    """Expert weights that MXFP4 holds exactly: codes and scales are drawn, the reference gets what they mean."""
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            n, inputs, outputs = parameter.shape
            draw = generator(name)
            blocks = torch.randint(0, 256, (n, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(121, 124, (n, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
            values = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(-2)
            values = values * torch.exp2(scales.float() - 127)[..., None]
            with torch.no_grad():
                parameter.copy_(values.flatten(-2).transpose(1, 2))
            kept[f"{name}_blocks"], kept[f"{name}_scales"] = blocks, scales


def hub_gpt_oss(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        del tensors[name]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    config["experts_per_token"] = config["num_experts_per_tok"]
    config["rope_scaling"] = dict(config.pop("rope_parameters"))
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")


@torch.no_grad()
def set_tower_buffers(model: torch.nn.Module, kept: dict[str, Tensor]) -> None:
    """Bounds that clamp some numbers, and what pooled features are shifted and scaled by."""
    for name, t in model.named_buffers():
        noise = torch.rand(t.shape, generator=generator(name))
        if name.endswith(("_min", "_max")):
            t.copy_((1.5 + noise) * (-1 if name.endswith("_min") else 1))
        elif name.endswith(("std_bias", "std_scale")):
            t.copy_(0.5 + noise)


SUPPORTED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_tied",
    "qwen3_5_text",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen3_moe_fused",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "nemotron_h",
    "nemotron_h_latent",
    "ministral3",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "seed_oss",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "gemma4_vision",
    "gemma4_moe_vision",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
)
"""Families that must pass; the others are not supported yet and are refused by name."""

FAMILIES: dict[str, Family] = {
    # What is supported since the first release.
    "llama": Family("LlamaForCausalLM", PLAIN),
    "mistral": Family("MistralForCausalLM", PLAIN | {"sliding_window": 8}),
    "qwen2": Family("Qwen2ForCausalLM", PLAIN),
    "qwen3": Family("Qwen3ForCausalLM", PLAIN | {"tie_word_embeddings": True}),
    # In the contract's order.
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": QWEN3_5, "vision_config": VISION},
        layout=add_mtp,
        mixes="delta net, gated attention, partial rope, (1+w) norms, nested config",
    ),
    "qwen3_5_tied": Family(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": QWEN3_5 | {"tie_word_embeddings": True}, "vision_config": VISION, "tie_word_embeddings": True},
        mixes="the same, tied",
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        {"text_config": QWEN3_VL, "vision_config": QWEN3_VL_VISION},
        mixes="qwen3 with three positions",
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": QWEN3_VL | {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
            "vision_config": QWEN3_VL_VISION,
        },
        layout=transpose_stacks,
        mixes="qwen3_vl with experts, whose stacks are transposed",
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", QWEN3_5, mixes="the same, text folder"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", PLAIN | EXPERTS | {"norm_topk_prob": True}, mixes="experts"),
    "qwen3_moe_mixed": Family(
        "Qwen3MoeForCausalLM",
        PLAIN | EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]},
        layout=old_qwen3_moe,
        mixes="experts and dense layers, old config spelling",
    ),
    "qwen3_moe_fused": Family(
        "Qwen3MoeForCausalLM", PLAIN | EXPERTS | {"norm_topk_prob": True}, layout=fuse_experts, mixes="experts, fused"
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": QWEN3_5_MOE, "vision_config": VISION},
        layout=hub_qwen3_5_moe,
        mixes="qwen3_5 with experts and a gated shared one",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        QWEN3_5_MOE
        | {"intermediate_size": 96, "rope_parameters": {k: v for k, v in MROPE.items() if k != "mrope_section"}},
        mixes="qwen3_5_moe with per-head fused projections",
    ),
    "gpt_oss": Family("GptOssForCausalLM", GPT_OSS, mixes="sinks, windows, yarn, clamped swiglu, biased experts"),
    "gpt_oss_mxfp4": Family(
        "GptOssForCausalLM", GPT_OSS, prepare=draw_mxfp4, layout=hub_gpt_oss, mixes="the same from MXFP4"
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM", NEMOTRON, layout=old_nemotron, mixes="Mamba-2, one mixer a layer, relu²"
    ),
    "nemotron_h_latent": Family(
        "NemotronHForCausalLM", NEMOTRON | {"moe_latent_size": 24}, mixes="experts in a latent"
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        BASE
        | GQA
        | {
            "head_dim": 32,
            "intermediate_size": 96,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
        },
        layout=old_gemma3,
        mixes="four norms, (1+w), scaled embeddings, gelu, two ropes",
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        GEMMA4_SMALL,
        mixes="per-layer inputs, shared keys, two head sizes, softcap",
    ),
    "gemma4_moe": Family(
        "Gemma4ForCausalLM",
        GEMMA4_MOE,
        mixes="experts beside the MLP, values from keys",
    ),
    "gemma4_vision": Family(
        "Gemma4ForConditionalGeneration",
        {"text_config": GEMMA4_SMALL, "vision_config": GEMMA4_VISION | {"use_clipped_linears": True}},
        prepare=set_tower_buffers,
        mixes="gemma4 with a tower whose products are clamped",
    ),
    "gemma4_moe_vision": Family(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": GEMMA4_MOE | {"use_bidirectional_attention": "vision"},
            "vision_config": GEMMA4_VISION | {"standardize": True},
        },
        prepare=set_tower_buffers,
        mixes="gemma4_moe with a tower; pictures look ahead",
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        BASE
        | GQA
        | DEEPSEEK_EXPERTS
        | {
            "head_dim": 16,
            "intermediate_size": 96,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        layout=glm_mtp,
        mixes="sigmoid routing with a bias, shared expert, partial rope",
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        BASE | DEEPSEEK_EXPERTS | MLA | {"num_attention_heads": 4, "intermediate_size": 96},
        mixes="MLA, sigmoid routing",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        BASE
        | DEEPSEEK_EXPERTS
        | MLA
        | {
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
        mixes="MLA, group-limited sigmoid routing, yarn with mscale",
    ),
    # One table entry each, more or less.
    "ministral3": Family(
        "Ministral3ForCausalLM",
        PLAIN
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
        mixes="queries scaled by position",
    ),
    "phi3": Family("Phi3ForCausalLM", PLAIN | {"partial_rotary_factor": 0.75}, mixes="stored fused, partial rope"),
    "olmo2": Family("Olmo2ForCausalLM", PLAIN, mixes="norms behind, qk norm over all heads"),
    "olmo3": Family("Olmo3ForCausalLM", PLAIN | {"sliding_window": 8}, mixes="olmo2 with windows and two ropes"),
    "smollm3": Family("SmolLM3ForCausalLM", PLAIN, mixes="every fourth layer without rope"),
    "granite": Family(
        "GraniteForCausalLM",
        PLAIN
        | {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
        },
        mixes="four multipliers",
    ),
    "seed_oss": Family("SeedOssForCausalLM", PLAIN, mixes="biases on q, k, v"),
    # For whoever asks.
    "llama4": Family(
        "Llama4ForCausalLM",
        PLAIN
        | {
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "floor_scale": 16,
        },
        mixes="chunked attention, layers without rope, input-scaled experts",
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        mixes="delta net with a decay per channel, MLA without rope",
    ),
    "inkling": Family(
        "InklingForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            **GQA,
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": 8,
            "d_rel": 4,
            "rel_extent": 32,
            "local_layer_ids": [0, 1, 2],
            "dense_mlp_idx": 1,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "logits_mup_width_multiplier": 2.0,
        },
        mixes="relative positions, short convolutions, shared experts in the softmax",
    ),
}

# ------------------------------------------------------------------ the reference


def generator(name: str, seed: int = 0) -> torch.Generator:
    """One per tensor: adding a tensor moves no other."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int) -> None:
    """Unit variance through every product; vectors keep their initial value, give or take 0.2."""
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        persistent = name in model.state_dict()
        if not persistent or not t.is_floating_point():
            continue
        noise = torch.randn(t.shape, generator=generator(name, seed))
        if name.endswith("A_log"):
            t.copy_(0.7 * noise - 2.0)  # slow decays: what came 50 tokens ago still counts
        elif t.ndim < 2:
            t.add_(0.2 * noise)
        elif "embed" in name or name.startswith("lm_head"):
            t.copy_(noise * 2.5 * t.shape[-1] ** -0.5)
        else:
            is_transposed = t.ndim == 3 and getattr(_owner(model, name), "is_transposed", False)
            fan_in = t.shape[1] if is_transposed else t[0].numel() if "conv" in name else t.shape[-1]
            t.copy_(noise * fan_in**-0.5)


def _owner(model: torch.nn.Module, name: str) -> torch.nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


@dataclass
class Reference:
    family: Family
    model: Any
    folder: Path
    noise: float = 0.0
    """How much its own float32 log-probabilities differ from its float64 ones."""
    _cache: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, family: Family, folder: Path, seed: int) -> Reference:
        import transformers
        from safetensors.torch import load_file, save_file

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model_class = getattr(transformers, family.cls)
        torch.manual_seed(seed)
        with contextlib.redirect_stderr(io.StringIO()):
            model = model_class(model_class.config_class(**family.config)).float().eval()
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")
            redraw(model, seed)
            kept: dict[str, Tensor] = {}
            if family.prepare:
                family.prepare(model, kept)
            model.save_pretrained(folder)
        if family.layout:
            config = json.loads((folder / "config.json").read_text())
            tensors = load_file(folder / "model.safetensors") | kept
            family.layout(tensors, config)
            (folder / "config.json").write_text(json.dumps(config, indent=2))
            tensors = {name: t.contiguous() for name, t in tensors.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        found = cls(family, model, folder)
        found.noise = found._own_noise()
        return found

    def logprobs(self, tokens: list[int]) -> Tensor:
        """[tokens, vocabulary], each sequence alone: no padding, no packing, no cache."""
        key = tuple(tokens)
        if key not in self._cache:
            with torch.no_grad():
                self._cache[key] = log_softmax(self.model, tokens)
        return self._cache[key]

    def _own_noise(self) -> float:
        tokens = sequences(LENGTHS[4:5])[0]
        narrow = self.logprobs(tokens)
        self.model.double()
        with torch.no_grad():
            wide = log_softmax(self.model, tokens)
        self.model.float()
        return (narrow.double() - wide.double()).abs().max().item()

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def log_softmax(model: Any, tokens: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


def sequences(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


# ------------------------------------------------------------------ the checks


class Mismatch(Exception):
    """Palestra ran and computed something else."""


def check_trainer(core: Any, truth: Reference) -> float:
    """The largest difference of a log-probability, over everything."""
    from palestra.model import TrainItem, encode
    from palestra.types import Datum

    everything = np.arange(VOCAB)
    tokens = sequences(LENGTHS)
    items = [
        TrainItem(None, Datum.of_tokens(s, target_tokens=encode(np.tile(everything, (len(s), 1))))) for s in tokens
    ]
    worst = 0.0
    for s, result in zip(tokens, core.trainer.forward(items), strict=True):
        off = (torch.from_numpy(result.logprobs) - truth.logprobs(s)).abs()
        if not torch.isfinite(off).all():
            raise Mismatch(f"a log-probability of a sequence of {len(s)} is not finite")
        if off.max() > allowed(truth):
            row = int((off.max(-1).values > allowed(truth)).nonzero()[0])
            raise Mismatch(f"trainer: sequence of {len(s)} is off by {off.max():.1e}, from position {row} on")
        worst = max(worst, off.max().item())
    return worst


def allowed(truth: Reference) -> float:
    return max(TOLERANCE, 10 * truth.noise)


def make_sampler(core: Any, **options: Any) -> Any:
    from palestra.model import Sampler

    try:
        return Sampler(core.model.decoder, core.pool, **options)
    except TypeError:  # the options have other names by now; the defaults will do
        return Sampler(core.model.decoder, core.pool)


def check_sampler(core: Any, truth: Reference) -> tuple[int, float]:
    """How many greedy tokens agreed, and the largest difference of their log-probabilities."""
    prompts = sequences(PROMPTS, seed=2)
    count, worst = 0, 0.0
    sampler = make_sampler(core, page_size=4, prefill_tokens=24, cache_tokens=2048)
    first = run_greedy(sampler, prompts, samples=3)
    for prompt, answers in zip(prompts, first, strict=True):
        for answer in answers:
            count, worst = judge("sampler", prompt, answer, truth, count, worst)
    again = run_greedy(sampler, prompts, samples=1)  # all of it is in the cache now
    if [a[0][0] for a in again] != [a[0][0] for a in first]:
        raise Mismatch("sampler: the same prompts gave other tokens when they were in the cache")
    extra = sequences((7,), seed=3)[0]
    turns = [p + a[0][0] + extra for p, a in zip(prompts, first, strict=True)]
    for prompt, answers in zip(turns, run_greedy(sampler, turns, samples=2), strict=True):
        for answer in answers:
            count, worst = judge("sampler, second turn", prompt, answer, truth, count, worst)
    tight = make_sampler(core, page_size=4, prefill_tokens=16, cache_tokens=120)
    crowded = run_greedy(tight, prompts, samples=2)
    for prompt, answers in zip(prompts, crowded, strict=True):
        for answer in answers:
            count, worst = judge("sampler, small cache", prompt, answer, truth, count, worst)
    return count, worst


def run_greedy(sampler: Any, prompts: list[list[int]], samples: int) -> list[list[tuple[list[int], list[float]]]]:
    from palestra.types import SampleRequest, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop_token_ids=(), seed=0)
    requests = [SampleRequest(prompt=tuple(p), num_samples=samples, params=params, raw_logprobs=True) for p in prompts]
    return [[(s.tokens, s.raw_logprobs) for s in r.sequences] for r in sampler.generate(requests)]


def judge(
    what: str, prompt: list[int], answer: tuple[list[int], list[float]], truth: Reference, count: int, worst: float
) -> tuple[int, float]:
    tokens, logprobs = answer
    if len(tokens) != NEW_TOKENS:
        raise Mismatch(f"{what}: {len(tokens)} tokens after a prompt of {len(prompt)}, {NEW_TOKENS} were asked for")
    expected = truth.logprobs(prompt + tokens[:-1])[len(prompt) - 1 :]
    for n, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        best = expected[n].max()
        if best - expected[n, token] > max(TIE, allowed(truth)):
            raise Mismatch(f"{what}: token {n} after a prompt of {len(prompt)} is not the likeliest one")
        off = abs(logprob - expected[n, token].item())
        if not off <= allowed(truth):
            raise Mismatch(f"{what}: log-probability of token {n} after a prompt of {len(prompt)} is off by {off:.1e}")
        worst = max(worst, off)
    return count + len(tokens), worst


# ------------------------------------------------------------------ LoRA


def check_lora(core: Any, truth: Reference, scratch: Path) -> tuple[float, str]:
    """The largest relative error of a gradient matrix, and who computed the truth.

    Gradients are read through the front door: with a huge epsilon Adam's first step is the gradient itself.
    """
    from palestra.model import TrainItem, encode, load_adapter, save_adapter
    from palestra.types import AdamParams, Datum, LoraConfig

    data = [(s[:-1], s[1:]) for s in sequences((6, 41, 22, 90), seed=4)]
    rng = np.random.default_rng(5)
    weights = [rng.normal(size=len(s)).astype(np.float32) for s, _ in data]

    def items(adapter: Any) -> list[Any]:
        return [
            TrainItem(adapter, Datum.of_tokens(s, target_tokens=encode(np.array(t)), weights=encode(w)))
            for (s, t), w in zip(data, weights, strict=True)
        ]

    adapter = core.pool.create(LoraConfig(rank=RANK, alpha=8.0, seed=3))
    for _ in range(3):  # B starts as zero, and with it the gradient of A
        core.trainer.forward_backward(items(adapter))
        core.trainer.optim_step({adapter: AdamParams(learning_rate=0.02)})
    save_adapter(adapter, scratch / "before")
    copy = load_adapter(core.pool, scratch / "before")
    results = core.trainer.forward_backward(items(copy))
    done = core.trainer.optim_step({copy: AdamParams(learning_rate=1e6, eps=1e6)})[copy]
    if done.error is not None:
        raise Mismatch(f"lora: {done.error}")
    save_adapter(copy, scratch / "after")
    before, after = (read_adapter(scratch / name) for name in ("before", "after"))
    ours = {name: before[name] - after[name] for name in before}

    theirs, logprobs, who = lora_truth(truth, scratch / "before", before, data, weights)
    for (s, _), result, expected in zip(data, results, logprobs, strict=True):
        off = np.abs(result.logprobs - expected).max()
        if not off <= allowed(truth):
            raise Mismatch(f"lora: log-probabilities under the adapter are off by {off:.1e} (sequence of {len(s)})")
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise Mismatch(f"lora: {len(odd)} matrices are only on one side, such as {odd[0]}")
    worst, name = max((relative(ours[n], theirs[n]), n) for n in ours)
    if worst > max(1e-3, 100 * truth.noise):
        raise Mismatch(f"lora: the gradient of {name} is off by {worst:.1e} of its norm ({who})")
    return worst, who


def relative(ours: Tensor, truth: Tensor) -> float:
    return (torch.linalg.norm(ours - truth) / torch.linalg.norm(truth).clamp_min(1e-3)).item()


def read_adapter(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: t.float() for name, t in load_file(folder / "adapter_model.safetensors").items() if ".lora_" in name}


def lora_truth(
    truth: Reference, folder: Path, matrices: dict[str, Tensor], data: list[Any], weights: list[np.ndarray]
) -> tuple[dict[str, Tensor], list[np.ndarray], str]:
    """Gradients and log-probabilities: by PEFT where every target is a linear layer of the reference, else by
    autograd through W + scale * B A, for Tinker's own names (experts.w1, in_proj_q) too."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    linear = {n for n, m in truth.model.named_modules() if isinstance(m, torch.nn.Linear)}
    if {module_of(name) for name in matrices} <= linear:
        import copy

        import peft

        model = peft.PeftModel.from_pretrained(copy.deepcopy(truth.model), str(folder), is_trainable=True)
        total, logprobs = weighted_loss(lambda s: log_softmax(model, s), data, weights)
        total.backward()
        grads = {n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if ".lora_" in n}
        return grads, logprobs, "PEFT"
    leaves = {name: t.clone().requires_grad_() for name, t in matrices.items()}
    changed = overlay(truth.model, leaves, scale, config)

    def run(tokens: list[int]) -> Tensor:
        kwargs = {"input_ids": torch.tensor([tokens]), "use_cache": False}
        logits = torch.func.functional_call(truth.model, changed, (), kwargs, tie_weights=False).logits[0]
        return torch.log_softmax(logits.float(), -1)

    total, logprobs = weighted_loss(run, data, weights)
    total.backward()
    grads = {name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in leaves.items()}
    return grads, logprobs, "autograd"


def weighted_loss(
    run: Callable[[list[int]], Tensor], data: list[Any], weights: list[np.ndarray]
) -> tuple[Tensor, list[np.ndarray]]:
    total, found = torch.zeros(()), []
    for (tokens, targets), w in zip(data, weights, strict=True):
        logprobs = run(tokens).gather(1, torch.tensor(targets)[:, None])[:, 0]
        total = total - (torch.from_numpy(w) * logprobs).sum()
        found.append(logprobs.detach().numpy())
    return total, found


def module_of(key: str) -> str:
    return re.sub(r"\.lora_[AB](\.weight)?$", "", key.removeprefix("base_model.model."))


SPLITS = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj": ("gate_proj", "x_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What may be trained apart where the checkpoint has rows of one matrix (Tinker does, for the first two)."""
EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def overlay(model: Any, leaves: dict[str, Tensor], scale: float, config: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters of the reference, changed by the adapter."""
    parameters = dict(model.named_parameters())
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, t in leaves.items():
        pairs.setdefault(module_of(key), {})["B" if ".lora_B" in key else "A"] = t
    deltas = {module: scale * _pattern(config, module) * (m["B"] @ m["A"]) for module, m in pairs.items()}
    changed: dict[str, Tensor] = {}
    for module, delta in deltas.items():
        name, change = _change(parameters, module, delta, deltas)
        base = parameters.get(name, model.get_input_embeddings().weight)  # a tied head is no parameter of its own
        changed[name] = changed.get(name, base) + change
    return changed


def _pattern(config: dict[str, Any], module: str) -> float:
    """PEFT's alpha_pattern and rank_pattern, relative to the plain scale."""
    leaf = module.rpartition(".")[2]
    alpha = (config.get("alpha_pattern") or {}).get(leaf, config["lora_alpha"]) / config["lora_alpha"]
    rank = (config.get("rank_pattern") or {}).get(leaf, config["r"]) / config["r"]
    return alpha / rank


def _change(parameters: dict[str, Tensor], module: str, delta: Tensor, deltas: dict[str, Tensor]) -> tuple[str, Tensor]:
    """Which parameter of the reference a module of the file changes, and by how much."""
    ours, _, leaf = module.rpartition(".")
    for head in (ours, ours.replace("model.", "model.language_model.", 1), ours.replace("backbone.", "model.", 1)):
        name = f"{head}.{leaf}.weight".removeprefix(".")
        if name in parameters or leaf == "lm_head":
            return name, delta
        found = re.fullmatch(r"(.*\.experts)(?:\.(\d+))?", head)
        if found and f"{found[1]}.down_proj" in parameters:
            return _expert_change(parameters, found[1], found[2], EXPERT_PARTS[leaf], delta)
        for whole, parts in SPLITS.items():
            name = f"{head}.{whole}.weight"
            if leaf in parts and name in parameters:
                start = sum(len(deltas[f"{ours}.{part}"]) for part in parts[: parts.index(leaf)])
                rows = torch.arange(start, start + len(delta))
                return name, torch.zeros_like(parameters[name]).index_add(0, rows, delta)
    raise Mismatch(f"lora: the file's {module} is no module of the reference")


def _expert_change(
    parameters: dict[str, Tensor], head: str, number: str | None, part: str, delta: Tensor
) -> tuple[str, Tensor]:
    """`delta`: [experts, out, in], or [out, in] of the expert `number`."""
    fused, up, down = (f"{head}.{name}" for name in ("gate_up_proj", "up_proj", "down_proj"))
    name = down if part == "down" else up if up in parameters else fused  # without a gate, w1 is the way up
    whole = parameters[name]
    if number is not None:
        delta = torch.zeros(len(whole), *delta.shape).index_add(0, torch.tensor([int(number)]), delta[None])
    _, out, inputs = delta.shape
    if name == fused and whole.shape[1:] == (2 * out, inputs):  # gate rows, then up rows
        rows = torch.arange(out) + (part == "up") * out
        return name, torch.zeros_like(whole).index_add(1, rows, delta)
    if name == fused:  # gpt-oss: [experts, in, 2 * out], gate and up in turn
        columns = torch.arange(int(part == "up"), 2 * out, 2)
        return name, torch.zeros_like(whole).index_add(2, columns, delta.mT)
    return name, delta if whole.shape[1:] == (out, inputs) else delta.mT


# ------------------------------------------------------------------ the report


@dataclass
class Core:
    model: Any
    pool: Any
    trainer: Any


def open_core(folder: Path) -> Core:
    from palestra.model import AdapterPool, Trainer, load_model

    model = load_model(folder, dtype="float32")
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=model.decoder.device)
    return Core(model, pool, Trainer(model.decoder, pool))


def check(name: str, *, seed: int, lora: bool) -> tuple[str, str]:
    """A verdict, and what there is to say about it."""
    from palestra.model import UnsupportedModel

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        truth = Reference.make(FAMILIES[name], folder, seed)
        try:
            core = open_core(folder)
            off = check_trainer(core, truth)
            count, sampled = check_sampler(core, truth)
            notes = f"max error {off:.1e} (reference {truth.noise:.0e}), {count} greedy tokens, theirs {sampled:.1e}"
            if lora:
                worst, who = check_lora(core, truth, Path(scratch))
                notes += f", gradients {worst:.1e} of {who}'s"
            return "ok", notes
        except UnsupportedModel as e:
            return "unsupported", one_line(e).partition("; supported")[0]
        except Mismatch as e:
            return "FAIL", one_line(e)
        except Exception as e:
            return "ERROR", f"{type(e).__name__}: {one_line(e)}"


def verify_folder(name: str, *, seed: int) -> tuple[str, str]:
    """That the folder is a true one: transformers reads it back to the same numbers."""
    import transformers

    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
        truth = Reference.make(family, Path(scratch) / "model", seed)
        tokens = sequences(LENGTHS[4:5])[0]
        model = getattr(transformers, family.cls).from_pretrained(
            truth.folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            off = (log_softmax(model.float().eval(), tokens) - truth.logprobs(tokens)).abs().max().item()
    size = f"{truth.n_parameters / 1e6:.2f} M parameters, reference noise {truth.noise:.0e}"
    return ("ok" if off <= allowed(truth) else "FAIL"), f"read back within {off:.1e}; {size}"


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"/tmp/\S*?/model/", "", text)
    return text if len(text) <= 150 else text[:149] + "…"


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--families", help="names, separated by commas; without it all that are supported")
    options.add_argument("--lora", action="store_true", help="compare LoRA gradients too")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--list", action="store_true", help="only say which families there are")
    options.add_argument("--verify-folders", action="store_true", help="check the folders with transformers alone")
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    default = FAMILIES if args.list or args.verify_folders else SUPPORTED
    names = [n.strip() for n in args.families.split(",") if n.strip()] if args.families else list(default)
    unknown = [n for n in names if n not in FAMILIES]
    if unknown:
        options.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(FAMILIES)}")
    if args.list:
        for name in names:
            state = "supported" if name in SUPPORTED else "not yet"
            print(f"{name:<18} {state:<10} {FAMILIES[name].cls:<36} {FAMILIES[name].mixes}")
        return 0
    passed = 0
    for name in names:
        start = time.perf_counter()
        try:
            if args.verify_folders:
                verdict, notes = verify_folder(name, seed=args.seed)
            else:
                verdict, notes = check(name, seed=args.seed, lora=args.lora)
        except Exception as e:  # the reference itself: this transformers has no such class, or another config
            verdict, notes = "NO REFERENCE", f"{type(e).__name__}: {one_line(e)}"
        passed += verdict == "ok"
        print(f"{name:<18} {verdict:<12} {notes} [{time.perf_counter() - start:.1f} s]", flush=True)
    print(f"{passed} of {len(names)} pass")
    return 0 if passed == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
