"""Models and datasets by their Hugging Face id, from the cache on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")

DATASET_ID = re.compile(rf"(?P<id>{_HUB_ID.pattern})(?::(?P<split>[\w.-]+))?")
DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")


def is_hub_id(text: str) -> bool:
    """Whether the text is `org/name` and no such folder exists here."""
    return _HUB_ID.fullmatch(text) is not None and not Path(text).is_dir()


def find_in_cache(hub_id: str, config: str = "config.json") -> Path:
    """The folder of the revision that `main` points at, or else of the newest one, with weights and the file `config`,
    which is another for an adapter than for a model. Raises ValueError."""
    cache, snapshots = hub_cache(), snapshots_of("models", hub_id)
    for folder in snapshots:
        if (folder / config).is_file() and any(file.is_file() for file in folder.glob("*.safetensors")):
            return folder
    found = "incomplete" if snapshots else "not"
    raise ValueError(
        f"there is no folder {hub_id}, and {found} in the cache {cache}; to download it: palestra model pull {hub_id}"
    )


def hub_id_of(folder: Path) -> str | None:
    """The id of a model whose folder is in the cache; None for any other folder."""
    kind, *names = folder.parent.parent.name.split("--")
    return "/".join(names) if kind == "models" and folder.parent.name == "snapshots" else None


def snapshots_of(kind: str, hub_id: str) -> list[Path]:
    """Folders of the downloaded revisions: the one that `main` points at first, then the newest. `kind` is `models` or
    `datasets`."""
    repo = hub_cache() / f"{kind}--{hub_id.replace('/', '--')}"
    main = repo / "refs" / "main"
    snapshots = sorted(repo.glob("snapshots/*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    if main.is_file():
        snapshots.insert(0, repo / "snapshots" / main.read_text().strip())
    return snapshots


def is_hub_dataset(source: str | Path) -> bool:
    """Whether this is `org/name` or `org/name:split`, and no file or folder of this name exists here."""
    text = str(source)
    return DATASET_ID.fullmatch(text) is not None and not text.endswith(DATA_FILES) and not Path(text).exists()


def hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"
