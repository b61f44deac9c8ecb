"""The plan of `palestra serve --dry-run`: which rank goes to which device and how much memory it needs, before anything
starts; and where that is more than there is, the nearest settings with which it fits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from palestra.config.serve import ModelConfig
from palestra.engine.torch_trainer import token_budget
from palestra.memory_plan.model_plan import (
    ADAPTER_COPIES,
    DTYPE_BYTES,
    LAYER,
    MAX_GPUS,
    RUNTIME_BYTES,
    exchanged_numbers,
    is_product,
    kept_bytes,
    training_bytes,
    weight_bytes,
)
from palestra.model.errors import UnsupportedModel
from palestra.model.loading.context_parallel import require_divisible_heads
from palestra.model.loading.parameter_counts import count_parameters
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.tensor_parallel import TensorShard
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.lora.layout import Layout
from palestra.model.quantised.forms import FORMS
from palestra.model.sampling.sampler import CPU_CACHE_BYTES
from palestra.types import Checkpointing, LoraConfig

LORA_RANK = 32
MIN_TOKENS = 512
FEWER_BITS = ("int8", "nf4")
SMALL_CACHES = (8 * 4096, 2 * 4096)  # tokens
GATHERED_LAYERS = 2  # one computes while the next one comes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank and its memory, in bytes by what it is for."""

    model: str
    rank: int
    device: str
    parts: dict[str, int]
    checkpointing: Checkpointing = False
    offloaded_bytes: int = 0
    """What layers keep that waits in the host's memory."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class ServePlan:
    ranks: list[RankPlan]
    memory: dict[str, int]
    """Bytes that each device has."""
    advice: dict[str, list[str] | None] = field(default_factory=dict)
    """For models that do not fit: settings with which each would by itself, or None if none was found."""

    @property
    def too_full(self) -> list[str]:
        """Devices on which more is needed than there is."""
        used = Counter[str]()
        for rank in self.ranks:
            used[rank.device] += rank.total_bytes
        return [device for device, size in used.items() if size > self.memory[device]]


def plan_serving(models: list[ModelConfig], memory_bytes: int | None = None) -> ServePlan:
    """`memory_bytes`: of each device, where this machine does not have those that are planned for."""
    ranks: list[RankPlan] = []
    memory: dict[str, int] = {}
    for model in models:
        devices = [_device_name(device) for device in model.devices]
        memory |= {device: memory_bytes or _device_memory(device) for device in devices}
        ranks += _ranks_of(model, _Facts.of(model), devices, memory)
    plan = ServePlan(ranks, memory)
    full = set(plan.too_full)
    for number, model in enumerate(models):
        if full & {_device_name(device) for device in model.devices}:
            found = _nearest(model, _Facts.of(model), memory_bytes or max(memory.values()))
            settings = None if found is None else [f"models.{number}.{name}={value}" for name, value in found.items()]
            plan.advice[model.name[0]] = settings
    return plan


@dataclass(frozen=True, eq=False)
class _Facts:
    """What a model needs, which is found once for the hundreds of settings that advice tries."""

    spec: ModelSpec
    stored: dict[str, tuple[int, ...]]
    """Shapes by name."""

    def __post_init__(self) -> None:
        for compute in (self.layer_products, self.weights, self.own, self.adapter_numbers):
            object.__setattr__(self, compute.__name__, cache(compute))

    @classmethod
    def of(cls, model: ModelConfig) -> _Facts:
        with WeightFiles(model.path) as files:
            return cls(ModelSpec.from_folder(model.path), {name: files.shape(name) for name in files})

    def layer_products(self, item: int) -> Counter[str]:
        """Bytes of what can be divided among ranks, by layer."""
        found = Counter[str]()
        for name, shape in self.stored.items():
            if is_product(name, shape):
                layer = re.search(LAYER, name)
                found[layer.group() if layer else ""] += prod(shape) * item
        return found

    def weights(self, form: str | None, item: int, sees: bool) -> tuple[int, int]:
        return weight_bytes(self.stored, FORMS.get(form or ""), item, sees=sees)

    def own(self, tensor: int) -> ModelSpec:
        """The first rank's part of the model."""
        return TensorShard(0, tensor).spec(self.spec)

    def adapter_numbers(self, tensor: int) -> int:
        return Layout.of(self.own(tensor), LoraConfig(rank=LORA_RANK)).size


