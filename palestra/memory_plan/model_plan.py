"""The plan of `palestra model info --plan`: the memory of a model that is sampled and trained, before it is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.context_parallel import require_divisible_heads
from palestra.model.loading.layer_spec import RecurrenceSpec
from palestra.model.loading.spec import STATE_BYTES, ModelSpec
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.lora.layout import Layout
from palestra.model.mixers.chunked_scan import CHUNK
from palestra.model.mlp.dense import LONG_ROWS
from palestra.model.quantised.forms import FORMS, Form
from palestra.model.training.head import CHUNK_CELLS
from palestra.types import Checkpointing, LoraConfig

LAYER = re.compile(r"\.layers\.\d+\.")
PLAIN = re.compile(r"(conv1d|in_proj_(a|b|ba)|kv_b_proj|(mlp|mixer)\.gate|router|shared_expert_gate)(\.weight)?$|bias$")
"""What is never quantised in layers, though it has two dimensions."""
LEFT_OUT = re.compile(r"^mtp\.|audio_tower|embed_audio")
TOWER = re.compile(r"vision_tower|embed_vision|visual\.")
"""What reads pictures, in the model's type; of families that read text only it is left out."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ADAPTER_COPIES = 4  # weight, gradient, and the two moments of Adam, in float32
RUNTIME_BYTES = 1 << 30  # CUDA's own, its libraries and kernels, and what the allocator leaves between blocks
MAX_TOKENS, MIN_TOKENS = 8192, 512
MAX_GPUS = 64
WAY_TEXTS: dict[Checkpointing, str] = {  # speeds as measured on an H200
    False: "every layer keeps its activations, which is the fastest",
    True: "layers are computed again in backward passes (checkpointing), at about 0.7 of the speed",
    "offload": "layers are computed again in backward passes from inputs in main memory (checkpointing=offload), "
    "at about 0.7 of the speed",
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    memory_bytes: int
    rows: int
    """Sequences that are sampled at once."""
    context: int
    """Tokens of each."""
    weights: str | None = None
    rank: int = 32
    kind: str = "cuda"
    """Of the device; beside a CPU there is no other memory to offload to."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights_bytes: int
    scratch_bytes: int
    """One weight at a time, written out; 0 without quantising."""
    adapter_bytes: int
    """One adapter in training."""
    kv_bytes: int
    state_bytes: int
    training_bytes: int
    """Activations of a micro-batch that are kept or computed again, and the logits of a chunk."""
    checkpointing: Checkpointing
    """The fastest way that fits."""
    offloaded_bytes: int
    """What layers keep that has to wait in the host's memory; 0 where it fits the device."""
    runtime_bytes: int
    micro_batch_tokens: int
    """The largest micro-batch that fits, or the smallest sensible one."""
    total_bytes: int
    memory_bytes: int
    fits: bool
    settings: list[str]
    """Settings with which `palestra serve` uses so much."""
    shared: list[str]
    """Where it does not fit: settings with which several such devices have room for a sequence together. Empty: they
    have none, or one does."""


def plan_memory(files: WeightFiles, spec: ModelSpec, request: PlanRequest) -> MemoryPlan:
    """The memory to train in the fastest way that fits and to sample `rows` sequences of `context` tokens."""
    form = FORMS.get(request.weights or "")
    item = 2 if request.weights == "bf16" else DTYPE_BYTES.get(spec.dtype, 4)
    weights, scratch = weight_bytes(
        {name: files.shape(name) for name in files}, form, item, sees=spec.tower is not None
    )
    adapter = adapter_bytes(spec, request.rank, item)
    kv = request.rows * request.context * spec.kv_numbers_per_token * item
    states = request.rows * spec.state_bytes(item)
    runtime = RUNTIME_BYTES if request.kind == "cuda" else 0
    fixed = weights + scratch + adapter + kv + states + runtime
    room = request.memory_bytes - fixed
    tokens, checkpointing = _fastest_way(spec, request, item, room)
    training = training_bytes(spec, tokens, item, kind=request.kind, checkpointing=checkpointing)
    total = fixed + training
    fits = total <= request.memory_bytes
    shared = [] if fits else _shared_settings(spec, request, room, item)
    return MemoryPlan(
        weights_bytes=weights,
        scratch_bytes=scratch,
        adapter_bytes=adapter,
        kv_bytes=kv,
        state_bytes=states,
        training_bytes=training,
        checkpointing=checkpointing,
        offloaded_bytes=kept_bytes(spec, tokens, item) if checkpointing == "offload" else 0,
        runtime_bytes=runtime,
        micro_batch_tokens=tokens,
        total_bytes=total,
        memory_bytes=request.memory_bytes,
        fits=fits,
        settings=_settings(request, tokens, checkpointing),
        shared=shared,
    )


def _fastest_way(spec: ModelSpec, request: PlanRequest, item: int, room: int) -> tuple[int, Checkpointing]:
    """Tokens of a micro-batch, and what layers keep of them. What experts and recurrences keep when nothing is computed
    again was not measured, so they are planned with checkpointing."""
    tokens = max(MAX_TOKENS, request.context)  # a sequence is never divided among micro-batches
    is_measured = not spec.experts and not spec.recurrences
    if is_measured and training_bytes(spec, tokens, item, kind=request.kind, checkpointing=False) <= room:
        return tokens, False
    while tokens > max(MIN_TOKENS, request.context) and training_bytes(spec, tokens, item, kind=request.kind) > room:
        tokens = max(tokens // 2, request.context)
    if request.kind == "cuda" and training_bytes(spec, tokens, item) > room:
        return tokens, "offload"
    return tokens, True


def _shared_settings(spec: ModelSpec, request: PlanRequest, room: int, item: int) -> list[str]:
    """The fewest devices on which `parallel.context` makes room for a sequence, if there are some."""
    ranks = 2
    while ranks <= MAX_GPUS and request.kind == "cuda" and _is_divisible(spec, ranks):
        tokens = max(MIN_TOKENS, -(-request.context // ranks))
        exchanged = tokens * exchanged_numbers(spec, ranks) * item
        for checkpointing in (True, "offload"):
            if training_bytes(spec, tokens, item, checkpointing=checkpointing) + exchanged <= room:
                devices = [f"models.0.gpus={ranks}", f"models.0.parallel.context={ranks}"]
                return devices + _settings(request, tokens, checkpointing)
        ranks *= 2
    return []


def _is_divisible(spec: ModelSpec, ranks: int) -> bool:
    try:
        require_divisible_heads(spec, ranks)
    except UnsupportedModel:
        return False
    return True


def exchanged_numbers(spec: ModelSpec, context: int) -> int:
    """Numbers of a token that are on their way from a layer's rows to its heads and back, as sent and as received."""
    attention = (
        2 * shape.q_size + 2 * shape.kv_size * max(1, context // shape.n_kv_heads)
        for shape in (spec.heads[n] for n in (*spec.attention_layers, *spec.kv_sources))
    )
    recurrence = (2 * layer.conv_size + 2 * prod(layer.output_shape) for layer in spec.recurrences.values())
    return 2 * max((*attention, *recurrence), default=0)


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], form: Form | None, item: int, *, sees: bool) -> tuple[int, int]:
    """Bytes of all weights, and of the largest one that is written out before its product."""
    total, joined = 0, Counter[str]()
    for name, shape in shapes.items():
        if LEFT_OUT.search(name) or (TOWER.search(name) and not sees):
            continue
        size, inputs = prod(shape), shape[-1] if len(shape) > 1 else 0
        if form is not None and is_product(name, shape) and form.fits(inputs):
            total += form.size_bytes(size // inputs, inputs)
            joined[_product(name)] += size * item
        else:
            total += size * item
    return total, max(joined.values(), default=0)


def is_product(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is a weight of a layer's products."""
    return (
        len(shape) > 1 and LAYER.search(name) is not None and TOWER.search(name) is None and PLAIN.search(name) is None
    )


def adapter_bytes(spec: ModelSpec, rank: int, item: int) -> int:
    """One adapter in training."""
    return Layout.of(spec, LoraConfig(rank=rank)).size * (4 * ADAPTER_COPIES + (item if item < 4 else 0))


def _product(name: str) -> str:
    """Names the linear layers that are written out together: projections of one input, and all experts of a layer."""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    return re.sub(r"\.(gate|up)_proj", ".gate_up_proj", re.sub(r"\.[qkv]_proj", ".qkv_proj", name))


def kept_bytes(spec: ModelSpec, tokens: int, item: int) -> int:
    """What layers keep of a micro-batch with checkpointing: their input."""
    return tokens * spec.n_layers * spec.hidden_size * item


def training_bytes(
    spec: ModelSpec, tokens: int, item: int, *, kind: str = "cuda", checkpointing: Checkpointing = True
) -> int:
    """Returns the bytes of training on the device. With checkpointing each layer keeps its input, without it all of its
    activations; one layer at a time has all of them, and their gradients. Where inputs are offloaded, those of two
    layers are on the device."""
    experts = next(iter(spec.experts.values()), None)
    heads = max(shape.q_size + 2 * shape.kv_size for shape in spec.heads)
    attention, wide = 4 * spec.hidden_size + 3 * heads, 5 * spec.intermediate_size
    recurrence = max((_recurrence_bytes(one, spec.hidden_size, item) for one in spec.recurrences.values()), default=0)
    if experts is None:  # Qwen3 as measured on an H200 with 4,096 to 131,072 tokens, to 6 %
        mixing = max(2 * item * (4 * attention // 5), recurrence)
        inside = tokens * mixing + min(tokens, LONG_ROWS) * 4 * spec.intermediate_size * item
    else:
        wide = max(wide, experts.per_token * (5 * experts.size + 2 * spec.hidden_size))
        inside = tokens * max(2 * item * (attention + wide), recurrence)
    without = 2 * spec.hidden_size + 3 * heads // 2 + 3 * wide // 5
    kept = tokens * spec.n_layers * without * item
    if checkpointing:
        kept = kept_bytes(spec, tokens, item)
    if checkpointing == "offload" and kind == "cuda":
        kept = kept * min(2, spec.n_layers) // spec.n_layers
    logits = CHUNK_CELLS[kind] * (item + 4)
    return kept + inside + logits


def _recurrence_bytes(layer: RecurrenceSpec, hidden_size: int, item: int) -> int:
    """Returns the bytes of a token in a layer with a recurrence, with gradients, by what its kernels keep: in
    float32 the state before each chunk, products within chunks and outputs; in the model's type what is convolved."""
    outputs = prod(layer.output_shape)
    wide = 2 * prod(layer.state_shape) // CHUNK + 2 * layer.state_shape[0] * CHUNK + 4 * outputs
    return STATE_BYTES * wide + item * (5 * layer.conv_size + 4 * outputs + 6 * hidden_size)


def _settings(request: PlanRequest, tokens: int, checkpointing: Checkpointing) -> list[str]:
    weights = [f"models.0.weights={request.weights}"] if request.weights else []
    return [
        *weights,
        f"models.0.checkpointing={str(checkpointing).lower()}",
        f"models.0.micro_batch_tokens={min(tokens, MAX_TOKENS)}",  # the sampler's steps have so many, too
        f"models.0.max_sample_rows={request.rows}",
        f"models.0.cache_tokens={request.rows * request.context}",
    ]


def device_memory() -> tuple[int, str]:
    """The memory of this machine's GPU, or its main memory, and of which kind the device is."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1], "cuda"
    return psutil.virtual_memory().total, "cpu"
