"""Adapters on disk: folders in PEFT's form, in and out.

A folder appears whole or not at all.

Owns: the format. Never touches: checkpoint names, who may read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from palestra.model.errors import AdapterError
from palestra.model.lora.adapter_names import (
    ATTENTION,
    DELTA_NET,
    HEAD,
    MLP,
    PREFIX,
    TIED_HEAD,
    WHOLES,
    AdapterFormat,
    join_rows,
    module_name,
    split_rows,
)
from palestra.model.lora.adapters import Adapter, AdapterPool, Layout
from palestra.types import LoraConfig
from palestra.types.engine import UNQUANTISED
from palestra.util.files import whole_folder

FORMAT_VERSION = 1
TRAINED_ON = "palestra_trained_on"
CONFIG, WEIGHTS, OPTIMIZER = "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"
_UNSUPPORTED = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "peft_type": "LORA",
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
}
_TIED_LEAF = TIED_HEAD.rsplit(".", 1)[-1]
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")  # the others also change the base weights


def save_adapter(
    adapter: Adapter,
    folder: str | Path,
    *,
    base_model: str = "",
    optimizer: bool = False,
    form: AdapterFormat = "tinker",
    is_tied: bool = False,
    trained_on: str = "",
) -> None:
    """With `optimizer` also what is needed to go on training. `form` differs for models whose checkpoints join
    projections that are trained apart (see `adapter_names`). `is_tied`: names the unembedding as the Tinker
    cookbook's merge does for tied models. `trained_on`: what the base's weights were kept in, for
    `require_trained_on`."""
    if optimizer and adapter.frozen:
        raise AdapterError("a snapshot has no optimizer state; save the original, or without the optimizer")
    matrices, rank, alpha = adapter_matrices(adapter), adapter.config.rank, _plain(adapter.config.alpha)
    if form == "peft":
        matrices = join_rows(matrices)
    if is_tied:
        matrices = {f"{TIED_HEAD}{k.removeprefix(HEAD)}" if k.startswith(HEAD) else k: t for k, t in matrices.items()}
    tensors = {f"{PREFIX}{name}": t.cpu().contiguous() for name, t in matrices.items()}
    modules = sorted({name.partition(".lora_")[0].rsplit(".", 1)[-1] for name in matrices})
    wholes = {name: len(WHOLES[name]) for name in modules if name in WHOLES}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
    }
    if wholes:
        config["rank_pattern"] = {name: n * rank for name, n in wholes.items()}
        config["alpha_pattern"] = {name: n * alpha for name, n in wholes.items()}
    with whole_folder(new_folder(folder)) as temporary:
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        metadata = {"format": "pt"} | ({TRAINED_ON: trained_on} if trained_on else {})
        save_file(tensors, temporary / WEIGHTS, metadata=metadata)
        if optimizer:
            moments = {k: adapter.row(k).cpu() for k in ("exp_avg", "exp_avg_sq")}
            state = {"format": FORMAT_VERSION, "steps": adapter.steps}
            save_file(moments, temporary / OPTIMIZER, metadata={"palestra": json.dumps(state)})


def load_adapter(pool: AdapterPool, folder: str | Path, *, optimizer: bool = False) -> Adapter:
    """A new adapter with the folder's shape and weights; the folder may come from PEFT itself."""
    adapter = pool.create(read_config(folder))
    try:
        load_into(pool, adapter, folder, optimizer=optimizer)
    except BaseException:
        pool.free(adapter)
        raise
    return adapter


def load_snapshot(pool: AdapterPool, folder: str | Path) -> Adapter:
    """A folder's weights for sampling alone."""
    config = read_config(folder)
    pool.check(config)
    return pool.freeze(config, _read_row(Layout.of(pool.spec, config), Path(folder)))


