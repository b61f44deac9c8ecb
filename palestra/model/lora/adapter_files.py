"""Adapters on disk: folders in PEFT's form, in and out.

A folder appears whole or not at all.

A file is named by its SHA-256, so equal weights must give equal bytes: `pack_adapter` sorts the header.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from palestra.model.errors import AdapterError
from palestra.model.lora.adapter_names import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    EXPERTS,
    HEAD,
    MAMBA,
    MLP,
    PREFIX,
    TIED_HEAD,
    WHOLES,
    AdapterFormat,
    join_rows,
    module_name,
    split_rows,
)
from palestra.model.lora.adapters import Adapter, AdapterPool
from palestra.model.lora.expert_names import DOWN, GATE_UP, UP, join_experts, split_experts
from palestra.model.lora.layout import Layout
from palestra.types import LoraConfig
from palestra.types.engine import PACKED_CONFIG, UNQUANTISED
from palestra.util.atomic_files import whole_folder

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
SHARED_EXPERTS = "palestra_shared_experts"
"""In the metadata of a file in PEFT's form: what it repeats for each expert is one matrix."""
HEADER_SIZE = 8  # bytes at the beginning of a safetensors file, which say how long its header is
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
    """Saves an adapter, with `optimizer` also what is needed to go on training. `form` differs for models whose
    checkpoints join projections that are trained apart (see `adapter_names`). `is_tied`: names the unembedding as the
    Tinker cookbook's merge does for tied models. `trained_on`: what the base's weights were kept in, for
    `require_trained_on`."""
    if optimizer and adapter.frozen:
        raise AdapterError("a snapshot has no optimizer state; save the original, or without the optimizer")
    parts = _parts(adapter, base_model=base_model, form=form, is_tied=is_tied, trained_on=trained_on)
    with whole_folder(new_folder(folder)) as temporary:
        (temporary / CONFIG).write_text(parts.config)
        save_file(parts.tensors, temporary / WEIGHTS, metadata=parts.metadata)
        if optimizer:
            moments = {k: adapter.row(k).cpu() for k in ("exp_avg", "exp_avg_sq")}
            state = {"format": FORMAT_VERSION, "steps": adapter.steps}
            save_file(moments, temporary / OPTIMIZER, metadata={"palestra": json.dumps(state)})


def pack_adapter(adapter: Adapter, *, base_model: str, dtype: torch.dtype) -> bytes:
    """An adapter as one file, to be sent: PEFT's weights with the config in their metadata. The same weights give the
    same bytes. `dtype` is the one that it is sampled in, so that nothing is lost."""
    parts = _parts(adapter, base_model=base_model)
    tensors = {name: tensor.to(dtype) for name, tensor in parts.tensors.items()}
    raw = save(tensors, metadata=parts.metadata | {PACKED_CONFIG: parts.config})
    size = int.from_bytes(raw[:HEADER_SIZE], "little")
    header = json.dumps(json.loads(raw[HEADER_SIZE : HEADER_SIZE + size]), sort_keys=True).encode()
    header += b" " * (-len(header) % HEADER_SIZE)  # safetensors writes the metadata in any order
    return b"".join((len(header).to_bytes(HEADER_SIZE, "little"), header, memoryview(raw)[HEADER_SIZE + size :]))


def unpack_adapter(file: Path, folder: Path) -> None:
    """Makes a folder of a packed adapter; the file becomes a part of it."""
    with _opened(file) as stored:
        config = (stored.metadata() or {}).get(PACKED_CONFIG)
    if config is None:
        raise AdapterError(f"{file}: not a packed adapter")
    with whole_folder(folder) as temporary:
        (temporary / CONFIG).write_text(config)
        file.rename(temporary / WEIGHTS)


