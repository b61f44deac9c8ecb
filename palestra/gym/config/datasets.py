"""The `datasets` of a server: what an entry must have.

Owns: checking the entries. Never touches: the files they name.
"""

from __future__ import annotations

from palestra.gym.roots import did_you_mean
from palestra.util.json_types import JsonObject

TYPES = ("train", "validation", "example", "benchmark")
LICENSES = (
    "Apache 2.0",
    "MIT",
    "Creative Commons Attribution 4.0 International",
    "Creative Commons Attribution-ShareAlike 4.0 International",
    "CC BY-SA 4.0",
    "CC BY-NC 3.0",
    "NVIDIA Internal Use Only, Do Not Distribute",
    "NVIDIA Evaluation Dataset License Agreement",
    "TBD",
    "GNU General Public License v3.0",
)
SOURCES = {"gitlab": ("dataset_name", "version", "artifact_fpath"), "huggingface": ("repo_id",)}
LEGACY = ("gitlab_identifier", "huggingface_identifier")


def dataset_problems(entries: object) -> list[str]:
    """One line for each mistake, starting with the key below the server."""
    if entries is None:
        return []
    if not isinstance(entries, list):
        return [f"datasets: should be a list, is a {type(entries).__name__}"]
    return [f"datasets[{index}]{problem}" for index, entry in enumerate(entries) for problem in _of_one(entry)]


def _of_one(entry: object) -> list[str]:
    if not isinstance(entry, dict):
        return [f": should be a mapping, is {entry!r}"]
    kind = entry.get("type")
    if kind not in TYPES:
        return [f".type: {kind!r} is none of {', '.join(TYPES)}{did_you_mean(str(kind), TYPES)}"]
    needed = ["name", "jsonl_fpath", *(["prepare_script"] if kind == "benchmark" else [])]
    problems = [f".{key}: is needed" for key in needed if not isinstance(entry.get(key), str)]
    repeats = entry.get("num_repeats", 1)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        problems.append(f".num_repeats: should be a whole number from 1, is {repeats!r}")
    return problems if kind == "benchmark" else problems + _license(entry, kind) + _source(entry)


def _license(entry: JsonObject, kind: str) -> list[str]:
    given = entry.get("license")
    if given is None:
        return [".license: is needed for train and validation data"] if kind in ("train", "validation") else []
    if given in LICENSES:
        return []
    return [f".license: {given!r} is none of: {'; '.join(LICENSES)}{did_you_mean(str(given), LICENSES)}"]


def _source(entry: JsonObject) -> list[str]:
    source = entry.get("source")
    if source is None:
        return []
    if legacy := [key for key in LEGACY if entry.get(key) is not None]:
        return [f".source: together with {legacy[0]}; keep only source"]
    kind = source.get("type") if isinstance(source, dict) else None
    if kind not in SOURCES:
        return [f".source.type: {kind!r} is none of {', '.join(SOURCES)}"]
    return [f".source.{key}: is needed" for key in SOURCES[kind] if not isinstance(source.get(key), str)]
