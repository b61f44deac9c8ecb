"""Files that a kill at any moment leaves readable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from palestra.util.atomic_files import naming, replacing
from palestra.util.json_types import JsonObject, JsonPayload

BLOCK_BYTES = 512 << 10  # what is decoded at once stays in a CPU's cache
PACKED_BYTES = 64 << 10  # read at once; conversations take five to fifty times as much
COMPRESSION_LEVEL = 6  # text and token ids shrink to about a fifth; a step's rollouts take milliseconds
ROWS = msgspec.json.Decoder()


class RunError(Exception):
    """A run or one of its files cannot be used as requested. The message says which, why, and what to type instead."""


class BadRunName(RunError, ValueError):
    """The name is not allowed for a new run."""


def write_json(file: Path, content: object) -> None:
    text = json.dumps(msgspec.to_builtins(content), indent=2, ensure_ascii=False)
    with replacing(file) as stream:
        stream.write(text.encode() + b"\n")


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file}: not valid JSON ({error})") from error


class LineFile:
    """One JSON object in a line, each on the disk before `append` returns."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stream = file.open("ab")
        if self._stream.tell() and not _ends_whole(file):
            self._write(b"\n")  # a kill cut the last line: the next one must not be joined to it

    def append(self, row: JsonPayload) -> None:
        self._write(_encode(row) + b"\n")  # NaN and infinities become null

    def close(self) -> None:
        self._stream.close()

    def _write(self, line: bytes) -> None:
        with naming(self._file):
            self._stream.write(line)
            self._stream.flush()
            os.fsync(self._stream.fileno())


def read_lines(file: Path) -> list[JsonObject]:
    """The complete rows; a line that a kill has cut is left out. Empty if there is no file yet."""
    try:
        return _rows(file.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error


def read_added(file: Path, offset: int) -> tuple[list[JsonObject], int]:
    """The rows that were added behind `offset`, and the offset behind the last of them. A line that is not whole yet is
    left for the next call."""
    blocks = list(read_added_blocks(file, offset))
    return [row for rows, _ in blocks for row in rows], blocks[-1][1] if blocks else offset


def read_added_blocks(file: Path, offset: int) -> Iterator[tuple[list[JsonObject], int]]:
    """Reads like `read_added`, a few thousand rows at a time, each with the offset behind the last of them: rows of a
    long run would take 100 MB together."""
    parts: list[bytes] = []
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            while block := stream.read(BLOCK_BYTES):
                end = block.rfind(b"\n") + 1
                if end:
                    whole = b"".join([*parts, block[:end]])
                    offset += len(whole)
                    parts = []
                    yield _rows(whole), offset
                parts.append(block[end:])
    except FileNotFoundError:
        yield [], 0
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error
    rest = b"".join(parts)
    if (last := _row(rest)) is not None:  # only the end of its line is missing
        yield [last], offset + len(rest)


def write_records(file: Path, records: Iterable[JsonPayload]) -> None:
    """Writes JSON lines into a zstandard file."""
    import zstandard

    with (
        replacing(file) as stream,
        zstandard.ZstdCompressor(COMPRESSION_LEVEL).stream_writer(stream, closefd=False) as z,
    ):
        for record in records:
            z.write(_encode(record) + b"\n")


def read_records(file: Path, containing: str = "") -> Iterator[Any]:
    """The records in the order written. `containing`: only lines with this text, which saves decoding the others."""
    import zstandard

    needle = msgspec.json.encode(containing)[1:-1]  # as it is written in a line
    try:
        for line in _unpacked_lines(file):
            if line and needle in line:
                yield msgspec.json.decode(line)
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise RunError(f"{file}: damaged ({error})") from error


def _unpacked_lines(file: Path) -> Iterator[bytes]:
    """The lines of a zstandard file, of which only a part is in memory at a time."""
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    rest = b""
    with file.open("rb") as stream:
        while not unpacker.eof:
            if not (packed := stream.read(PACKED_BYTES)):
                raise RunError(f"{file}: damaged (it ends too early)")
            *lines, rest = (rest + unpacker.decompress(packed)).split(b"\n")
            yield from lines
    yield rest


def _rows(lines: bytes) -> list[JsonObject]:
    """The objects of all lines at once, which takes half the time of one by one; lines that are none are left out."""
    try:
        rows = ROWS.decode_lines(lines)
    except (ValueError, RecursionError):
        rows = []
    if len(rows) == lines.count(b"\n") and all(row.__class__ is dict for row in rows):
        return rows
    return [row for line in lines.splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> JsonObject | None:
    try:
        row = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _encode(record: JsonPayload) -> bytes:
    """A record as JSON. It never fails, because a run must not end over an unusual message."""
    try:
        return msgspec.json.encode(record, enc_hook=_shown)
    except UnicodeEncodeError:  # half a surrogate pair: JSON may smuggle one in, UTF-8 has no bytes for it
        return msgspec.json.encode(_mended(msgspec.to_builtins(record, enc_hook=_shown)))


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"a {type(value).__name__}"


def _mended(value: object) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_mended(key): _mended(inner) for key, inner in value.items()}
    return [_mended(inner) for inner in value] if isinstance(value, list) else value


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"
