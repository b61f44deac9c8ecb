"""The compute core in this process, as far as training goes: a base model, its adapters, passes and steps.

Owns: what the engine's training calls mean to the core. Never touches: sampling, requests, other processes.

The micro-batches of a request are planned from that request alone: the bits of a lone tenant depend on it after a
replay.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from palestra.engine.backend import DatumDone, Forward, MicroBatch, ModelImage
from palestra.model import (
    Adapter,
    AdapterError,
    AdapterPool,
    DataError,
    DatumResult,
    Trainer,
    TrainItem,
    encode,
    load_into,
    load_model,
    save_adapter,
)
from palestra.model.attention.backends import has_kernels
from palestra.model.decoder import Decoder
from palestra.model.loading.parameter_counts import count_parameters
from palestra.model.loading.tensor_parallel import WHOLE
from palestra.model.loading.tower_spec import TowerSpec
from palestra.model.lora.adapter_files import require_trained_on
from palestra.model.lora.adapters import Rows
from palestra.model.numerics import Numerics
from palestra.model.training.gradient_tree import GradientTree, balanced_shards, tree_place
from palestra.model.training.prepared import Prepared
from palestra.types import AdamParams, Checkpointing, Datum, LoraConfig, VisionCard
from palestra.types.engine import UNQUANTISED, DatumOutput, ModelCard, Pass, WorkerConfig

CUDA_TOKENS = 8192
CPU_WORK = 1 << 31  # parameters times tokens: a forward of about 30 ms on two cores
MIN_TOKENS, MAX_TOKENS = 128, 2048

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from palestra.model.context_group import ContextGroup
    from palestra.model.tensor_group import TensorGroup

Begun = GradientTree | torch.Tensor | None
"""A request that trains: with one gradient shard, what was accumulated before it."""


@dataclass(frozen=True, kw_only=True)
class TorchConfig:
    model: str
    base: str = ""
    device: str = "cpu"
    dtype: str | None = None
    weights: str | None = None
    allow_weights_mismatch: bool = False
    threads: int | None = None
    max_rank: int = 256
    micro_batch_tokens: int | None = None
    checkpointing: Checkpointing = False
    share_prefixes: bool | None = None
    gradient_shards: int = 1
    numerics: Numerics = "exact"
    max_sample_rows: int | None = None
    cache_tokens: int | None = None
    cache_share: float = 0.5
    sees: bool = True
    """Read the vision tower, where the model has one."""

    @classmethod
    def of(cls, config: WorkerConfig, rank: int = 0) -> TorchConfig:
        fields: dict[str, Any] = {n: getattr(config, n) for n in cls.__dataclass_fields__ if n != "sees"}
        fields["sees"] = not config.devices  # several ranks read text only
        if config.devices:
            fields["device"] = config.devices[rank]
        return cls(**fields)


class TorchTrainer:
    """A base model with the adapters that are trained on it."""

    ranks = tensor = context = 1

    def __init__(
        self,
        config: TorchConfig,
        mesh: DeviceMesh | None = None,
        tensor: TensorGroup | None = None,
        context: ContextGroup | None = None,
    ):
        """`mesh`: the base model lies across its processes; those of `tensor` compute every layer together, and those
        of `context` every micro-batch."""
        if config.threads:
            torch.set_num_threads(config.threads)
        self.model = model = load_model(
            config.model,
            dtype=config.dtype,
            device=config.device,
            numerics=config.numerics,
            weights=config.weights,
            mesh=mesh,
            tensor=tensor,
            sees=config.sees,
        )
        self.allow_weights_mismatch = config.allow_weights_mismatch
        self.spec, decoder = model.spec, model.decoder
        self.base = config.base or str(Path(config.model).resolve())
        own_tokens = config.micro_batch_tokens or token_budget(count_parameters(model.spec), decoder.device.type)
        self.token_budget = own_tokens * (1 if context is None else context.ranks)
        self.pool = AdapterPool(
            model.spec,
            dtype=decoder.dtype,
            device=decoder.device,
            max_rank=config.max_rank,
            shard=WHOLE if tensor is None else tensor.shard,
        )
        self.trainer = Trainer(
            decoder,
            self.pool,
            token_budget=self.token_budget,
            checkpointing=config.checkpointing,
            share_prefixes=_can_share(decoder) if config.share_prefixes is None else config.share_prefixes,
            context=context,
        )
        self.gradient_shards, self._is_gathered = config.gradient_shards, mesh is not None
        self._has_trees = config.gradient_shards > 1 or tensor is not None or context is not None
        self._trees: dict[Adapter, GradientTree] = {}
        """Gradient trees of the requests that train now, where there are gradient shards or ranks that share every
        layer or micro-batch."""
        self._has_cut = False
        self._spare: Adapter | None = None
        self.card = ModelCard(
            folder=config.model,
            architecture=model.spec.architecture,
            hidden_size=model.spec.hidden_size,
            vocab_size=model.spec.vocab_size,
            max_positions=model.spec.max_positions,
            parameters=count_parameters(model.spec),
            dtype=str(decoder.dtype).removeprefix("torch."),
            weights=model.weights or UNQUANTISED,
            device=str(decoder.device),
            eos_token_ids=model.spec.eos_token_ids,
            lora_beyond_dense=tuple(name for name in ("delta_nets", "mambas", "experts") if getattr(model.spec, name)),
            vision=_vision_card(model.spec.tower),
        )

    # Models

    def create(self, lora: LoraConfig) -> Adapter:
        return self.pool.create(lora)

    def load(self, model: Adapter, folder: str, *, optimizer: bool) -> None:
        if not self.allow_weights_mismatch:
            require_trained_on(folder, self.card.weights)
        load_into(self.pool, model, folder, optimizer=optimizer)

    def writer(self, model: Adapter, *, optimizer: bool) -> Callable[[Path], None]:
        copy = self.pool.detach(model, moments=optimizer)
        return lambda folder: save_adapter(
            copy, folder, base_model=self.base, optimizer=optimizer, trained_on=self.card.weights
        )

    def image(self, model: Adapter) -> ModelImage:
        return ModelImage({kind: to_numpy(model.row(kind)) for kind in rows_in_use(model)}, model.steps)

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
        self._trees.pop(weights, None)
        self.pool.free(weights)

    # Training

    def plan(self, model: Adapter, request: Pass) -> list[MicroBatch]:
        for name, value in request.config.items():
            if isinstance(value, str):
                raise DataError(f"loss setting {name!r} is {value!r}; it must be a number")
        config: Any = request.config
        pictures = {picture.digest: picture for picture in request.pictures}
        items = [TrainItem(model, datum, request.loss, config, pictures) for datum in request.data]
        data = self.trainer.prepare(items, train=not request.forward_only)
        batches = self.trainer.plan(data)
        parts = [
            MicroBatch(
                batch.numbers,
                batch.rows,
                data[batch.numbers[0]].targets.shape[1],
                [data[i] for i in batch.numbers],
                shard,
            )
            for batch, shard in zip(
                batches, balanced_shards([b.rows for b in batches], self.gradient_shards), strict=True
            )
        ]
        return sorted(parts, key=lambda part: tree_place(part.gradient_shard, self.gradient_shards))

    def forward(self, parts: Sequence[MicroBatch], *, train: bool) -> Forward:
        for part in parts if train and self._has_trees else ():
            self._trees[part.data[0].adapter].enter(part.gradient_shard)
        data = [d for part in parts for d in part.data] or self._one_token(train=train)
        done = self.trainer.forward_micro(data, train=train)
        if not done.results and self._is_gathered:
            done = self.trainer.forward_micro(self._one_token(train=train), train=train, alone=True)
            return Forward([[] for _ in parts], done if train else None)
        results = iter(done.results)
        found = [[_done(result) for result in islice(results, len(part.data))] for part in parts]
        return Forward(found, done if train else None)

    def backward(self, forward: Forward) -> None:
        self.trainer.backward(forward.pending)

    def _one_token(self, *, train: bool) -> list[Prepared]:
        """Runs one token on a rank that computes nothing of a part, whose share of the base model other ranks wait for.
        Its gradient goes to an adapter without an owner."""
        if self._spare is None:
            self._spare = self.pool.create(LoraConfig(rank=1, train_mlp=False, train_unembed=False, seed=0))
        self.pool.discard_gradient(self._spare)
        datum = Datum.of_tokens([0], target_tokens=encode(np.zeros(1, np.int64)))
        return self.trainer.prepare([TrainItem(self._spare, datum)], train=train)

    def begin_pass(self, model: Adapter) -> Begun:
        if not self._has_trees:
            return model.row("grads").clone() if model.has_gradient else None
        self._trees[model] = tree = GradientTree.begin(model, self.gradient_shards)
        return tree

    def end_pass(self, model: Adapter, begun: Begun) -> None:
        if isinstance(begun, GradientTree):
            self.sum_pass(model, begun, lambda row: None)

    def sum_pass(self, model: Adapter, tree: Begun, exchange: Callable[[torch.Tensor], None]) -> None:
        """`exchange` replaces this rank's sum by that of all ranks."""
        assert isinstance(tree, GradientTree), "ranks need gradient shards"
        tree.close()
        exchange(model.row("grads"))
        tree.end()
        del self._trees[model]

    def undo_pass(self, model: Adapter, begun: Begun) -> None:
        self._trees.pop(model, None)
        self.pool.discard_gradient(model)
        earlier = begun.earlier if isinstance(begun, GradientTree) else begun
        if earlier is not None:
            model.row("grads").copy_(earlier)
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

    def save_memory(self, error: Exception) -> str | None:
        if not isinstance(error, torch.OutOfMemoryError):
            return None
        traceback.clear_frames(error.__traceback__)  # they hold what the pass had computed
        torch.cuda.empty_cache()
        if not self.trainer.checkpointing:
            self.trainer.checkpointing = True  # the same bits, recomputed
            return "activations are recomputed in backward passes from now on (checkpointing)"
        if self.trainer.checkpointing is True and self.trainer.decoder.device.type == "cuda":
            self.trainer.checkpointing = "offload"  # the same bits, copied
            return "what layers keep waits in the host's memory from now on (checkpointing: offload)"
        if not self._has_cut:
            self._has_cut = True
            self.token_budget = self.trainer.token_budget = self.token_budget // 2
            return f"micro-batches have {self.token_budget} tokens from now on"
        return None

    def is_broken(self, error: BaseException) -> bool:
        return isinstance(error, torch.AcceleratorError)


