"""The small model that sees, in the layout of Qwen3-VL, and its pass over pictures of one size."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from palestra.environments.bundled.drawings.scenes import SIDE
from palestra.testing.random_tokenizer import TokenizerIds

PATCH = 16
GRID = SIDE // PATCH
POSITIONS = GRID**2
CONTEXT = 512
EPS = 1e-6


def make_model(ids: TokenizerIds, vocab: int, width: int, layers: int, depth: int) -> Qwen3VLForConditionalGeneration:
    assert ids.image is not None
    text = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 3 * width,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids.turn_end,
        "pad_token_id": ids.end_of_text,
    }
    tower = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": 1,
        "temporal_patch_size": 2,
        "out_hidden_size": width,
        "num_position_embeddings": POSITIONS,
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids.image.image,
        vision_start_token_id=ids.image.start,
        vision_end_token_id=ids.image.end,
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


def features_of(model: Qwen3VLForConditionalGeneration, pixels: Tensor) -> Tensor:
    """Features [pictures, positions, width] of pixels [pictures, side, side, 3], for all pictures at once: the tower of
    transformers reads one after the other. Patches are the positions, so no learned position is interpolated."""
    tower = model.model.visual
    count = len(pixels)
    patches = pixels.view(count, GRID, PATCH, GRID, PATCH, 3).permute(0, 1, 3, 5, 2, 4).reshape(count, POSITIONS, -1)
    kernel = tower.patch_embed.proj
    rows = F.linear(patches, kernel.weight.sum(2).flatten(1), kernel.bias) + tower.pos_embed.weight
    places = torch.arange(POSITIONS)
    head = rows.shape[-1] // tower.blocks[0].attn.num_heads
    steps = 10_000.0 ** -(torch.arange(0, head // 2, 2) / (head // 2))
    angles = torch.cat([(places // GRID)[:, None] * steps, (places % GRID)[:, None] * steps], -1).repeat(1, 2)
    for block in tower.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(rows)).view(count, POSITIONS, 3, -1, head).permute(2, 0, 3, 1, 4)
        query, key = turned(qkv[0], angles), turned(qkv[1], angles)
        mixed = F.scaled_dot_product_attention(query, key, qkv[2]).transpose(1, 2).flatten(2)
        rows = rows + attention.proj(mixed)
        rows = rows + block.mlp(block.norm2(rows))
    return tower.merger(rows.flatten(0, 1)).view(count, POSITIONS, -1)


def turned(heads: Tensor, angles: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def positions_of(tokens: Tensor, image: int) -> Tensor:
    """[3, length]: time, height and width; those of a picture have one time, and text goes on behind the largest."""
    found, at, place = [], 0, 0
    for token in tokens.tolist():
        if token == image:
            found.append((at, at + place // GRID, at + place % GRID))
            place += 1
        else:
            if place:
                at, place = at + GRID, 0
            found.append((at, at, at))
            at += 1
    return torch.tensor(found).T


def write_model(model: Qwen3VLForConditionalGeneration, folder: Path, ids: TokenizerIds) -> None:
    """Weights and config; the tokenizer's files are there already."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "compute_dtype": "float32",  # for Palestra; other libraries compute in the dtype of the files
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    preprocessor = {
        "do_convert_rgb": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": 1,
        "patch_size": PATCH,
        "size": {"shortest_edge": PATCH**2, "longest_edge": SIDE**2},
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")
    ends = {"eos_token_id": [ids.turn_end, ids.end_of_text], "pad_token_id": ids.end_of_text, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
