"""Collects the datasets that a gym's files name into one file for each split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

import orjson
from msgspec import Struct

from palestra.gym.collect.files import write_whole
from palestra.gym.collect.rows import PromptFile, Row, read_rows
from palestra.gym.errors import CollectError
from palestra.gym.metrics.aggregate import deviation
from palestra.gym.records import GymConfig, ServerKind
from palestra.types.gym import AGENT_REF, PARAMS
from palestra.util.json_types import JsonMapping, JsonObject

_TOLD = 10


class DatasetSplit(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    EXAMPLE = "example"
    BENCHMARK = "benchmark"


class Dataset(Struct, frozen=True, kw_only=True):
    """One entry of an agent's `datasets`."""

    agent: str
    name: str
    split: DatasetSplit
    path: Path
    repeats: int = 1
    prompt: Path | None = None


class Collated(Struct, frozen=True):
    split: DatasetSplit
    path: Path
    rows: int
    statistics: JsonObject


def datasets_of(config: GymConfig, splits: Iterable[DatasetSplit], find: Callable[[str], Path]) -> list[Dataset]:
    """Returns the datasets of all agents. `find` converts a path of the files to one that exists. Raises
    CollectError."""
    wanted_splits = set(splits)
    found = []
    for server in config.of_kind(ServerKind.AGENT):
        for entry in server.settings.get("datasets") or ():
            dataset = _dataset(server.name, entry, find)
            if dataset.split in wanted_splits:
                found.append(dataset)
    if not found:
        raise CollectError(f"no agent lists a dataset of type {', '.join(sorted(wanted_splits))}")
    missing = [one for one in found if not one.path.exists()]
    if missing:
        listed = "; ".join(f"{one.path} ({one.agent}, {one.name})" for one in missing)
        raise CollectError(f"these datasets do not exist: {listed}. Download them to these paths first")
    return found


def collate(datasets: Iterable[Dataset], folder: Path, *, overwrite_statistics: bool = False) -> list[Collated]:
    """Writes `folder/train.jsonl` and so on: every row with its agent, repeated. Raises CollectError with all invalid
    rows; statistics that differ from those saved beside a dataset are an error, too."""
    by_split: dict[DatasetSplit, list[Row]] = {}
    for dataset in datasets:
        rows = checked_rows(dataset)
        _keep_statistics(dataset, statistics(rows), overwrite_statistics)
        labelled = [{**row, AGENT_REF: {"type": ServerKind.AGENT, "name": dataset.agent}} for row in rows]
        by_split.setdefault(dataset.split, []).extend(row for row in labelled for _ in range(dataset.repeats))
    made = []
    for split, rows in by_split.items():
        path = folder / f"{split}.jsonl"
        write_whole(path, b"".join(orjson.dumps(row) + b"\n" for row in rows))
        made.append(Collated(split, path, len(rows), statistics(rows)))
    return made


def checked_rows(dataset: Dataset) -> list[Row]:
    """Raises CollectError that names the rows which cannot be played."""
    prompt = PromptFile.read(dataset.prompt) if dataset.prompt else None
    rows, bad = [], []
    for number, (_, row) in enumerate(read_rows(dataset.path), 1):
        row = prompt.applied(row) if prompt else row
        reason = _fault(row)
        if reason:
            bad.append(f"row {number}: {reason}")
        rows.append(row)
    if bad:
        more = f"; and {len(bad) - _TOLD} more" if len(bad) > _TOLD else ""
        raise CollectError(f"{dataset.path}: {'; '.join(bad[:_TOLD])}{more}")
    return rows


def statistics(rows: Iterable[Row]) -> JsonObject:
    """Returns counts and distributions, under the names of NeMo Gym's `_metrics.json`."""
    numbers: dict[str, list[float]] = {name: [] for name in (_TOOLS, _WORDS, _TURNS, _TEMPERATURE)}
    texts: dict[str, Counter[str]] = {}
    count = 0
    for row in rows:
        count += 1
        _observe_params(row[PARAMS], numbers)
        for name, value in row.items():
            if name not in (PARAMS, "response", AGENT_REF):
                _observe(name, value, numbers, texts)
    figures: JsonObject = {"Number of examples": count}
    figures |= {name: _spread(values) for name, values in numbers.items()}
    figures |= {name: {"unique_count": len(seen), "total_count": seen.total()} for name, seen in texts.items()}
    return figures


