"""Finds datasets: files, folders of files, and datasets of the Hugging Face hub in the caches of this machine.

`ORG/NAME` is a dataset of the hub, `ORG/NAME:SPLIT` one split of it: as `huggingface_hub` has downloaded it, or as
`datasets` has prepared it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from palestra.data.errors import DatasetNotFound
from palestra.util.hugging_face import DATASET_ID, hub_cache, is_hub_dataset, snapshots_of
from palestra.util.suggest import did_you_mean

TABLES = (".parquet", ".arrow")
SUFFIXES = (".jsonl", ".ndjson", *TABLES)
SPLIT = re.compile(r"(?:.*[/_-])?(train|test|validation|valid|val|dev|eval)(?:[_.-].*|/.*)?\.\w+")
"""A file's name that says which split it belongs to, as the hub's datasets have it."""


def files_of(source: str | Path) -> list[Path]:
    """The files of a dataset, in order. Raises DatasetError."""
    path = Path(source).expanduser()
    if is_hub_dataset(source):
        return _cached(str(source))
    if not path.is_dir():
        return [path]
    return _data_files(path) or _none(f"{path} is a directory without {', '.join(SUFFIXES)} files")


def _cached(hub_id: str) -> list[Path]:
    found = DATASET_ID.fullmatch(hub_id)
    assert found is not None
    for folder in (*snapshots_of("datasets", found["id"]), *_prepared(found["id"])):
        if files := _data_files(folder):
            return _of_split(files, folder, found["id"], found["split"])
    where = f"there is no file {hub_id}, and no such dataset in the cache {hub_cache()}"
    return _none(f"{where}; to download it: hf download --repo-type dataset {found['id']}")


def _prepared(hub_id: str) -> list[Path]:
    """Arrow files of `datasets`: config, version and fingerprint are folders; the newest is taken."""
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or hub_cache().parent / "datasets").expanduser()
    folders = {file.parent for file in (cache / hub_id.replace("/", "___")).rglob("*.arrow")}
    return sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)


def _data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())


def _of_split(files: Sequence[Path], folder: Path, hub_id: str, split: str | None) -> list[Path]:
    by_split: dict[str, list[Path]] = {}
    for file in files:
        named = SPLIT.fullmatch(file.relative_to(folder).as_posix())
        by_split.setdefault(named[1] if named else "train", []).append(file)
    if split is None and len(by_split) == 1:
        return list(files)
    if split is None:
        return _none(f"{hub_id} has several splits; name one: {', '.join(f'{hub_id}:{one}' for one in by_split)}")
    if split not in by_split:
        hint = did_you_mean(split, list(by_split))
        return _none(f"{hub_id} has no split {split!r}; {hint}")
    return by_split[split]


def _none(problem: str) -> list[Path]:
    raise DatasetNotFound(problem)