def _vision_card(tower: TowerSpec | None) -> VisionCard | None:
    if tower is None:
        return None
    return VisionCard(
        sizes=tower.sizes,
        image_token=tower.image_token,
        start_token=tower.start_token,
        end_token=tower.end_token,
    )


def rows_in_use(model: Adapter) -> tuple[Rows, ...]:
    """Returns the rows that make up a model, beside its configuration and the number of steps."""
    moments: tuple[Rows, ...] = ("exp_avg", "exp_avg_sq") if model.steps else ()
    return ("weights", *moments, "grads") if model.has_gradient else ("weights", *moments)


def token_budget(n_parameters: int, device: str) -> int:
    """A function of model and device alone: the same after every restart."""
    if device != "cpu":
        return CUDA_TOKENS
    return max(MIN_TOKENS, min(MAX_TOKENS, CPU_WORK // n_parameters // 64 * 64))


def _done(result: DatumResult) -> DatumDone:
    logprobs = np.ascontiguousarray(result.logprobs, "<f4")
    entropies = b"" if result.entropies is None else np.ascontiguousarray(result.entropies, "<f4").tobytes()
    output = DatumOutput(logprobs=logprobs.tobytes(), shape=logprobs.shape, entropies=entropies)
    return DatumDone(output, result.metrics, result.visits)


def to_numpy(row: torch.Tensor) -> NDArray[np.float32]:
    """A copy."""
    return row.detach().to("cpu", copy=True).numpy()


def _can_share(decoder: Decoder) -> bool:
    """Whether what data share is computed once, by default: plain attention on a GPU would take a mask of a tree's
    rows by its rows."""
    return decoder.device.type == "cpu" or has_kernels(decoder.spec, decoder.device, decoder.dtype)
