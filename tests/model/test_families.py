"""Every supported architecture against transformers and PEFT: the same numbers on random weights."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from palestra.model import TrainItem
from palestra.model.loading.weights import by_halves
from palestra.model.lora.adapter_names import WHOLES
from palestra.model.mlp.routing import Routing
from palestra.model.sampling.routing_cache import routed_experts
from palestra.types import AdamParams
from tests.model.conftest import GEMMA4, Bench

LENGTHS = (5, 40, 17, 40, 1, 64, 33)


def rope(kind: str, **parameters: float) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
GQA_FREE = {"num_key_value_heads": 4}

MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "llama_4_scaling_beta": 0.5} | YARN
LONGROPE = {
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
        "long_factor": [2.0, 2.2, 2.6, 3.2, 4.0, 5.0],
        "original_max_position_embeddings": 128,
    },
}
CASES: dict[str, dict] = {
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tie": True},
    "qwen3-biases": {"family": "qwen3", "overrides": {"attention_bias": True}},
    "qwen3-wide-heads": {"family": "qwen3", "overrides": {"head_dim": 24, "num_key_value_heads": 1}},
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie": True},
    "qwen2-windows": {
        "family": "qwen2",
        "overrides": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    },
    "qwen2-windows-old": {  # before transformers wrote layer_types
        "family": "qwen2",
        "overrides": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
    },
    "qwen2-windows-off": {
        "family": "qwen2",
        "overrides": {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0, "layer_types": None},
    },
    "llama2": {"family": "llama", "overrides": GQA_FREE},
    "llama-tied": {"family": "llama", "tie": True},
    "llama-biases": {"family": "llama", "overrides": {"attention_bias": True, "mlp_bias": True}},
    "llama-sharded": {"family": "llama", "shards": 4},
    "llama3": {"family": "llama", "overrides": rope("llama3", **LLAMA3)},
    "linear": {"family": "llama", "overrides": rope("linear", factor=4.0)},
    "yarn": {"family": "llama", "overrides": rope("yarn", **YARN)},
    "yarn-settings": {
        "family": "qwen3",
        "overrides": rope("yarn", **YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3, truncate=False),
    },
    "yarn-mscale": {"family": "llama", "overrides": rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.1)},
    "old-theta": {"family": "qwen3", "overrides": {"rope_theta": 500.0}},
    "old-linear": {"family": "llama", "overrides": {"rope_scaling": {"type": "linear", "factor": 2.0}}},
    "old-llama3": {
        "family": "llama",
        "overrides": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    },
    "old-yarn": {"family": "qwen2", "overrides": {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}}},
    "qwen3_5": {"family": "qwen3_5"},
    "qwen3_5-tied": {"family": "qwen3_5", "tie": True, "overrides": {"linear_num_key_heads": 2}},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_moe-mixed": {"family": "qwen3_moe", "overrides": {"mlp_only_layers": [1]}},
    "qwen3_5_moe": {"family": "qwen3_5_moe"},
    "qwen3_next": {"family": "qwen3_next", "overrides": {"linear_num_key_heads": 2}},
    "gpt_oss": {"family": "gpt_oss", "overrides": {"sliding_window": 8}},
    "qwen3_moe-shares": {"family": "qwen3_moe", "tie": True, "overrides": {"norm_topk_prob": False}},
    "ministral3": {"family": "ministral3", "overrides": {"rope_parameters": MINISTRAL_ROPE}},
    "phi3": {"family": "phi3"},
    "phi3-longrope": {"family": "phi3", "overrides": LONGROPE},
    "olmo2": {"family": "olmo2", "overrides": {"attention_bias": True}},
    "olmo3": {"family": "olmo3", "overrides": {"sliding_window": 8}},
    "smollm3": {"family": "smollm3", "tie": True},
    "granite": {"family": "granite"},
    "granite-tied": {"family": "granite", "tie": True},
    "gemma3": {"family": "gemma3", "tie": True, "overrides": {"sliding_window": 8, "query_pre_attn_scalar": 24}},
    "gemma4": {"family": "gemma4", "tie": True, "overrides": GEMMA4},
    "gemma4_moe": {"family": "gemma4_moe", "tie": True, "overrides": {"sliding_window": 8}},
    "glm4_moe": {"family": "glm4_moe", "overrides": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}},
    "glm4_moe_lite": {"family": "glm4_moe_lite"},
    "glm4_moe_lite-whole-queries": {"family": "glm4_moe_lite", "overrides": {"q_lora_rank": None}},
    "deepseek_v3": {"family": "deepseek_v3"},
    "nemotron_h": {"family": "nemotron_h"},
    "nemotron_h-latent": {"family": "nemotron_h", "overrides": {"moe_latent_size": 24}},
    "seed_oss": {"family": "seed_oss", "overrides": {"attention_out_bias": True}},
    "mistral": {"family": "mistral", "overrides": {"sliding_window": 8}},
    "mistral-full": {"family": "mistral", "overrides": {"sliding_window": None}},
}
FAMILIES = [
    "qwen3",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen2", "llama2", "mistral")),
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("ministral3", "phi3", "olmo2", "olmo3", "smollm3")),
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in ("granite", "seed_oss", "gemma3", "glm4_moe", "glm4_moe_lite", "nemotron_h", "gemma4", "gemma4_moe")
    ),
    "qwen3_5",
    "qwen3_moe",
]

SLOW = {"ministral3", "phi3", "olmo2", "granite-tied", "seed_oss", "glm4_moe_lite", "nemotron_h"}
"""Each of their mechanisms has another case in the everyday suite, and `families_check` has them all."""
POSITIONS_ONLY = {
    *("linear", "yarn", "yarn-settings", "yarn-mscale", "old-theta", "old-linear", "old-llama3", "old-yarn"),
    *("qwen2-windows-old", "qwen2-windows-off", "llama-sharded"),
}
"""They differ from others in how positions and files are read, which their logits show: gradients take the same way."""
LIKE_ANOTHER = {"qwen2-tied", "llama-tied", "qwen3_5-tied", "llama-biases", "mistral-full", "qwen3-wide-heads"}
"""Gradients of their families, and of Qwen3 with these changes, are compared every day; their logits are, too."""


def each_case(slow: set[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in CASES]
    )


@each_case(SLOW)
def test_packed_logits_equal_transformers_one_by_one(get_bench, case):
    bench = get_bench(**CASES[case])
    sequences = [bench.tokens(n) for n in LENGTHS]
    for tokens, ours in zip(sequences, bench.logits(sequences), strict=True):
        with torch.no_grad():
            truth = bench.reference()(torch.tensor([tokens])).logits[0]
        assert (ours - truth).abs().max() < 1e-4


@each_case(SLOW | POSITIONS_ONLY | LIKE_ANOTHER)
def test_gradients_equal_peft(get_bench, case, tmp_path):
    bench = get_bench(**CASES[case])
    adapter = bench.adapter(rank=4, noise=0.1)
    items = bench.items([adapter], (5, 40, 1, 21))
    prompt = items[1].datum.chunks[0].tokens[:30]  # which is computed once
    items += [TrainItem(adapter, bench.datum(n, prefix=prompt)) for n in (33, 39)]
    assert sum(batch.rows for batch in bench.trainer.plan(bench.trainer.prepare(items, train=True))) == 67 + 3 + 9
    results = bench.trainer.forward_backward(items)

    peft_model = bench.peft(adapter, tmp_path / "adapter")
    total = torch.zeros(())
    for item, result in zip(items, results, strict=True):
        loss, logprobs = weighted_loss(peft_model, item)
        assert np.abs(logprobs - result.logprobs).max() < 1e-4
        assert abs(result.loss - loss.item()) < 1e-3
        total = total + loss
    total.backward()

    truth = {n.replace(".default.", "."): p.grad for n, p in peft_model.named_parameters() if p.requires_grad}
    ours = {f"base_model.model.{n}": g for n, g in bench.gradient(adapter).items()}
    take_parts(truth, ours)
    take_experts(truth, ours, is_interleaved=bench.model.spec.family == "gpt_oss")
    assert ours.keys() == truth.keys()
    for name, gradient in ours.items():
        assert torch.linalg.norm(gradient - truth[name]) < 1e-4 * torch.linalg.norm(truth[name]), name


def take_parts(truth: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    """Of matrices that PEFT has joined, what is ours: its other blocks of B are zero, but not their gradients."""
    for joined in [name for name in truth if "in_proj_qkv." in name or "in_proj." in name]:
        gradient, row, column = truth.pop(joined), 0, 0
        whole = "in_proj_qkv" if "in_proj_qkv" in joined else "in_proj"
        for part in (joined.replace(whole, part) for part in WHOLES[whole]):
            rows, columns = ours[part].shape
            truth[part] = gradient[row : row + rows, column : column + columns]
            row, column = row + rows, column + (columns if "lora_B" in part else 0)


def take_experts(truth: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], *, is_interleaved: bool) -> None:
    """Of what PEFT repeats for each expert, the sum where ours is one matrix; the blocks of gate and up."""
    for key in [key for key in truth if key.endswith("experts.lora_A.weight")]:
        head = key.removesuffix(".lora_A.weight")
        ups = ("w1", "w3") if f"{head}.w3.lora_A.weight" in ours else ("w1",)
        for module, parts in ((f"{head}.base_layer", ups), (head, ("w2",))):
            a, b = (truth.pop(f"{module}.lora_{x}.weight") for x in "AB")
            n = max(len(ours[f"{head}.{parts[0]}.lora_{x}.weight"]) for x in "AB")
            a, b = a.unflatten(0, (n, -1)), b.unflatten(1, (-1, n)).permute(2, 0, 1)
            if is_interleaved and len(parts) > 1:
                b = by_halves(b)
            rank = a.shape[1] // len(parts)
            for i, (part, rows) in enumerate(zip(parts, b.chunk(len(parts), 1), strict=True)):
                for x, every in (("A", a.split(rank, 1)[i]), ("B", rows.split(rank, 2)[i])):
                    name = f"{head}.{part}.lora_{x}.weight"
                    truth[name] = every.sum(0, keepdim=True) if len(ours[name]) == 1 else every


def weighted_loss(model, item: TrainItem) -> tuple[torch.Tensor, np.ndarray]:
    """Cross-entropy of one datum, by autograd through a transformers model."""
    inputs = item.datum.loss_inputs
    targets = torch.from_numpy(np.frombuffer(inputs["target_tokens"].data, "<i8").copy())
    weights = torch.from_numpy(np.frombuffer(inputs["weights"].data, "<f4").copy())
    logits = model(torch.tensor([item.datum.chunks[0].tokens])).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
    return -(weights * logprobs).sum(), logprobs.detach().float().numpy()


@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(get_bench, in_transformers, case):
    bench = get_bench(**CASES[case], dtype="bfloat16")
    assert bench.model.decoder.dtype == torch.bfloat16
    sequences = [bench.tokens(n) for n in LENGTHS]
    theirs = in_transformers(bench.model.folder, torch.bfloat16)
    ours_off, theirs_off = [], []
    # Rounding sends some tokens to other experts, and not the same ones here and there: ours visit those of float32.
    chosen = Routing()
    get_bench(**CASES[case], dtype="bfloat16", load_dtype="float32").logits(sequences, routing=chosen)
    found = bench.logits(sequences, routing=Routing(chosen.numbers))
    for tokens, ours in zip(sequences, found, strict=True):
        with torch.no_grad():
            truth = bench.reference()(torch.tensor([tokens])).logits[0]
            peer = theirs(torch.tensor([tokens])).logits[0].float()
        ours_off.append((ours - truth).square().mean(-1))
        theirs_off.append((peer - truth).square().mean(-1))
    ours_rms = torch.cat(ours_off).mean().sqrt()
    theirs_rms = (torch.median if bench.model.spec.experts else torch.mean)(torch.cat(theirs_off)).sqrt()
    assert 0 < ours_rms < 1.25 * theirs_rms


def with_experts_of(bench: Bench, items: list[TrainItem]) -> list[TrainItem]:
    """The same data, to be trained with the experts that this model chooses."""
    if not bench.model.spec.experts:
        return items
    chosen = Routing()
    lengths = [len(item.datum.chunks[0].tokens) for item in items]
    bench.logits([item.datum.chunks[0].tokens for item in items], routing=chosen)
    parts = torch.stack(list(chosen.numbers.values()), 1).to(torch.uint8).split(lengths)
    data = [msgspec.structs.replace(i.datum, routing=routed_experts(p)) for i, p in zip(items, parts, strict=True)]
    return [TrainItem(None, datum) for datum in data]


@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_trains_like_float32(get_bench, case):
    """The same stored weights and the same adapter in both precisions: gradients agree to bfloat16's digits."""
    narrow = get_bench(**CASES[case], dtype="bfloat16")
    wide = get_bench(**CASES[case], dtype="bfloat16", load_dtype="float32")
    spec = narrow.model.spec
    # A recurrence carries its roundings on. Those of Gemma 4 are 4.8 % on average, and 4.7 % in transformers.
    bound = 0.15 if spec.recurrences or spec.family == "gemma4" else 0.05
    gradients = []
    items = with_experts_of(wide, wide.items([None], (30, 12, 50)))  # rounding would send some tokens to others
    for bench in (narrow, wide):
        adapter = bench.adapter(rank=4, noise=0.05)
        bench.trainer.forward_backward([TrainItem(adapter, item.datum) for item in items])
        gradients.append(bench.gradient(adapter))
        assert bench.trainer.optim_step({adapter: AdamParams()})[adapter].error is None
    for name, ours in gradients[0].items():
        truth = gradients[1][name]
        assert 0 < torch.linalg.norm(ours - truth) < bound * torch.linalg.norm(truth), name


def test_stored_dtype_is_used_unless_another_is_asked_for(get_bench):
    assert get_bench(dtype="bfloat16").model.decoder.dtype == torch.bfloat16
    assert get_bench(dtype="bfloat16", load_dtype="float32").model.decoder.dtype == torch.float32
    assert get_bench(dtype="float16").model.decoder.dtype == torch.float32
    assert get_bench(load_dtype="bfloat16").model.decoder.dtype == torch.bfloat16
