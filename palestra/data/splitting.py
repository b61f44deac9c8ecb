"""Splits a dataset at random: exact sizes, the same for the same seed, and no group in two parts.

The dataset is read twice; what is kept of a row is a number and its group.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from palestra.data.errors import DatasetError
from palestra.data.pictures import with_moved_paths
from palestra.data.rows import RawRow, read_rows
from palestra.util.atomic_files import replacing
from palestra.util.json_types import JsonMapping

REST = "train"
"""The part that gets all rows that no other part does."""
GROUP_BYTES = 8

GroupKey = Callable[[JsonMapping], object]
"""Gives the group of a row; rows of one group stay together. Raises DatasetError, without a place."""


def by_prompt(row: JsonMapping) -> object:
    """Returns what comes before the first answer, the key of a group: copies of a question, with whatever answers, are
    one group."""
    if isinstance(prompt := row.get("prompt"), str):
        return [{"role": "user", "content": prompt}]
    messages = prompt or row.get("messages") or row.get("conversations") or row.get("chosen")
    if not isinstance(messages, list):
        return {key: value for key, value in row.items() if key != "id"}
    asked = []
    for message in messages:
        if isinstance(message, Mapping) and (message.get("role") or message.get("from")) in ("assistant", "gpt"):
            break
        asked.append(message)
    return asked


def by_field(path: str) -> GroupKey:
    """A field, or one within others: `user`, `metadata.source`."""

    def key(row: JsonMapping) -> object:
        found: object = row
        for name in path.split("."):
            if not isinstance(found, Mapping) or name not in found:
                raise DatasetError(f"no field {path!r} to group by (it has {', '.join(map(repr, row))})")
            found = found[name]
        return found

    return key


def split_dataset(
    source: str | Path, sizes: Mapping[str, int | float], out: Path, *, group: GroupKey | None, seed: int
) -> dict[str, int]:
    """Writes each part to `out`/PART.jsonl, its rows in their order, and returns how many it has. A size is a number of
    rows, or a share of all as a float. Raises DatasetError."""
    groups = _groups(source, group)
    counts = {name: round(size * len(groups)) if isinstance(size, float) else size for name, size in sizes.items()}
    part_of = _assign(groups, counts, seed)
    names = [REST, *counts]
    out.mkdir(parents=True, exist_ok=True)
    written = dict.fromkeys(names, 0)
    with ExitStack() as stack:
        files = [stack.enter_context(replacing(out / f"{name}.jsonl")) for name in names]
        for index, row in enumerate(read_rows(source)):
            if index >= len(groups):
                raise DatasetError(f"{source} has grown while it was split")
            part = part_of[groups[index]]
            files[part].write(_line(row, out) + b"\n")
            written[names[part]] += 1
    return written


def _line(row: RawRow, out: Path) -> bytes:
    """The row as it is, but for relative paths of pictures, which lead there from the part's folder."""
    content = row.content()
    moved = with_moved_paths(content, Path(row.place.file).parent, out)
    return row.line if moved == content else msgspec.json.encode(moved)


def _groups(source: str | Path, key: GroupKey | None) -> array[int]:
    """The group of each row, as a number from 0."""
    groups, numbers = array("Q"), dict[bytes, int]()
    for row in read_rows(source):
        content = row.content()
        if key is None:
            groups.append(len(groups))
            continue
        try:
            group = msgspec.json.encode(key(content), order="sorted")
        except DatasetError as error:
            raise DatasetError(error.problem, row.place) from None
        digest = hashlib.blake2b(group, digest_size=GROUP_BYTES).digest()
        groups.append(numbers.setdefault(digest, len(numbers)))
    if not groups:
        raise DatasetError(f"{source} is empty; it should hold one JSON object in each line")
    return groups


def _assign(groups: array[int], counts: Mapping[str, int], seed: int) -> bytearray:
    """The part of each group: 0 for the rest, then in the order of `counts`."""
    sizes = array("Q", bytes(8 * (max(groups) + 1)))
    for group in groups:
        sizes[group] += 1
    if (asked := sum(counts.values())) > len(groups):
        raise DatasetError(f"{asked} rows are asked for, but there are {len(groups)}")
    order = list(range(len(sizes)))
    random.Random(f"split/{seed}").shuffle(order)
    part_of = bytearray(len(sizes))
    for part, (name, count) in enumerate(counts.items(), 1):
        free = [group for group in order if not part_of[group]]
        for group in _with_sum(free, sizes, count, name):
            part_of[group] = part
    return part_of


def _with_sum(order: Sequence[int], sizes: Sequence[int], total: int, name: str) -> list[int]:
    """Groups that have `total` rows together: the first ones that fit, or else any. Raises DatasetError if there are
    none such."""
    taken, left = [], total
    for group in order:
        if sizes[group] <= left:
            taken.append(group)
            left -= sizes[group]
    return taken if not left else _subset(order, sizes, total, name)


def _subset(order: Sequence[int], sizes: Sequence[int], total: int, name: str) -> list[int]:
    """Subset sum. Bit s of `reached` says that some groups so far have s rows together; `last` has the group that was
    the first to reach a sum, whose other groups all came before it."""
    reached, last, all_bits = 1, dict[int, int](), (1 << total + 1) - 1
    for group in order:
        new = (reached << sizes[group]) & all_bits & ~reached
        reached |= new
        while new:
            lowest = new & -new
            last[lowest.bit_length() - 1] = group
            new ^= lowest
        if total in last:
            break
    if total not in last:
        nearest = max(last, default=0)
        raise DatasetError(f"no groups have {total} rows together, for {name}; the nearest below is {nearest}")
    taken, left = [], total
    while left:
        taken.append(last[left])
        left -= sizes[last[left]]
    return taken
