"""The same requests in the same order give the same bits: in new objects, in other processes."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import palestra
from palestra.model import AdapterPool, Sampler, Trainer, TrainItem, encode, load_model
from palestra.model.lora.adapter_files import adapter_matrices
from palestra.types import AdamParams, Datum, LoraConfig, SampleRequest, SamplingParams


def life(folder: str | Path) -> str:
    """Some training and sampling of two tenants and the base model; a digest of everything that came out."""
    model = load_model(folder)
    pool = AdapterPool(model.spec)
    trainer, sampler = Trainer(model.decoder, pool, token_budget=64), Sampler(model.decoder, pool, cache_tokens=1024)
    rng, digest = np.random.default_rng(0), hashlib.sha256()
    adapters = [pool.create(LoraConfig(rank=rank, seed=rank)) for rank in (4, 7)]
    for step in range(2):
        items = []
        for i, n in enumerate((30, 4, 17, 1, 52, 30, 9)):
            tokens = rng.integers(0, model.spec.vocab_size, n + 1)
            datum = Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]))
            items.append(TrainItem(adapters[i % 2], datum))
        for result in trainer.forward_backward(items):
            digest.update(result.logprobs.tobytes())
        trainer.optim_step(dict.fromkeys(adapters, AdamParams(learning_rate=0.01, grad_clip_norm=1.0)))
        request = SampleRequest(prompt=(1, 2, 3), num_samples=3, params=SamplingParams(max_tokens=8, seed=step))
        for result in sampler.generate([request] * 3, [*adapters, None]):
            digest.update(repr([(s.tokens, s.logprobs) for s in result.sequences]).encode())
    for adapter in adapters:
        for name, matrix in sorted(adapter_matrices(adapter).items()):
            digest.update(name.encode() + matrix.numpy().tobytes())
    return digest.hexdigest()


first_life = functools.cache(life)


def test_same_requests_in_the_same_order_give_the_same_bits(micro_model):
    assert life(micro_model) == first_life(micro_model)


def test_experts_give_the_same_bits_again(random_model):
    folder = random_model("qwen3_moe")
    assert life(folder) == life(folder)


def test_same_requests_in_another_process_give_the_same_bits(micro_model):
    environment = {**os.environ, "PYTHONPATH": str(Path(palestra.__file__).parents[1])}
    command = [sys.executable, __file__, str(micro_model)]
    other = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=200, check=True)
    assert other.stdout.strip() == first_life(micro_model)


if __name__ == "__main__":
    print(life(sys.argv[1]))
