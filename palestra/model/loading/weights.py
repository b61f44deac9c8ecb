"""Model weights: safetensors files in, tensors laid out for the decoder out; and back again.

Owns: names, shapes, fusing of projections. Never touches: compute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from palestra.model.errors import WeightsError
from palestra.model.loading.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LayerWeights:
    input_norm: Tensor
    qkv: Tensor
    """q, k and v stacked: [q + 2 kv, hidden]. One product instead of three."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[q heads + kv heads, head_dim]: one normalisation for both."""
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    unembedding: Tensor
    """The embedding itself when tied."""


def read_weights(
    folder: str | Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderWeights:
    with WeightFiles(Path(folder)) as files:
        return _assemble(files, spec, dtype, torch.device(device))


class WeightFiles:
    """The shards of one folder as a single mapping of names; opens each file once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        self.file_of = _index(folder)

    def __enter__(self) -> WeightFiles:
        for file in dict.fromkeys(self.file_of.values()):
            self._handle(file)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        file = self.file_of.get(name)
        if file is None:
            raise WeightsError(
                f"{self.folder}: no tensor named {name!r} in the safetensors files; the config asks for it"
            )
        try:
            found = self._handle(file).get_tensor(name)
        except SafetensorError as e:
            raise WeightsError(f"{self.folder / file}: tensor {name!r} cannot be read ({e})") from None
        if shape is not None and tuple(found.shape) != shape:
            raise WeightsError(
                f"{self.folder / file}: tensor {name!r} has shape {list(found.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        if not found.is_floating_point():
            raise WeightsError(
                f"{self.folder / file}: tensor {name!r} has dtype {found.dtype}; supported: floating-point weights"
            )
        return found

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise WeightsError(f"{path}: this shard is missing, but the index names it; download it again")
            try:
                self._open[file] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as e:
                raise WeightsError(f"{path}: not a complete safetensors file ({e}); download it again") from None
        return self._open[file]


def _index(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise WeightsError(f"{index}: not a valid shard index ({e!r})") from None
    single = folder / "model.safetensors"
    if not single.is_file():
        raise WeightsError(
            f"{folder}: no model.safetensors and no model.safetensors.index.json; "
            "only safetensors weights are supported"
        )
    try:
        with safe_open(str(single), framework="pt") as f:
            return dict.fromkeys(f.keys(), single.name)
    except (SafetensorError, OSError) as e:
        raise WeightsError(f"{single}: not a complete safetensors file ({e}); download it again") from None


def _assemble(files: WeightFiles, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    h, q, kv, i = spec.hidden_size, spec.q_size, spec.kv_size, spec.intermediate_size

    def get(name: str, *shape: int) -> Tensor:
        return files.tensor(name, shape).to(device=device, dtype=dtype)

    def fused(prefix: str, parts: list[tuple[str, int]]) -> Tensor:
        return torch.cat([get(f"{prefix}.{part}.weight", size, h) for part, size in parts])

    def biases(prefix: str, parts: list[tuple[str, int]], present: bool) -> Tensor | None:
        return torch.cat([get(f"{prefix}.{part}.bias", size) for part, size in parts]) if present else None

    def layer(n: int) -> LayerWeights:
        attn, mlp, traits = f"model.layers.{n}.self_attn", f"model.layers.{n}.mlp", spec.traits
        qkv, gate_up = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)], [("gate_proj", i), ("up_proj", i)]
        qk_norm = None
        if traits.qk_norm:
            q_norm, k_norm = (get(f"{attn}.{x}_norm.weight", spec.head_dim) for x in "qk")
            qk_norm = torch.cat([q_norm.expand(spec.n_heads, -1), k_norm.expand(spec.n_kv_heads, -1)])
        return LayerWeights(
            input_norm=get(f"model.layers.{n}.input_layernorm.weight", h),
            qkv=fused(attn, qkv),
            qkv_bias=biases(attn, qkv, traits.qkv_bias),
            qk_norm=qk_norm,
            o=get(f"{attn}.o_proj.weight", h, q),
            o_bias=biases(attn, [("o_proj", h)], traits.o_bias),
            mlp_norm=get(f"model.layers.{n}.post_attention_layernorm.weight", h),
            gate_up=fused(mlp, gate_up),
            gate_up_bias=biases(mlp, gate_up, traits.mlp_bias),
            down=get(f"{mlp}.down_proj.weight", h, i),
            down_bias=biases(mlp, [("down_proj", h)], traits.mlp_bias),
        )

    embedding = get("model.embed_tokens.weight", spec.vocab_size, h)
    return DecoderWeights(
        embedding=embedding,
        layers=[layer(n) for n in range(spec.n_layers)],
        norm=get("model.norm.weight", h),
        unembedding=embedding if spec.tie_embeddings else get("lm_head.weight", spec.vocab_size, h),
    )
