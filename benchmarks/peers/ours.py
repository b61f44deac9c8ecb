"""Ours, behind the same calls as its peers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from peers.workloads import Generate, SampleWork, TrainWork

from palestra.model import Adapter, AdapterPool, Model, Sampler, Trainer, TrainItem, encode
from palestra.model.lora.layout import Layout
from palestra.types import AdamParams, Datum, LoraConfig, SampleRequest, SamplingParams


class Ours:
    def __init__(self, model: Model):
        self.model, decoder = model, model.decoder
        self.device, self.vocab_size = decoder.device, self.model.spec.vocab_size
        self.pool = AdapterPool(self.model.spec, dtype=decoder.dtype, device=decoder.device)
        self.trainer = Trainer(decoder, self.pool)
        self.checkpointing = Trainer(decoder, self.pool, checkpointing=True)

    def sampler(self, work: SampleWork, adapters: list[Adapter] | None = None) -> Generate:
        """With adapters: the requests take them in turn."""
        on_gpu = self.device.type == "cuda"
        sampler = Sampler(
            self.model.decoder,
            self.pool,
            cache_tokens=2 * (work.tokens + sum(work.prompt_lengths)) if on_gpu else None,
            max_rows=512 if on_gpu else 256,
            prefill_tokens=8192 if on_gpu else 2048,
        )
        params = [SamplingParams(max_tokens=n, stop_token_ids=(), seed=i) for i, n in enumerate(work.output_lengths)]
        taken = None if adapters is None else [adapters[i % len(adapters)] for i in range(len(params))]

        def generate(prompts: list[list[int]]) -> int:
            requests = [
                SampleRequest(prompt=tuple(prompt), num_samples=work.samples, params=p)
                for prompt, p in zip(prompts, params, strict=True)
            ]
            results = sampler.generate(requests, taken)
            return sum(len(s.tokens) for r in results for s in r.sequences)

        return generate

    def adapters(self, n: int, ranks: tuple[int, ...] = (32,), *, unembed: bool = True) -> list[Adapter]:
        """Fresh ones, their ranks in turn."""
        configs = [LoraConfig(rank=ranks[i % len(ranks)], seed=i, train_unembed=unembed) for i in range(n)]
        return [self.pool.create(config) for config in configs]

    def snapshots(self, n: int, ranks: tuple[int, ...] = (32,)) -> list[Adapter]:
        """A model with random weights that are drawn on the device; experts have hundreds of millions."""
        made = []
        for i in range(n):
            config = LoraConfig(rank=ranks[i % len(ranks)], train_unembed=False)
            size = Layout.of(self.model.spec, config).size
            made.append(self.pool.freeze(config, torch.randn(size, device=self.device) * 0.01))
        return made

    def free(self, adapters: list[Adapter]) -> None:
        for adapter in adapters:
            self.pool.free(adapter)

    def stepper(self, work: TrainWork, *adapters: Adapter, checkpointing: bool = False) -> Callable[[], float]:
        """One optimizer step over all data, which the adapters take in turn; returns the summed loss."""
        trainer = self.checkpointing if checkpointing else self.trainer
        items = [item_of(adapters[i % len(adapters)], t) for i, t in enumerate(work.data(self.vocab_size))]

        def step() -> float:
            results = trainer.forward_backward(items)
            trainer.optim_step({adapter: AdamParams() for adapter in adapters})
            return sum(r.loss for r in results)

        return step

    def tenants(self, work: TrainWork, adapters: list[Adapter], *, together: bool) -> Callable[[], None]:
        """Every adapter trains on `work` and takes a step: all in one batch, or one adapter after another."""
        data = work.data(self.vocab_size)
        batches = [[item_of(adapter, tokens) for tokens in data] for adapter in adapters]

        def in_one() -> None:
            self.trainer.forward_backward([item for batch in batches for item in batch])
            self.trainer.optim_step({adapter: AdamParams() for adapter in adapters})

        def one_after_another() -> None:
            for adapter, batch in zip(adapters, batches, strict=True):
                self.trainer.forward_backward(batch)
                self.trainer.optim_step({adapter: AdamParams()})

        return in_one if together else one_after_another


def item_of(adapter: Adapter, tokens: NDArray[np.int64]) -> TrainItem:
    weights = np.ones(len(tokens) - 1, np.float32)
    datum = Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]), weights=encode(weights))
    return TrainItem(adapter, datum, "cross_entropy")