@dataclass(frozen=True, slots=True)
class _PeftParts:
    config: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def _parts(
    adapter: Adapter,
    *,
    base_model: str,
    form: AdapterFormat = "tinker",
    is_tied: bool = False,
    trained_on: str = "",
) -> _PeftParts:
    matrices, layout = adapter_matrices(adapter), adapter.stack.layout
    rank, alpha = adapter.config.rank, _plain(adapter.config.alpha)
    has_experts = any(".experts." in name for name in matrices)
    if form == "peft":
        matrices = join_experts(join_rows(matrices, layout.mamba_tail), layout)
    if is_tied:
        matrices = {f"{TIED_HEAD}{k.removeprefix(HEAD)}" if k.startswith(HEAD) else k: t for k, t in matrices.items()}
    tensors = {f"{PREFIX}{name}": t.cpu().contiguous() for name, t in matrices.items()}
    leaves = {name.partition(".lora_")[0].rsplit(".", 1)[-1] for name in matrices} - {"experts", "base_layer"}
    parameters = []
    if form == "peft" and has_experts:  # PEFT would take a module named down_proj for the experts'
        up = GATE_UP if layout.are_experts_gated else UP
        parameters = [up, DOWN, *sorted(f"{leaf}.weight" for leaf in leaves & DENSE)]
        leaves -= DENSE
    modules = sorted(leaves)
    wholes = {name: n for name in (*modules, *parameters) if (n := _n_parts(name)) > 1}
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
    if parameters:
        config["target_parameters"] = parameters
    if wholes:
        patterns = _patterns(wholes, modules)
        config["rank_pattern"] = {name: n * rank for name, n in patterns.items()}
        config["alpha_pattern"] = {name: n * alpha for name, n in patterns.items()}
    metadata = {"format": "pt"} | ({TRAINED_ON: trained_on} if trained_on else {})
    if has_experts and not adapter.config.per_expert:
        metadata[SHARED_EXPERTS] = "true"
    return _PeftParts(json.dumps(config, indent=2) + "\n", tensors, metadata)


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
    metadata = (_opened(file).metadata() or {}) if file.is_file() else {}
    found = metadata.get(TRAINED_ON, weights)
    if found != weights:
        raise AdapterError(
            f"{folder}: this checkpoint was trained on {found} weights, and the model is served with {weights} ones; "
            f"serve it with {weights_setting(found)}, or set models.0.allow_weights_mismatch=true"
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
        train_attn=bool(modules & (ATTENTION | DELTA_NET | MAMBA)),
        train_mlp=bool(modules & (MLP - {"gate_proj"} if "x_proj" in modules else MLP)),
        train_unembed=HEAD in modules,
        per_expert=_is_per_expert(file.with_name(WEIGHTS)),
    )


def adapter_matrices(adapter: Adapter) -> dict[str, Tensor]:
    """Every A and B under its Hugging Face module name, as views of the float32 weights."""
    return adapter.stack.layout.matrices(adapter.row("weights"))


def new_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    if folder.exists():
        raise AdapterError(f"{folder} already exists; choose another name or remove it first")
    return folder


def _is_per_expert(file: Path) -> bool:
    """Whether a file has an A and a B for each expert, which need not be equal."""
    if not file.is_file():
        return False
    with _opened(file) as stored:
        if SHARED_EXPERTS in (stored.metadata() or {}):
            return False
        names = stored.keys()
        outer = [stored.get_slice(name).get_shape() for name in names if _is_outer(name)]
    return any(len(shape) != 3 or shape[0] > 1 for shape in outer)


def _is_outer(name: str) -> bool:
    """Matrices that Tinker's form has once for all experts, and those of PEFT's forms."""
    return ".experts." in name and not name.endswith(("w1.lora_B.weight", "w3.lora_B.weight", "w2.lora_A.weight"))


def _n_parts(name: str) -> int:
    """Returns how many of our projections a matrix of a checkpoint has."""
    return 2 if name == GATE_UP else len(WHOLES.get(name, (name,)))


def _patterns(wholes: dict[str, int], modules: list[str]) -> dict[str, int]:
    """PEFT takes the first pattern that matches. It warns of one for a parameter, which it uses, unless a module fits,
    too: so such a pattern names a module that has a pattern of its own before it."""
    plain = next((name for name in modules if name not in wholes), None)
    if plain is None or GATE_UP not in wholes:
        return wholes
    others = {name: n for name, n in wholes.items() if name != GATE_UP}
    return {plain: 1, f"{GATE_UP}|{plain}": wholes[GATE_UP], **others}


