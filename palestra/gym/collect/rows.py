"""Expands the rows of a data file to what is played: an agent, indices, repeats. The same input gives the same rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import yaml
from msgspec import Struct, field

from palestra.gym.errors import CollectError
from palestra.gym.records import ROLLOUT_NAME
from palestra.types.gym import AGENT_REF, PARAMS, ROLLOUT_ID, ROLLOUT_INDEX, TASK_INDEX, overruled
from palestra.util.json_types import JsonMapping, JsonObject


class PromptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A template: `{field}` is a top-level field of a row; double a brace to write one."""

    user: str
    system: str | None = None

    @classmethod
    def read(cls, path: Path) -> PromptFile:
        try:
            return msgspec.convert(yaml.safe_load(path.read_text()), cls)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
            raise CollectError(f"prompt file {path}: {error}; it needs `user`, and may have `system`") from error

    def applied(self, row: JsonMapping) -> JsonObject:
        """Returns a new row whose `responses_create_params.input` is the prompt. Raises CollectError."""
        params = row.get(PARAMS) or {}
        if not isinstance(params, dict):
            raise CollectError(f"a row's {PARAMS} must be an object, found {type(params).__name__}")
        if params.get("input"):
            raise CollectError(f"a row has {PARAMS}.input, but there is also a prompt file; use one of them")
        messages = [
            {"role": role, "content": self._filled(template, row)}
            for role, template in (("system", self.system), ("user", self.user))
            if template is not None
        ]
        return {**row, PARAMS: {**params, "input": messages}}

    def _filled(self, template: str, row: JsonMapping) -> str:
        try:
            return template.format_map(row)
        except (KeyError, IndexError) as error:
            raise CollectError(f"the prompt's {error} is not among the row's fields {sorted(row)}") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise CollectError(f"the prompt cannot be filled in: {error}; write a literal brace twice") from error


log = logging.getLogger(__name__)

Row = JsonObject
Key = tuple[int, int]

DEFAULT = "_default"
MAX_ROLLOUT_ID = 200  # a file is named after it and its attempt
_TOLD = 10  # rows named in one error


class Expansion(Struct, frozen=True, kw_only=True):
    """How rows become rollouts."""

    agent: str | None = None
    """Agent of rows that name none."""
    limit: int | None = None
    repeats: int | dict[str, int] = 1
    """Number of repeats: by agent, with `_default` for the others, or one number for all."""
    seeds: bool = False
    """Use each repeat's index as the sampling seed, in `metadata.extra_body`."""
    prompt: PromptFile | None = None
    overrides: JsonObject = field(default_factory=dict)
    """Replaces fields of every row's `responses_create_params`, only at the top level."""
    shard: int = 0
    shards: int = 1
    """Number of shards. Tasks are assigned by index, so that shards never share one."""


def key_of(row: JsonMapping) -> Key:
    return row[TASK_INDEX], row[ROLLOUT_INDEX]


def read_rows(path: Path) -> Iterator[tuple[bytes, Row]]:
    """Yields the text of each line and its row. Raises CollectError with the line number."""
    try:
        lines = path.open("rb")
    except OSError as error:
        raise CollectError(f"cannot read {path}: {error.strerror}") from error
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except ValueError as error:
                raise CollectError(f"{path}, line {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise CollectError(
                    f"{path}, line {number}: a row must be an object, but this is a {type(row).__name__}"
                )
            yield line.strip(), row


def expanded(rows: Iterable[tuple[bytes, Row]], how: Expansion) -> list[Row]:
    """Returns what is to be played: task by task, repeat after repeat. Raises CollectError with all rows concerned."""
    made: list[Row] = []
    indices: dict[bytes, int] = {}
    repeats: Counter[int] = Counter()
    nameless: list[int] = []
    numbered = 0
    for number, (text, row) in enumerate(rows):
        if how.limit is not None and number >= how.limit:
            break
        row = _prepared(row, how, number)
        agent = agent_of(row)
        if agent is None:
            nameless.append(number + 1)
            continue
        numbered += TASK_INDEX in row
        index = row[TASK_INDEX] if TASK_INDEX in row else indices.setdefault(text, len(indices))
        row[TASK_INDEX] = index
        for _ in range(_repeats(how, agent)):
            made.append(_repeat(row, repeats[index], how.seeds))
            repeats[index] += 1
    if nameless:
        listed = ", ".join(map(str, nameless[:_TOLD])) + (", …" if len(nameless) > _TOLD else "")
        raise CollectError(
            f"{len(nameless)} rows name no agent (rows {listed}); give --agent, or add agent_ref to them"
        )
    if numbered and indices:
        raise CollectError(f"{numbered} rows have a {TASK_INDEX} and others have none; give it to all rows, or to none")
    note = overruled(how.agent, [agent_of(row) or "" for row in made])
    if note is not None:
        log.warning("%s; to let it play all rows, remove %s from them", note, AGENT_REF)
    made = [row for row in made if row[TASK_INDEX] % how.shards == how.shard]
    made.sort(key=key_of)
    return made


def agent_of(row: JsonMapping) -> str | None:
    reference = row.get(AGENT_REF)
    name = reference.get("name") if isinstance(reference, dict) else None
    return name if isinstance(name, str) else None


def _prepared(row: Row, how: Expansion, number: int) -> Row:
    row = how.prompt.applied(row) if how.prompt else dict(row)
    params = row.get(PARAMS)
    if not isinstance(params, dict) or "input" not in params:
        raise CollectError(f"row {number + 1} has no {PARAMS}.input; add it, or give a --prompt-config")
    row[PARAMS] = {**params, **how.overrides}
    if how.agent is not None and agent_of(row) is None:
        row[AGENT_REF] = {"name": how.agent}
    given = row.get(ROLLOUT_ID)
    if given is not None and not _is_rollout_id(given):
        raise CollectError(
            f"row {number + 1}: {ROLLOUT_ID} {given!r} may have letters, digits, '.', '_' and '-' only, begins with "
            f"one of the first two, and has at most {MAX_ROLLOUT_ID} of them"
        )
    if not isinstance(row.get(TASK_INDEX, 0), int):
        raise CollectError(f"row {number + 1}: {TASK_INDEX} must be a whole number, found {row[TASK_INDEX]!r}")
    return row


def _is_rollout_id(given: object) -> bool:
    return isinstance(given, str) and len(given) <= MAX_ROLLOUT_ID and ROLLOUT_NAME.fullmatch(given) is not None


def _repeats(how: Expansion, agent: str) -> int:
    if isinstance(how.repeats, int):
        return how.repeats
    found = how.repeats.get(agent, how.repeats.get(DEFAULT))
    if found is None:
        raise CollectError(
            f"repeats has no number for agent {agent}; add it, or {DEFAULT}; there are {sorted(how.repeats)}"
        )
    return found


def _repeat(row: Row, index: int, seeds: bool) -> Row:
    made = {**row, ROLLOUT_INDEX: index}
    if seeds:
        params = row[PARAMS]
        metadata = params.get("metadata") or {}
        extra = {**_extra_body(row, metadata), "seed": index}
        made[PARAMS] = {**params, "metadata": {**metadata, "extra_body": orjson.dumps(extra).decode()}}
    return made


def _extra_body(row: Row, metadata: Any) -> JsonObject:
    try:
        found = orjson.loads(metadata.get("extra_body") or "{}")
    except (ValueError, AttributeError):
        found = None
    if not isinstance(found, dict):
        where = f"task {row[TASK_INDEX]}: {PARAMS}.metadata.extra_body"
        raise CollectError(f"{where} must be the text of a JSON object, because a seed is added to it")
    return found
