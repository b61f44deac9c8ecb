"""The first backend: palestra's own compute core, in this process."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from palestra.engine.backend import AdapterCopy, BackendLoad, SampleStep
from palestra.engine.torch_trainer import TorchConfig, TorchTrainer, to_numpy
from palestra.model import Adapter, Sampler, TokenizerError, load_snapshot, pack_adapter
from palestra.types import LoraConfig, SampleRequest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from palestra.model.context_group import ContextGroup
    from palestra.model.tensor_group import TensorGroup

log = logging.getLogger(__name__)

CPU_ROWS, GPU_ROWS = 256, 512
WARM_UP_LOG_S = 2.0


class TorchBackend(TorchTrainer):
    """A base model with the adapters that are trained on it and sampled from."""

    def __init__(
        self,
        config: TorchConfig,
        mesh: DeviceMesh | None = None,
        tensor: TensorGroup | None = None,
        context: ContextGroup | None = None,
    ):
        super().__init__(config, mesh, tensor, context)
        decoder = self.model.decoder
        self.max_sample_rows = config.max_sample_rows or (CPU_ROWS if decoder.device.type == "cpu" else GPU_ROWS)
        tokenizer = None
        with contextlib.suppress(TokenizerError):
            tokenizer = self.model.tokenizer
        self.sampler = Sampler(
            decoder,
            self.pool,
            tokenizer=tokenizer,
            cache_tokens=config.cache_tokens,
            cache_share=config.cache_share,
            max_rows=self.max_sample_rows,
            prefill_tokens=self.token_budget // self.context,  # a step with a long prompt is a quantum too
        )
        if self.sampler.grammars is not None:
            self.sampler.grammars.warm_up()
        self._warm_up()

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

    # Weights for sampling

    def freeze(self, model: Adapter) -> Adapter:
        return self.pool.snapshot(model)

    def frozen_row(self, frozen: Adapter) -> NDArray[np.float32]:
        return to_numpy(frozen.row("weights"))

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
        has_copy = self.pool.dtype != torch.float32 or frozen.stack.part is not None
        compute = self.pool.dtype.itemsize * frozen.stack.own_layout.size if has_copy else 0
        return 4 * frozen.stack.layout.size + compute

    # Sampling

    def submit(self, request: SampleRequest, frozen: Adapter | None) -> int:
        return self.sampler.submit(request, frozen)

    def change_weights(self, number: int, frozen: Adapter, name: str, *, keeps_keys: bool) -> bool:
        return self.sampler.change_weights(number, frozen, name, keeps_keys=keeps_keys)

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
            self.pool.size_bytes,
            scheduler.running,
            scheduler.waiting,
            self.sampler.kv_used,
            pages.n_pages * pages.page_size,
        )

    def close(self) -> None:
        """Does nothing: nothing was started."""
