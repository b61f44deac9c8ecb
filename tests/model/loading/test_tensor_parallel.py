"""Parts of a model and of its adapters: what all ranks have together is the whole, and what each has is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.model import UnsupportedModel
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.tensor_parallel import TensorShard
from palestra.model.loading.weights import read_weights
from palestra.model.lora.layout import Layout, LayoutPart
from palestra.types import LoraConfig

INDIVISIBLE = {
    "qwen3_5": "recurrent layers",
    "deepseek_v3": "latent attention",
    "olmo2": "normalised over all heads",
    "gemma4_moe": "beside a dense network",
    "phi3": "queries, keys and values in one matrix",
}


def joined(parts: list[Tensor], whole: Tensor, sizes: list[int] | None = None) -> Tensor:
    """The parts side by side where inputs are divided, and projection by projection where outputs are."""
    if parts[0].shape[-1] < whole.shape[-1]:
        return torch.cat(parts, -1)
    counts = [size // len(parts) for size in sizes or [whole.shape[-2]]]
    by_projection = zip(*(part.split(counts, -2) for part in parts), strict=True)
    return torch.cat([part for projection in by_projection for part in projection], -2)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe", "gpt_oss"])
def test_parts_of_all_ranks_are_the_whole_weights(random_model: Any, family: str) -> None:
    folder = random_model(family)
    spec = ModelSpec.from_folder(folder)
    whole: Any = read_weights(folder, spec, torch.float32)
    ranks: list[Any] = [read_weights(folder, spec, torch.float32, tensor=TensorShard(n, 2)) for n in range(2)]
    heads = [spec.q_size, spec.kv_size, spec.kv_size]
    for n, layer in enumerate(whole.layers):
        mixers, mlps = [rank.layers[n].mixer for rank in ranks], [rank.layers[n].mlp for rank in ranks]
        width = layer.mlp.down.shape[-1]
        for parts, expected, sizes in (
            ([m.qkv for m in mixers], layer.mixer.qkv, heads),
            ([m.o for m in mixers], layer.mixer.o, None),
            ([m.gate_up for m in mlps], layer.mlp.gate_up, [width, width]),
            ([m.down for m in mlps], layer.mlp.down, None),
        ):
            assert torch.equal(joined(parts, expected, sizes), expected)
        if layer.mixer.qkv_bias is not None:
            parts = [m.qkv_bias[:, None] for m in mixers]
            assert torch.equal(joined(parts, layer.mixer.qkv_bias[:, None], heads)[:, 0], layer.mixer.qkv_bias)
        if layer.mixer.o_bias is not None:  # added once
            assert torch.equal(mixers[0].o_bias, layer.mixer.o_bias)
            assert mixers[1].o_bias is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("per_expert", [False, True])
def test_a_rank_has_its_part_of_an_adapter_and_all_have_the_whole(
    random_model: Any, family: str, per_expert: bool
) -> None:
    spec, config = ModelSpec.from_folder(random_model(family)), LoraConfig(rank=4, per_expert=per_expert)
    whole = Layout.of(spec, config)
    row, written = torch.randn(whole.size), []
    for rank in range(2):
        share = TensorShard(rank, 2)
        part = LayoutPart(share, whole, Layout.of(share.spec(spec), config))
        own, back = torch.zeros(part.own.size), torch.ones(whole.size)
        part.read(row, own)
        part.write(own, back)
        assert ((back == row) | (back == 0)).all()
        written.append(back)
    assert ((written[0] == row) | (written[1] == row)).all()
    head = whole.matrices(written[1])["lm_head.lora_B.weight"]
    assert not head.any()  # both compute all of it, and the first one's counts
    b = whole.matrices(written[1])["model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert not b[: len(b) // 2].any()
    assert b[len(b) // 2 :].all()


@pytest.mark.parametrize("family", INDIVISIBLE)
def test_a_model_that_cannot_be_divided_is_refused_with_what_works(random_model: Any, family: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{INDIVISIBLE[family]}.*parallel\.shard.*sampler=vllm"):
        TensorShard(0, 2).spec(ModelSpec.from_folder(random_model(family)))


def test_more_ranks_than_heads_are_refused(micro_model: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"it has 2 heads of keys and values.*choose a smaller number"):
        TensorShard(0, 4).spec(ModelSpec.from_folder(micro_model))