def require_trained_on(folder: str | Path, weights: str) -> None:
    """Refuses a checkpoint that was trained on a base in another form; one that does not say it passes."""
    file = Path(folder) / WEIGHTS
    found = _metadata(file).get(TRAINED_ON, weights) if file.is_file() else weights
    if found != weights:
        raise AdapterError(
            f"{folder}: this checkpoint was trained on {found} weights, and the model is served with {weights} ones; "
            f"serve it with {weights_setting(found)}, or set models.0.allow_other_weights=true"
        )


def weights_setting(found: str) -> str:
    """The setting with which a model is served in this form."""
    return "no models.0.weights" if found == UNQUANTISED else f"models.0.weights={found}"


def load_into(pool: AdapterPool, adapter: Adapter, folder: str | Path, *, optimizer: bool = False) -> None:
    """Replaces an adapter's weights. Everything is read and checked before anything changes."""
    folder = Path(folder)
    config = read_config(folder)
    if _shape(config) != _shape(adapter.config):
        raise AdapterError(f"{folder} holds an adapter of {_shape(config)}, but this one has {_shape(adapter.config)}")
    row = _read_row(adapter.stack.layout, folder)
    moments = _read_moments(adapter, folder) if optimizer else None
    pool.before_change(adapter)
    adapter.row("weights").copy_(row)
    pool.clear_training_state(adapter)
    if moments is not None:
        steps, tensors = moments
        for kind, tensor in tensors.items():
            adapter.row(kind).copy_(tensor)  # type: ignore[arg-type]
        adapter.steps = steps
    pool.after_change(adapter)


def read_config(folder: str | Path) -> LoraConfig:
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise AdapterError(f"{file}: no such file; a PEFT adapter folder has {CONFIG} and {WEIGHTS}")
    try:
        raw = json.loads(file.read_text())
        rank, alpha, modules = int(raw["r"]), float(raw["lora_alpha"]), _modules(raw, file)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as e:
        raise AdapterError(f"{file}: not a LoRA config ({e!r})") from None
    _refuse_patterns(raw, file, rank, alpha)
    for field, plain in _UNSUPPORTED.items():
        if raw.get(field, plain) not in (plain, None):
            raise AdapterError(f"{file}: field {field!r} is {raw[field]!r}; supported: {plain!r}")
    if raw.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise AdapterError(
            f"{file}: field 'init_lora_weights' is {raw['init_lora_weights']!r}, which changes the base model too; "
            "supported: True, False, 'gaussian', 'orthogonal'"
        )
    if raw.get("use_rslora"):
        alpha *= rank**0.5  # rank-stabilised: alpha / sqrt(r)
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        train_attn=bool(modules & (ATTENTION | DELTA_NET)),
        train_mlp=bool(modules & MLP),
        train_unembed=HEAD in modules,
    )


def adapter_matrices(adapter: Adapter) -> dict[str, Tensor]:
    """Every A and B under its Hugging Face module name, as views of the float32 weights."""
    rank, row, found = adapter.config.rank, adapter.row("weights"), {}
    for site in adapter.stack.layout.sites.values():
        for i, part in enumerate(site.parts):
            start = site.a_offset + i * rank * site.in_size
            found[f"{part.module}.lora_A.weight"] = row[start : start + rank * site.in_size].view(rank, site.in_size)
            b = row[part.b_offset : part.b_offset + part.out_size * rank]
            found[f"{part.module}.lora_B.weight"] = b.view(rank, part.out_size).T
    return found


def new_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    if folder.exists():
        raise AdapterError(f"{folder} already exists; choose another name or remove it first")
    return folder


def _modules(raw: dict[str, Any], file: Path) -> set[str]:
    modules = raw["target_modules"]
    if isinstance(modules, str):
        modules = ATTENTION | MLP if modules == "all-linear" else {modules}
    known = ATTENTION | DELTA_NET | MLP | {HEAD}
    plain = {HEAD if leaf == _TIED_LEAF else leaf for leaf in (m.rsplit(".", 1)[-1] for m in modules)}
    if not plain or plain - known:
        odd = ", ".join(sorted(plain - known)) or "nothing"
        raise AdapterError(f"{file}: target_modules names {odd}; supported: {', '.join(sorted(known))}")
    return plain