_TOOLS = "Number of tools"
_WORDS = "Json-dumped number of words (proxy for token count)"
_TURNS = "Number of turns"
_TEMPERATURE = "Temperature"


def _dataset(agent: str, entry: JsonMapping, find: Callable[[str], Path]) -> Dataset:
    try:
        split = DatasetSplit(entry["type"])
        path, name = entry["jsonl_fpath"], entry["name"]
    except (KeyError, ValueError) as error:
        raise CollectError(f"a dataset of {agent} is wrong: {error}; it needs name, type and jsonl_fpath") from error
    prompt = entry.get("prompt_config")
    repeats = entry.get("num_repeats") or 1
    return Dataset(
        agent=agent, name=name, split=split, path=find(path), repeats=repeats, prompt=find(prompt) if prompt else None
    )


def _fault(row: Row) -> str | None:
    params = row.get(PARAMS)
    if not isinstance(params, dict):
        return f"no {PARAMS}"
    messages, tools, temperature = (params.get(name) for name in ("input", "tools", "temperature"))
    if not isinstance(messages, str | list):
        return f"no {PARAMS}.input"
    if isinstance(messages, list) and not all(isinstance(one, dict) for one in messages):
        return f"an item of {PARAMS}.input is not an object"
    if not isinstance(temperature, int | float | None):
        return f"{PARAMS}.temperature is not a number"
    return None if tools is None or isinstance(tools, list) else f"{PARAMS}.tools is not a list"


def _observe_params(params: JsonMapping, numbers: dict[str, list[float]]) -> None:
    if params.get("tools") is not None:
        numbers[_TOOLS].append(len(params["tools"]))
    messages = params["input"]
    turns = 1 if isinstance(messages, str) else sum(one.get("role") == "user" for one in messages)
    if turns:
        numbers[_TURNS].append(turns)
    if params.get("temperature") is not None:
        numbers[_TEMPERATURE].append(params["temperature"])
    numbers[_WORDS].append(len(orjson.dumps(params).decode().replace(":", ": ").replace(",", ", ").split()))


def _observe(name: str, value: object, numbers: dict[str, list[float]], texts: dict[str, Counter[str]]) -> None:
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, int | float):
            numbers.setdefault(name, []).append(float(one))
        elif isinstance(one, str):
            texts.setdefault(name, Counter())[one] += 1


def _spread(values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values) if values else 0.0
    return {
        "Total # non-null values": len(values),
        "Average": _rounded(mean),
        "Min": _rounded(min(values, default=0.0)),
        "Max": _rounded(max(values, default=0.0)),
        "Standard deviation": _rounded(deviation(values)),
    }


def _rounded(value: float) -> float:
    return round(value, 2) if abs(value) >= 1 else round(value, 3)


def _saved(path: Path) -> JsonObject:
    try:
        found = orjson.loads(path.read_bytes())
    except ValueError as error:
        raise CollectError(f"{path} is damaged: {error}; remove it, or give --overwrite-statistics") from error
    return found if isinstance(found, dict) else {}


def _keep_statistics(dataset: Dataset, found: JsonObject, overwrite: bool) -> None:
    """Saves statistics beside the dataset, so that a change of the file is noticed."""
    path = dataset.path.with_name(f"{dataset.path.stem}_metrics.json")
    if path.exists() and not overwrite:
        saved = _saved(path)
        changed = sorted(name for name in found if name in saved and saved[name] != found[name])
        if changed:
            raise CollectError(
                f"{dataset.path} does not match {path.name}: {', '.join(changed)} differ. If the change is "
                "intended, give --overwrite-statistics"
            )
        return
    write_whole(path, orjson.dumps(found, option=orjson.OPT_INDENT_2))
