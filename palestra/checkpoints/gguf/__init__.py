"""GGUF files, as llama.cpp and Ollama load them. Begin at `export`."""

from __future__ import annotations

from palestra.checkpoints import CheckpointError

MODEL_FILE, ADAPTER_FILE = "model.gguf", "adapter.gguf"


def require_gguf() -> None:
    """Raises CheckpointError where the package that writes the format is missing."""
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        raise CheckpointError(
            "GGUF files are written by the package gguf, which is missing; to install it: pip install 'palestra[gguf]'"
        ) from None
