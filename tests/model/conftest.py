"""What the model tests share: a workbench per test on models opened once, and the reference implementations.

The few places that look inside adapters are here, so that a change of their layout is a change of this file.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from palestra.model import Adapter, AdapterPool, Model, Sampler, Trainer, TrainItem, encode, load_model, save_adapter
from palestra.model.attention.packed import PackedAttention
from palestra.model.lora.adapter_files import adapter_matrices
from palestra.model.lora.linear import LoraPlan
from palestra.model.mixers import chunked_scan
from palestra.model.mixers.packed_recurrence import packed_recurrence
from palestra.model.mlp.routing import Routing
from palestra.model.sampling import state_slots
from palestra.types import Checkpointing, Datum, LoraConfig, SampleRequest, SampleResult, SamplingParams

GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
}
"""Overrides for Gemma 4 of four layers: the second half reads the keys of the first, whose heads are of two widths."""
GetBench = Callable[..., "Bench"]


@dataclass
class Bench:
    """A model with its own adapters and trainer, and what tests do with them again and again."""

    model: Model
    reference: Callable[[], Any]
    """The same folder in transformers. Opened once for all tests: do not change it."""
    pool: AdapterPool
    trainer: Trainer
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def vocab(self) -> int:
        return self.model.spec.vocab_size

    # Adapters

    def adapter(self, rank: int = 4, *, seed: int = 0, noise: float = 0.1, **config: Any) -> Adapter:
        """With both matrices random, as after training; `noise=0` leaves it untrained."""
        adapter = self.pool.create(LoraConfig(rank=rank, seed=seed, **config))
        if noise:
            self.scramble(adapter, seed=seed, noise=noise)
        return adapter

    def scramble(self, adapter: Adapter, *, seed: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(1000 + seed)
        self.pool.before_change(adapter)
        row = adapter.row("weights")
        row.copy_(torch.randn(row.shape, generator=generator) * noise)
        self.pool.after_change(adapter)

    def weights(self, adapter: Adapter) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in adapter_matrices(adapter).items()}

    def gradient(self, adapter: Adapter) -> dict[str, Tensor]:
        """What was accumulated, by PEFT's names."""
        weights = adapter.row("weights").clone()
        adapter.row("weights").copy_(adapter.row("grads"))
        found = self.weights(adapter)
        adapter.row("weights").copy_(weights)
        return found

    # Data

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(0, self.vocab, n).tolist()

    def datum(self, n: int, *, prefix: Sequence[int] = (), **inputs: Any) -> Datum:
        """n tokens, random after `prefix`, with the next ones as targets; cross-entropy weights unless other inputs are
        given."""
        tokens = [*prefix, *self.tokens(n + 1 - len(prefix))]
        arrays = inputs or {"weights": self.rng.normal(size=n)}
        return Datum.of_tokens(
            tokens[:-1],
            target_tokens=encode(np.array(tokens[1:])),
            **{k: encode(np.asarray(v)) for k, v in arrays.items()},
        )

    def items(self, adapters: Sequence[Adapter | None], lengths: Sequence[int]) -> list[TrainItem]:
        """Data of these lengths, dealt to the adapters in turn."""
        return [TrainItem(adapters[i % len(adapters)], self.datum(n)) for i, n in enumerate(lengths)]

    # Running

    def logits(
        self,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None] | None = None,
        routing: Routing | None = None,
    ) -> list[Tensor]:
        """All logits of the sequences, computed as one packed batch."""
        decoder, lengths = self.model.decoder, [len(s) for s in sequences]
        adapters = adapters or [None] * len(lengths)
        plan = LoraPlan.of(list(zip(adapters, lengths, strict=True)))
        tokens = torch.tensor([t for s in sequences for t in s])
        positions = torch.cat([torch.arange(n) for n in lengths])
        with torch.no_grad():
            recur = packed_recurrence(lengths, self.model.spec, "cpu", decoder.dtype)
            attend = PackedAttention(lengths, self.model.spec.windows, sources=self.model.spec.kv_sources)
            hidden = decoder(tokens, positions, attend, plan, recur, routing=routing)
            return list(_unembed(self.model, hidden, plan).split(lengths))

    def distributions(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[Adapter | None] | None = None
    ) -> list[np.ndarray]:
        """Log-probabilities of the whole vocabulary at every position, through the trainer's front door."""
        everything = np.arange(self.vocab)
        items = [
            TrainItem(a, Datum.of_tokens(s, target_tokens=encode(np.tile(everything, (len(s), 1)))))
            for s, a in zip(sequences, adapters or [None] * len(sequences), strict=True)
        ]
        return [r.logprobs for r in self.trainer.forward(items)]

    def logprobs(self, adapter: Adapter | None, tokens: Sequence[int]) -> np.ndarray:
        """Of every token but the first, by the training forward."""
        datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
        return self.trainer.forward([TrainItem(adapter, datum)])[0].logprobs

    def sampler(self, **options: Any) -> Sampler:
        options = {"cache_tokens": 2048, "tokenizer": self.model.tokenizer, **options}
        return Sampler(self.model.decoder, self.pool, **options)

    # Sampling

    @staticmethod
    def request(prompt: Sequence[int], n: int = 1, **options: Any) -> SampleRequest:
        """Seeded, and nothing stops it but max_tokens unless asked for; options go to the request or its params."""
        outer = {k: options.pop(k) for k in list(options) if k in SampleRequest.__struct_fields__}
        params = SamplingParams(**{"max_tokens": 12, "seed": 0, "stop_token_ids": (), **options})
        return SampleRequest(prompt=tuple(prompt), num_samples=n, params=params, **outer)

    @staticmethod
    def run_to_end(sampler: Sampler) -> dict[int, SampleResult]:
        done: dict[int, SampleResult] = {}
        while sampler.has_work:
            done.update((f.request_id, f.result) for f in sampler.step().finished)
        return done

    def check_nothing_left(self, sampler: Sampler, *, adapters: bool = False) -> None:
        """No work, no pages, no states; with `adapters` none of those either."""
        assert not sampler.has_work
        assert sampler.pages.available == sampler.pages.n_pages
        assert (sampler.scheduler.running, sampler.scheduler.waiting) == (0, 0)
        sampler.pages.check()
        if sampler.state_slots is not None:
            sampler.state_slots.check([])
        if adapters:
            assert self.pool.size_bytes == 0

    # References

    def peft(self, adapter: Adapter, folder: Path) -> Any:
        """This adapter in PEFT, trainable, by way of the files of `save_adapter`."""
        save_adapter(adapter, folder, form="peft")
        return wrap_in_peft(copy.deepcopy(self.reference()), folder)


