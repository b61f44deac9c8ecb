"""Folders with a GGUF file, and for Ollama a Modelfile beside it."""

from __future__ import annotations

from pathlib import Path

from palestra.checkpoints.gguf import ADAPTER_FILE, MODEL_FILE
from palestra.checkpoints.gguf.adapter_file import write_adapter_file
from palestra.checkpoints.gguf.model_file import write_model_file
from palestra.checkpoints.gguf.ollama_model import MODELFILE, modelfile
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.adapter_files import new_folder
from palestra.model.lora.adapters import Adapter
from palestra.runs.export_form import ExportForm, GgufSettings
from palestra.util.atomic_files import whole_folder


def export_gguf(
    adapter: Adapter, base: Path, folder: Path, form: ExportForm, *, name: str, settings: GgufSettings
) -> None:
    """Writes a whole model or an adapter. Raises CheckpointError where the format has no such model."""
    is_adapter = form == "gguf-adapter" or settings.ollama_base is not None
    with whole_folder(new_folder(folder)) as temporary:
        if is_adapter:
            write_adapter_file(adapter, ModelSpec.from_folder(base), temporary / ADAPTER_FILE, name)
        else:
            write_model_file(adapter, base, temporary / MODEL_FILE, name, settings)
        if form == "ollama":
            source = settings.ollama_base or f"./{MODEL_FILE}"
            text = modelfile(base, source=source, name=name, adapter=ADAPTER_FILE if is_adapter else None)
            (temporary / MODELFILE).write_text(text, encoding="utf-8")