def _refuse_patterns(raw: dict[str, Any], file: Path, rank: int, alpha: float) -> None:
    """Ranks of their own are understood for the matrices that we would write so."""
    ranks, alphas = (raw.get(field) or {} for field in ("rank_pattern", "alpha_pattern"))
    for name in ranks | alphas:
        own, n = (ranks.get(name, rank), alphas.get(name, alpha)), len(WHOLES.get(name, (name,)))
        if own not in ((rank, alpha), (n * rank, n * alpha)):
            field = "rank_pattern" if name in ranks else "alpha_pattern"
            raise AdapterError(f"{file}: field {field!r} is {raw[field]!r}; supported: {{}}")


def _read_row(layout: Layout, folder: Path) -> Tensor:
    """The flat row; modules the file does not have stay zero, which means: no change, and none to be learned."""
    file, rank = folder / WEIGHTS, layout.rank
    stored = {module_name(key): tensor for key, tensor in _load(file).items()}
    try:
        split_rows(stored, {p.module: p.out_size for site in layout.sites.values() for p in site.parts}, rank)
    except AdapterError as e:
        raise AdapterError(f"{file}: {e}") from None
    row = torch.zeros(layout.size)
    for site in layout.sites.values():
        for i, part in enumerate(site.parts):
            a_start = site.a_offset + i * rank * site.in_size
            if sum(f"{part.module}.lora_{x}.weight" in stored for x in "AB") == 1:
                raise AdapterError(f"{file}: {part.module} has only one of lora_A and lora_B")
            for name, start, shape in (
                ("lora_A", a_start, (rank, site.in_size)),
                ("lora_B", part.b_offset, (part.out_size, rank)),
            ):
                key = f"{part.module}.{name}.weight"
                tensor = stored.pop(key, None)
                if tensor is None:
                    continue
                if tuple(tensor.shape) != shape:
                    raise AdapterError(f"{file}: {key} has shape {list(tensor.shape)}, this model needs {list(shape)}")
                stored_as = tensor.T if name == "lora_B" else tensor
                row[start : start + tensor.numel()] = stored_as.flatten().float()
    left = [k for k in stored if ".lora_" in k]  # PEFT also stores copies of embeddings: the base has those
    if left:
        raise AdapterError(f"{file}: {left[0]} (and {len(left) - 1} more) has no place in this model")
    return row


def _read_moments(adapter: Adapter, folder: Path) -> tuple[int, dict[str, Tensor]]:
    file = folder / OPTIMIZER
    if not file.is_file():
        raise AdapterError(f"{file}: no such file; this adapter was saved without its optimizer state")
    tensors = _load(file)
    for kind in ("exp_avg", "exp_avg_sq"):
        if kind not in tensors or tensors[kind].numel() != adapter.stack.layout.size:
            raise AdapterError(f"{file}: {kind} is missing or of the wrong size")
    state = json.loads(_metadata(file).get("palestra", "{}"))
    if state.get("format") != FORMAT_VERSION or not isinstance(state.get("steps"), int):
        raise AdapterError(
            f"{file}: metadata names format {state.get('format')}; supported: {FORMAT_VERSION}, with steps"
        )
    return state["steps"], tensors


def _load(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise AdapterError(f"{file}: no such file")
    try:
        return load_file(file)
    except SafetensorError as e:
        raise AdapterError(f"{file}: not a complete safetensors file ({e})") from None


def _metadata(file: Path) -> dict[str, str]:
    """What the header says besides; nothing where it is damaged, which reading the tensors tells."""
    with file.open("rb") as f:
        try:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        except (ValueError, OverflowError, MemoryError):
            return {}
    return header.get("__metadata__", {})


def _shape(config: LoraConfig) -> str:
    flags = [n for n in ("train_attn", "train_mlp", "train_unembed") if getattr(config, n)]
    return f"rank {config.rank}, alpha {_plain(config.alpha)}, {' '.join(flags)}"


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value