def _unembed(model: Model, hidden: Tensor, plan: LoraPlan) -> Tensor:
    from palestra.model.training.head import logits_of

    return logits_of(model.decoder, hidden, plan)


def open_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def open_peft(base: Path, folder: Path) -> Any:
    return wrap_in_peft(open_transformers(base), folder)


def wrap_in_peft(base: Any, folder: Path) -> Any:
    import peft

    # PEFT refuses the last projection of a Mamba, since kernels, which are not in use here, would not see its adapter.
    no_refusal = pytest.MonkeyPatch.context()
    with warnings.catch_warnings(), no_refusal as patch:
        warnings.simplefilter("ignore")  # PEFT doubts adapters on tied embeddings
        patch.setattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", lambda *a: None)
        return peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True)


@pytest.fixture(scope="session")
def get_bench(random_model: Callable[..., Path]) -> GetBench:
    """`get_bench(family, **options)`: options of `random_model`; `load_dtype`, `max_rank` and those of `Trainer`."""
    models: dict[tuple[Path, str | None], Model] = {}
    references: dict[Path, Any] = {}

    def get(
        family: str = "qwen3",
        *,
        load_dtype: str | None = None,
        max_rank: int = 64,
        token_budget: int | None = None,
        checkpointing: Checkpointing = False,
        share_prefixes: bool = True,
        **options: Any,
    ) -> Bench:
        folder = random_model(family, **options)
        if (folder, load_dtype) not in models:
            models[folder, load_dtype] = load_model(folder, dtype=load_dtype)
        model = models[folder, load_dtype]

        def reference() -> Any:
            if folder not in references:
                references[folder] = open_transformers(folder)
            return references[folder]

        pool = AdapterPool(model.spec, dtype=model.decoder.dtype, max_rank=max_rank)
        trainer = Trainer(
            model.decoder,
            pool,
            token_budget=token_budget,
            checkpointing=checkpointing,
            share_prefixes=share_prefixes,
        )
        return Bench(model, reference, pool, trainer)

    return get


@pytest.fixture
def bench(get_bench: GetBench) -> Bench:
    """On the micro Qwen3."""
    return get_bench()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Recurrences in chunks so small that short prompts have some, and snapshots between them."""
    for module in (chunked_scan, state_slots):
        monkeypatch.setattr(module, "CHUNK", 8)
    return 8


@pytest.fixture(scope="session")
def in_transformers() -> Callable[..., Any]:
    """`in_transformers(folder, dtype)`: a model of the test's own."""
    return open_transformers


@pytest.fixture(scope="session")
def in_peft() -> Callable[..., Any]:
    """`in_peft(base, folder)`: a trainable PEFT model of the test's own."""
    return open_peft