def _ranks_of(model: ModelConfig, facts: _Facts, devices: list[str], memory: Mapping[str, int]) -> list[RankPlan]:
    on_device, planned = Counter(devices), dict[tuple[bool, str, int], dict[str, int]]()
    ranks = []
    for rank, device in enumerate(devices):
        room = memory[device] // on_device[device]
        samples = rank < model.parallel.tensor and model.sampler == "torch"
        key = samples, device.partition(":")[0], room  # those on equal devices need the same
        if key not in planned:
            planned[key] = _parts(model, facts, device, room, samples=samples)
        checkpointing = model.checkpointing if key[1] == "cuda" else bool(model.checkpointing)
        kept = kept_bytes(facts.spec, _tokens(model, facts.spec, key[1]), _item(model, facts.spec))
        offloaded = kept if checkpointing == "offload" else 0
        ranks.append(RankPlan(model.name[0], rank, device, planned[key], checkpointing, offloaded))
    return ranks


def _parts(model: ModelConfig, facts: _Facts, device: str, room: int, *, samples: bool) -> dict[str, int]:
    spec, kind, tensor = facts.spec, device.partition(":")[0], model.parallel.tensor
    own, context = facts.own(tensor), model.parallel.context
    require_divisible_heads(own, context)
    item, tokens = _item(model, spec), _tokens(model, spec, kind)
    sees = spec.tower is not None and len(model.devices) == 1
    weights, scratch = facts.weights(model.weights, item, sees)
    layers = facts.layer_products(item)
    weights -= layers.total() - layers.total() // max(model.parallel.shard, tensor)
    gathered = GATHERED_LAYERS * max(layers.values(), default=0) if model.parallel.shard > 1 else 0
    row, part = facts.adapter_numbers(1), facts.adapter_numbers(tensor)
    copies = (item if item < 4 or tensor > 1 else 0) + (4 if tensor > 1 else 0)  # what products read and add to
    parts = {
        "weights": weights,
        "a weight written out": scratch,
        "gathered layers": gathered,
        f"one adapter of rank {LORA_RANK} in training": 4 * ADAPTER_COPIES * row + copies * part,
        "sums of gradient shards": 4 * part * model.gradient_shards.bit_length() if model.gradient_shards > 1 else 0,
        f"training {tokens} tokens" + (f" of {tokens * context}" if context > 1 else ""): training_bytes(
            own, tokens, item, kind=kind, checkpointing=model.checkpointing
        ),
        "exchanges of rows": tokens * exchanged_numbers(own, context) * item if context > 1 else 0,
        "sums over ranks": tokens * spec.hidden_size * (tensor * item + 4) if tensor > 1 else 0,
        "runtime": RUNTIME_BYTES if kind == "cuda" else 0,
    }
    if samples:
        parts["KV cache"] = _cache_bytes(model, own, item, kind, room - weights - scratch)
    return {name: size for name, size in parts.items() if size}


def _item(model: ModelConfig, spec: ModelSpec) -> int:
    return 2 if model.weights == "bf16" else DTYPE_BYTES.get(model.dtype or spec.dtype, 4)


def _tokens(model: ModelConfig, spec: ModelSpec, kind: str) -> int:
    return model.micro_batch_tokens or token_budget(count_parameters(spec), kind)


def _cache_bytes(model: ModelConfig, spec: ModelSpec, item: int, kind: str, left: int) -> int:
    if model.cache_tokens is not None:
        return model.cache_tokens * spec.kv_numbers_per_token * item
    return CPU_CACHE_BYTES if kind == "cpu" else max(0, int(left * model.cache_share))


# The nearest plan that fits


def _nearest(model: ModelConfig, facts: _Facts, room: int) -> dict[str, Any] | None:
    for changes in _changes(model, facts):
        changed = _changed(model, changes)
        devices = [_device_name(device) for device in changed.devices]
        memory = dict.fromkeys(devices, room)
        if not ServePlan(_ranks_of(changed, facts, devices, memory), memory).too_full:
            return changes
    return None


