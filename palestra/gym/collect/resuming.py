"""Finds out what an earlier start of a collection has finished, and whether it was the same collection."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

import orjson
from msgspec import Struct

from palestra.gym.collect.files import OutputFiles, read_lines, write_whole
from palestra.gym.collect.rows import Key, Row, key_of
from palestra.gym.errors import CollectError
from palestra.gym.records import ServerKind
from palestra.types.gym import FAILURE_TERMINAL, ROLLOUT_INDEX, TASK_INDEX
from palestra.types.gym_failures import FailureClass, class_in
from palestra.util.json_types import JsonMapping, JsonObject

_KINDS = frozenset(ServerKind)


class CollectionProgress(Struct):
    """Progress of the rows of a collection."""

    done: set[Key]
    failed: Counter[Key]
    """Number of failed attempts that count."""
    terminal: set[Key]
    reward_sum: float = 0.0

    def is_open(self, row: Row, attempts: int) -> bool:
        key = key_of(row)
        return key not in self.done and key not in self.terminal and self.failed[key] < attempts


def progress_of(files: OutputFiles) -> CollectionProgress:
    """Reads the progress. Raises CollectError if a file is damaged, or has a row twice."""
    found = CollectionProgress(set(), Counter(), set())
    for result in read_lines(files.results):
        key = _key(result)
        if key is None:
            raise CollectError(
                f"{files.results} has a row without {TASK_INDEX}, so it is not the output of a collection"
            )
        if key in found.done:
            raise CollectError(f"{files.results} has task {key[0]}, rollout {key[1]} twice; remove one of the lines")
        found.done.add(key)
        reward = result.get("reward")
        found.reward_sum += reward if isinstance(reward, int | float) else 0.0
    for failure in read_lines(files.failures):
        key = _key(failure)
        if key is None:
            continue
        if class_in(failure) != FailureClass.SERVER_DIED:
            found.failed[key] += 1
        if failure.get(FAILURE_TERMINAL):
            found.terminal.add(key)
    return found


def facts_of(rows: Iterable[Row], gym: JsonMapping | None) -> JsonObject:
    """Returns a fingerprint of what is played and by which servers, in separate parts so that a difference can be
    named."""
    digest = hashlib.sha256()
    count = 0
    for row in rows:
        try:
            digest.update(orjson.dumps(row, option=orjson.OPT_SORT_KEYS))
        except TypeError as error:
            raise CollectError(f"task {row[TASK_INDEX]} cannot be sent: {error}") from error
        count += 1
    return {"rows": count, "data": digest.hexdigest(), "servers": _of_servers(gym or {})}


def check_same(files: OutputFiles, facts: JsonMapping) -> None:
    """Raises CollectError that says what changed since the collection began."""
    try:
        saved = orjson.loads(files.facts.read_bytes())
    except FileNotFoundError:
        return  # collected elsewhere: there is nothing to compare with
    except ValueError as error:
        raise CollectError(f"{files.facts} is damaged: {error}; remove it to resume without the check") from error
    changed = []
    if saved.get("data") != facts["data"]:
        changed.append(f"the rows (then {saved.get('rows')}, now {facts['rows']})")
    then, now = saved.get("servers", {}), facts["servers"]
    changed += [f"server {name}" for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    if changed:
        raise CollectError(
            f"cannot resume {files.results}: it was started with other settings: {', '.join(changed)}. Undo "
            "the change, choose another --output, or mix them with --resume-changed"
        )


def save_facts(files: OutputFiles, facts: JsonMapping) -> None:
    write_whole(files.facts, orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))


def _of_servers(gym: JsonMapping) -> dict[str, str]:
    """Returns a hash for each server; its address and its keys may change."""
    servers = {name: block for name, block in gym.items() if isinstance(block, Mapping) and _KINDS & block.keys()}
    return {name: _digest(_lasting(block)) for name, block in servers.items()}


def _digest(value: object) -> str:
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.sha256(text).hexdigest()[:16]


def _lasting(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _lasting(each) for key, each in value.items() if not _is_passing(str(key))}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def _is_passing(key: str) -> bool:
    return key in ("host", "port", "base_url", "datasets", "num_workers") or key.endswith(("_base_url", "api_key"))


def _key(line: JsonMapping) -> Key | None:
    if TASK_INDEX not in line or ROLLOUT_INDEX not in line:
        return None
    return key_of(line)
