"""Checkpoints for other tools: adapters that PEFT and vLLM load, and whole models with the adapter folded in, as
folders of Hugging Face or as GGUF files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from palestra.checkpoints import CheckpointError, SavedCheckpoint
from palestra.checkpoints.export_size import model_bytes
from palestra.checkpoints.gguf import require_gguf
from palestra.checkpoints.sources import saved_files
from palestra.config.bundled import bundled_model
from palestra.model.errors import ModelError
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import DTYPES
from palestra.model.lora.adapter_files import CONFIG, WEIGHTS, load_adapter, save_adapter
from palestra.model.lora.adapters import Adapter, AdapterPool
from palestra.model.lora.merged_export import export_merged
from palestra.runs.export_form import ExportDtype, ExportForm, GgufSettings
from palestra.util.atomic_files import remove_unfinished
from palestra.util.figures import size_text
from palestra.util.file_errors import file_error_text
from palestra.util.hugging_face import find_in_cache, is_hub_id

AS_STORED = GgufSettings()
CACHED = "models--"
ROOM = 1.1  # what is needed on the disk, as a multiple of what is written


def base_of(adapter: Path, given: str | None = None) -> Path:
    """The folder of the model that an adapter was trained on: `given` as a folder, Hugging Face id or bundled name, or
    what the adapter says."""
    try:
        name = given or json.loads((adapter / CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, KeyError, ValueError):
        raise CheckpointError(f"{adapter} is not an adapter: it has no readable {CONFIG}") from None
    if (bundled := bundled_model(name)) is not None:
        return bundled
    if Path(name).is_dir():
        return Path(name)
    if is_hub_id(name):
        try:
            return find_in_cache(name)
        except ValueError as error:
            raise CheckpointError(f"the base model of {adapter}: {error}, or give another with --base") from None
    raise CheckpointError(
        f"{adapter} was trained on {name or 'an unknown model'}, which is not here; give it with --base"
    )


def portable_name(base: Path) -> str:
    """Returns the base's name on another machine: its Hugging Face id, or else the name of its folder."""
    cached = next((part for part in base.parts if part.startswith(CACHED)), None)
    return cached.removeprefix(CACHED).replace("--", "/", 1) if cached else base.name


def export_saved(
    saved: SavedCheckpoint,
    out: Path,
    form: ExportForm,
    *,
    base: str | None = None,
    base_name: str | None = None,
    dtype: ExportDtype | None = None,
    gguf: GgufSettings = AS_STORED,
    check: bool = False,
    server: str | None = None,
    key: str | None = None,
) -> None:
    """Exports a checkpoint of a run, wherever its files are. Raises CheckpointError, also if the check fails."""
    with saved_files(saved, server=server, key=key) as adapter:
        folder = base_of(adapter, base)
        export_checkpoint(adapter, out, form, base=folder, base_name=base_name, dtype=dtype, gguf=gguf)
        if check:
            from palestra.checkpoints.export_check import check_export

            if not check_export(out, form, adapter, folder).is_good:
                raise CheckpointError(f"{out} does not say in transformers what {saved.name} says here")


def export_checkpoint(
    adapter: Path,
    out: Path,
    form: ExportForm,
    *,
    base: Path,
    base_name: str | None = None,
    dtype: ExportDtype | None = None,
    gguf: GgufSettings = AS_STORED,
) -> None:
    """Writes a folder that appears whole or not at all; a whole model in `dtype`, or as its base is stored. Raises
    CheckpointError."""
    _refuse_settings(form, dtype, gguf)
    if out.exists():
        raise CheckpointError(f"{out} already exists; choose another folder, or remove it first")
    try:
        spec = ModelSpec.from_folder(base)
        loaded = load_adapter(AdapterPool(spec), adapter)
        _require_numbers(loaded, adapter)
        needed = (adapter / WEIGHTS).stat().st_size
        if form in ("merged", "gguf", "ollama") and gguf.ollama_base is None:
            is_untied = spec.tie_embeddings and loaded.config.train_unembed
            needed += model_bytes(base, dtype, gguf.quant, is_untied=is_untied)
        remove_unfinished(out)
        require_room(out, int(needed * ROOM))
        _write(loaded, out, form, base, base_name or portable_name(base), dtype, gguf)
    except (ModelError, OSError) as error:
        raise CheckpointError(file_error_text(error) or f"{adapter} on {base}: {error}") from None


def _require_numbers(adapter: Adapter, folder: Path) -> None:
    if not adapter.row("weights").isfinite().all():
        raise CheckpointError(
            f"{folder} has weights that are not finite: training had diverged; export an earlier checkpoint"
        )


def _refuse_settings(form: ExportForm, dtype: ExportDtype | None, gguf: GgufSettings) -> None:
    """Settings that this form would ignore, and a form whose library is missing."""
    if form in ("peft", "merged"):
        if gguf != AS_STORED:
            raise CheckpointError("--quant, --pre-tokenizer and --ollama-base are for --as gguf and --as ollama")
    else:
        require_gguf()
        _refuse_gguf_settings(form, dtype, gguf)
    if form == "peft" and dtype is not None:
        raise CheckpointError("an adapter is written in float32: choose a dtype only for a whole model (merged)")


def _refuse_gguf_settings(form: ExportForm, dtype: ExportDtype | None, gguf: GgufSettings) -> None:
    if gguf.ollama_base is not None and form != "ollama":
        raise CheckpointError("--ollama-base is for --as ollama")
    if form == "gguf-adapter" or gguf.ollama_base is not None:
        if dtype is not None or gguf.quant is not None or gguf.pre_tokenizer is not None:
            raise CheckpointError(
                "an adapter is written in float32, without a tokenizer: leave --dtype and --quant away"
            )
    elif dtype is not None:
        raise CheckpointError("a dtype is for --as merged; for a GGUF file choose --quant")


def _write(
    adapter: Adapter,
    out: Path,
    form: ExportForm,
    base: Path,
    base_name: str,
    dtype: ExportDtype | None,
    gguf: GgufSettings,
) -> None:
    match form:
        case "peft":
            save_adapter(adapter, out, base_model=base_name, form="peft")
        case "merged":
            packing = dtype if dtype in ("fp8", "nf4") else None
            export_merged(adapter, base, out, dtype=DTYPES.get(dtype or ""), packing=packing)
        case _:
            from palestra.checkpoints.gguf.export import export_gguf

            export_gguf(adapter, base, out, form, name=base_name, settings=gguf)


def require_room(out: Path, needed: int) -> None:
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    if not os.access(there, os.W_OK):
        raise CheckpointError(f"{out} cannot be written: {there} is read-only; choose another folder")
    disk = shutil.disk_usage(there)
    if disk.free < needed:
        raise CheckpointError(
            f"{out} needs {size_text(needed)}, and {size_text(disk.free)} are free on that disk; free some space, or "
            "choose another folder"
        )
