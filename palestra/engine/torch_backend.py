"""The first backend: palestra's own compute core, in this process."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from palestra.engine.backend import AdapterCopy, BackendLoad, DatumDone, Forward, MicroBatch, ModelImage, SampleStep
from palestra.model import (
    Adapter,
    AdapterError,
    AdapterPool,
    DataError,
    DatumResult,
    ModelSpec,
    Sampler,
    TokenizerError,
    Trainer,
    TrainItem,
    load_into,
    load_model,
    load_snapshot,
    pack_adapter,
    save_adapter,
)
from palestra.model.lora.adapter_files import require_trained_on
from palestra.model.lora.adapters import Rows
from palestra.model.numerics import Numerics
from palestra.types import AdamParams, LoraConfig, SampleRequest
from palestra.types.engine import UNQUANTISED, DatumOutput, ModelCard, Pass, WorkerConfig

log = logging.getLogger(__name__)

MOMENTS: tuple[Rows, ...] = ("exp_avg", "exp_avg_sq")
CPU_ROWS, GPU_ROWS = 256, 512
WARM_UP_LOG_S = 2.0
CUDA_TOKENS = 8192
CPU_WORK = 1 << 31  # parameters times tokens: a forward of about 30 ms on two cores
MIN_TOKENS, MAX_TOKENS = 128, 2048


@dataclass(frozen=True, kw_only=True)
class TorchConfig:
    model: str
    device: str = "cpu"
    dtype: str | None = None
    weights: str | None = None
    allow_other_weights: bool = False
    threads: int | None = None
    max_rank: int = 256
    micro_batch_tokens: int | None = None
    checkpointing: bool = False
    numerics: Numerics = "exact"
    max_sample_rows: int | None = None
    cache_tokens: int | None = None
    cache_share: float = 0.5

    @classmethod
    def of(cls, config: WorkerConfig) -> TorchConfig:
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


class TorchBackend:
    def __init__(self, config: TorchConfig):
        if config.threads:
            torch.set_num_threads(config.threads)
        model = load_model(
            config.model, dtype=config.dtype, device=config.device, numerics=config.numerics, weights=config.weights
        )
        self.allow_other_weights = config.allow_other_weights
        self.spec, decoder = model.spec, model.decoder
        self.base = str(Path(config.model).resolve())
        self.token_budget = config.micro_batch_tokens or token_budget(model.spec, decoder.device.type)
        self.max_sample_rows = config.max_sample_rows or (CPU_ROWS if decoder.device.type == "cpu" else GPU_ROWS)
        self.pool = AdapterPool(model.spec, dtype=decoder.dtype, device=decoder.device, max_rank=config.max_rank)
        self.trainer = Trainer(decoder, self.pool, token_budget=self.token_budget, checkpointing=config.checkpointing)
        self._has_cut = False
        tokenizer = None
        with contextlib.suppress(TokenizerError):
            tokenizer = model.tokenizer
        self.sampler = Sampler(
            decoder,
            self.pool,
            tokenizer=tokenizer,
            cache_tokens=config.cache_tokens,
            cache_share=config.cache_share,
            max_rows=self.max_sample_rows,
            prefill_tokens=self.token_budget,  # a step with a long prompt is a quantum too
        )
        if self.sampler.grammars is not None:
            self.sampler.grammars.warm_up()
        self._warm_up()
        self.card = ModelCard(
            folder=config.model,
            architecture=model.spec.architecture,
            vocab_size=model.spec.vocab_size,
            max_positions=model.spec.max_positions,
            parameters=model.spec.n_parameters,
            dtype=str(decoder.dtype).removeprefix("torch."),
            weights=model.weights or UNQUANTISED,
            device=str(decoder.device),
            eos_token_ids=model.spec.eos_token_ids,
            lora_beyond_dense=tuple(name for name in ("delta_nets", "mambas", "experts") if getattr(model.spec, name)),
        )

    def _warm_up(self) -> None:
        start = logged_at = time.monotonic()

        def log_progress(done: int, of: int) -> None:
            nonlocal logged_at
            if (now := time.monotonic()) > logged_at + WARM_UP_LOG_S:
                logged_at = now
                log.info("recording_graphs done=%d of=%d", done, of)

        self.sampler.warm_up(log_progress)
        if self.sampler.graphs is not None:
            log.info("graphs_ready seconds=%.1f", time.monotonic() - start)

    # Models

    def create(self, lora: LoraConfig) -> Adapter:
        return self.pool.create(lora)

    def load(self, model: Adapter, folder: str, *, optimizer: bool) -> None:
        if not self.allow_other_weights:
            require_trained_on(folder, self.card.weights)
        load_into(self.pool, model, folder, optimizer=optimizer)

    def writer(self, model: Adapter, *, optimizer: bool) -> Callable[[Path], None]:
        copy = self.pool.detach(model, moments=optimizer)
        return lambda folder: save_adapter(
            copy, folder, base_model=self.base, optimizer=optimizer, trained_on=self.card.weights
        )

    def image(self, model: Adapter) -> ModelImage:
        moments = MOMENTS if model.steps else ()
        gradient: tuple[Rows, ...] = ("grads",) if model.has_gradient else ()
        kinds: tuple[Rows, ...] = ("weights", *moments, *gradient)
        return ModelImage({kind: _numpy(model.row(kind)) for kind in kinds}, model.steps)

    def restore(self, lora: LoraConfig, image: ModelImage) -> Adapter:
        adapter = self.pool.create(lora)
        try:
            for kind, row in image.tensors.items():
                target = adapter.row(kind)  # type: ignore[arg-type]
                if row.shape != target.shape or row.dtype != np.float32:
                    raise AdapterError(f"{kind} has shape {row.shape}, this model needs {tuple(target.shape)}")
                target.copy_(torch.from_numpy(row))
        except BaseException:
            self.pool.free(adapter)
            raise
        adapter.steps, adapter.has_gradient = image.steps, "grads" in image.tensors
        self.pool.after_change(adapter)
        return adapter

    def free(self, weights: Adapter) -> None:
        if not weights.frozen:
            self.pool.before_change(weights)  # snapshots move to rows without gradients and moments
        self.pool.free(weights)

    # Training

    def plan(self, model: Adapter, request: Pass) -> list[MicroBatch]:
        for name, value in request.config.items():
            if isinstance(value, str):
                raise DataError(f"loss setting {name!r} is {value!r}; it must be a number")
        config: Any = request.config
        items = [TrainItem(model, datum, request.loss, config) for datum in request.data]
        data = self.trainer.prepare(items, train=not request.forward_only)
        return [
            MicroBatch(
                numbers,
                sum(len(data[i].tokens) for i in numbers),
                data[numbers[0]].targets.shape[1],
                [data[i] for i in numbers],
            )
            for numbers in self.trainer.plan(data)
        ]

    def forward(self, parts: Sequence[MicroBatch], *, train: bool) -> Forward:
        data = [d for part in parts for d in part.data]
        done = self.trainer.forward_micro(data, list(range(len(data))), train=train)
        results = iter(done.results)
        return Forward([[_done(next(results)) for _ in part.data] for part in parts], done if train else None)

    def backward(self, forward: Forward) -> None:
        self.trainer.backward(forward.pending)

    def gradient(self, model: Adapter) -> torch.Tensor | None:
        return model.row("grads").clone() if model.has_gradient else None

    def restore_gradient(self, model: Adapter, gradient: torch.Tensor | None) -> None:
        self.pool.discard_gradient(model)
        if gradient is not None:
            model.row("grads").copy_(gradient)
            model.has_gradient = True

    def optim_step(self, steps: Mapping[Adapter, AdamParams]) -> dict[Adapter, dict[str, float] | Exception]:
        before = {a: a.steps for a in steps}
        try:
            results = self.trainer.optim_step(dict(steps))
        except Exception as e:
            if len(steps) == 1:
                return dict.fromkeys(steps, e)
            # Whoever had its turn has it; the others try alone.
            outcomes: dict[Adapter, dict[str, float] | Exception] = {}
            for adapter, params in steps.items():
                outcomes |= {adapter: {}} if adapter.steps > before[adapter] else self.optim_step({adapter: params})
            return outcomes
        return {a: r.error or r.metrics for a, r in results.items()}

    # Weights for sampling

    def freeze(self, model: Adapter) -> Adapter:
        return self.pool.snapshot(model)

    def frozen_row(self, frozen: Adapter) -> NDArray[np.float32]:
        return _numpy(frozen.row("weights"))

    def place_row(self, lora: LoraConfig, row: NDArray[np.float32]) -> Adapter:
        return self.pool.freeze(lora, torch.from_numpy(row))

    def open_folder(self, folder: str) -> Adapter:
        return load_snapshot(self.pool, folder)

    def copy_adapter(self, frozen: Adapter) -> AdapterCopy:
        copy, dtype = self.pool.detach(frozen), self.pool.dtype
        return AdapterCopy(frozen.config, lambda: pack_adapter(copy, base_model=self.base, dtype=dtype))

    def weights_key(self, weights: Adapter) -> int:
        return weights.weights_id

    def own_bytes(self, frozen: Adapter) -> int:
        if frozen.original is not None:
            return 0
        compute = 0 if self.pool.dtype == torch.float32 else self.pool.dtype.itemsize
        return frozen.stack.layout.size * (4 + compute)

    # Sampling

    def submit(self, request: SampleRequest, frozen: Adapter | None) -> int:
        return self.sampler.submit(request, frozen)

    def abort(self, number: int) -> None:
        self.sampler.abort(number)

    def sample_step(self) -> SampleStep:
        output = self.sampler.step()
        return SampleStep(
            [(f.request_id, f.result) for f in output.finished],
            [(f.request_id, f.error) for f in output.failed],
            output.tokens,
        )

    def load_now(self) -> BackendLoad:
        pages, scheduler = self.sampler.pages, self.sampler.scheduler
        return BackendLoad(
            self.pool.size_bytes, scheduler.running, scheduler.waiting, 1.0 - pages.available / pages.n_pages
        )

    def save_memory(self, error: Exception) -> str | None:
        if not isinstance(error, torch.OutOfMemoryError):
            return None
        traceback.clear_frames(error.__traceback__)  # they hold what the pass had computed
        torch.cuda.empty_cache()
        if not self.trainer.checkpointing:
            self.trainer.checkpointing = True  # the same bits, recomputed
            return "activations are recomputed in backward passes from now on (checkpointing)"
        if not self._has_cut:
            self._has_cut = True
            self.token_budget = self.trainer.token_budget = self.token_budget // 2
            return f"micro-batches have {self.token_budget} tokens from now on"
        return None

    def is_broken(self, error: BaseException) -> bool:
        return isinstance(error, torch.AcceleratorError)


def token_budget(spec: ModelSpec, device: str) -> int:
    """A function of model and device alone: the same after every restart."""
    if device != "cpu":
        return CUDA_TOKENS
    return max(MIN_TOKENS, min(MAX_TOKENS, CPU_WORK // spec.n_parameters // 64 * 64))


def _done(result: DatumResult) -> DatumDone:
    logprobs = np.ascontiguousarray(result.logprobs, "<f4")
    return DatumDone(DatumOutput(logprobs=logprobs.tobytes(), shape=logprobs.shape), result.metrics, result.visits)


def _numpy(row: torch.Tensor) -> NDArray[np.float32]:
    """A copy."""
    return row.detach().to("cpu", copy=True).numpy()