def _changes(model: ModelConfig, facts: _Facts) -> Iterator[dict[str, Any]]:
    """Yields changes from what changes least to what costs most: recomputing, beside a GPU what is kept for that in the
    host's memory, smaller micro-batches, a smaller cache; a divided base model; fewer bits; more GPUs. Where the worker
    samples, ranks share every layer if they can: layers that are gathered for each token are slow."""
    spec, ranks, parallel = facts.spec, len(model.devices), model.parallel
    is_cpu = model.devices[0] == "cpu"
    tokens = _tokens(model, spec, "cpu" if is_cpu else "cuda")
    recomputed: list[Checkpointing] = [True] if is_cpu else [True, "offload"]
    if model.checkpointing == "offload":
        recomputed = recomputed[-1:]
    small: list[dict[str, Any]] = [{}, *({"checkpointing": one} for one in recomputed)]
    while tokens > MIN_TOKENS:
        tokens //= 2
        small += [{"checkpointing": one, "micro_batch_tokens": tokens} for one in recomputed]
    caches = SMALL_CACHES if model.cache_tokens is None and model.sampler == "torch" else ()
    small += [change | {"cache_tokens": cache} for cache in caches for change in small]
    is_plain = model.weights in (None, "bf16")
    samples_here = model.sampler == "torch" and model.replicas is None
    can_share = is_plain and samples_here and parallel.shard == 1
    can_shard = is_plain and parallel.tensor == 1
    bases: list[dict[str, Any]] = [{}]
    context = parallel.context
    for tensor in _powers(2 * parallel.tensor, ranks // context) if can_share else ():
        data = {} if parallel.data is None else {"parallel.data": ranks // (tensor * context)}
        bases += [{"parallel.tensor": tensor} | data] if _is_divisible(spec, tensor, context) else []
    if can_shard:
        bases += [{"parallel.shard": shard} for shard in _powers(2 * parallel.shard, ranks)]
    if model.weights is None and parallel.shard == parallel.tensor == 1:
        bases += [{"weights": form} for form in FEWER_BITS]
    for gpus in () if is_cpu else _powers(2 * ranks, MAX_GPUS):
        if can_share and _is_divisible(spec, gpus // context, context):
            bases.append({"gpus": gpus, "parallel.tensor": gpus // context})
        if can_shard:
            bases.append({"gpus": gpus, "parallel.shard": gpus, "gradient_shards": max(model.gradient_shards, gpus, 8)})
    for base in bases:
        for change in small:
            if base or change:
                yield base | change


def _is_divisible(spec: ModelSpec, tensor: int, context: int) -> bool:
    try:
        require_divisible_heads(TensorShard(0, tensor).spec(spec), context)
    except UnsupportedModel:
        return False
    return True


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _changed(model: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    plain = {name: value for name, value in changes.items() if not name.startswith("parallel.")}
    data = None if "gpus" in changes else changes.get("parallel.data", model.parallel.data)
    shard = changes.get("parallel.shard", model.parallel.shard)
    tensor = changes.get("parallel.tensor", model.parallel.tensor)
    parallel = model.parallel.model_copy(update={"data": data, "shard": shard, "tensor": tensor})
    return model.model_copy(update={**plain, "parallel": parallel})


# Devices


def _device_name(device: str) -> str:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if device == "cuda" else device


def _device_memory(device: str) -> int:
    import psutil
    import torch

    if device == "cpu":
        return psutil.virtual_memory().total
    try:
        return torch.cuda.mem_get_info(device)[1]
    except (RuntimeError, AssertionError, ValueError):
        raise ValueError(f"there is no {device} here; to plan for one: --memory SIZE, such as --memory 80GB") from None


def by_device(plan: ServePlan) -> dict[str, list[RankPlan]]:
    found: dict[str, list[RankPlan]] = defaultdict(list)
    for rank in plan.ranks:
        found[rank.device].append(rank)
    return dict(found)