def _modules(raw: dict[str, Any], file: Path) -> set[str]:
    modules = raw["target_modules"] or []
    if parameters := raw.get("target_parameters"):
        known = (GATE_UP, UP, DOWN, *sorted(f"{leaf}.weight" for leaf in DENSE))
        odd = [name for name in parameters if not name.endswith(known)]
        if odd:
            raise AdapterError(f"{file}: target_parameters names {odd[0]}; supported: {', '.join(known)}")
        modules = [modules] if isinstance(modules, str) else [*modules, *EXPERTS]
    if isinstance(modules, str):
        modules = ATTENTION | MLP if modules == "all-linear" else {modules}
    known = ATTENTION | DELTA_NET | MAMBA | MLP | {HEAD}
    plain = {HEAD if leaf == _TIED_LEAF else leaf for leaf in (m.rsplit(".", 1)[-1] for m in modules)}
    if not plain or plain - known:
        odd = ", ".join(sorted(plain - known)) or "nothing"
        raise AdapterError(f"{file}: target_modules names {odd}; supported: {', '.join(sorted(known))}")
    return plain


def _refuse_patterns(raw: dict[str, Any], file: Path, rank: int, alpha: float) -> None:
    """Ranks of their own are understood for the matrices that we would write so."""
    ranks, alphas = (raw.get(field) or {} for field in ("rank_pattern", "alpha_pattern"))
    for name in ranks | alphas:
        own, n = (ranks.get(name, rank), alphas.get(name, alpha)), _n_parts(name.partition("|")[0])
        if own not in ((rank, alpha), (n * rank, n * alpha)):
            field = "rank_pattern" if name in ranks else "alpha_pattern"
            raise AdapterError(f"{file}: field {field!r} is {raw[field]!r}; supported: {{}}")


def _read_row(layout: Layout, folder: Path) -> Tensor:
    """The flat row; modules the file does not have stay zero, which means: no change, and none to be learned."""
    file, rank = folder / WEIGHTS, layout.rank
    stored = {module_name(key): tensor for key, tensor in _load(file).items()}
    try:
        sizes = {p.module: p.out_size for site in layout.sites.values() for p in site.parts}
        split_rows(stored, sizes, rank, layout.mamba_tail)
        split_experts(stored, layout)
    except AdapterError as e:
        raise AdapterError(f"{file}: {e}") from None
    row = torch.zeros(layout.size)
    for key, place in layout.matrices(row).items():
        module, _, kind = key.partition(".lora_")
        if kind[0] == "A" and sum(f"{module}.lora_{x}.weight" in stored for x in "AB") == 1:
            raise AdapterError(f"{file}: {module} has only one of lora_A and lora_B")
        tensor = stored.pop(key, None)
        if tensor is None:
            continue
        if tensor.shape != place.shape:
            raise AdapterError(f"{file}: {key} has shape {list(tensor.shape)}, this model needs {list(place.shape)}")
        place.copy_(tensor)
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
    with _opened(file) as stored:
        state = json.loads((stored.metadata() or {}).get("palestra", "{}"))
    if state.get("format") != FORMAT_VERSION or not isinstance(state.get("steps"), int):
        raise AdapterError(
            f"{file}: metadata names format {state.get('format')}; supported: {FORMAT_VERSION}, with steps"
        )
    return state["steps"], tensors


def _load(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise AdapterError(f"{file}: no such file")
    with _opened(file) as stored:
        names = stored.keys()
        return {name: stored.get_tensor(name) for name in names}


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as e:
        raise AdapterError(f"{file}: not a complete safetensors file ({e})") from None


def _shape(config: LoraConfig) -> str:
    flags = [n for n in ("train_attn", "train_mlp", "train_unembed", "per_expert") if getattr(config, n)]
    return f"rank {config.rank}, alpha {_plain(config.alpha)}, {' '.join(flags)}"


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value
