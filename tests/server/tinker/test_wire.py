"""The generated protobuf module is what wire.proto says, and lives beside the SDK's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from tinker.proto import tinker_public_pb2 as sdk

from palestra.server.tinker import wire_pb2 as wire

ROOT = Path(__file__).parents[3]
PROTO = "palestra/server/tinker/wire.proto"
VERSION = "# Protobuf Python Version:"


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*command, PROTO], cwd=ROOT, check=True)
    ours, fresh = (folder / PROTO.replace(".proto", "_pb2.py") for folder in (ROOT, tmp_path))
    assert _descriptor(ours) == _descriptor(fresh)
    if _version(ours) == _version(fresh):  # another generator says the same in other words
        assert _code(ours) == _code(fresh)
        assert _code(ours.with_suffix(".pyi")) == _code(fresh.with_suffix(".pyi"))


def _descriptor(path: Path) -> bytes:
    literals = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    return max((value for value in literals if isinstance(value, bytes)), key=len)


def _version(path: Path) -> str:
    return next(line for line in path.read_text().splitlines() if line.startswith(VERSION))


def _code(path: Path) -> str:
    """Without its layout."""
    return ast.dump(ast.parse(path.read_text()))


def test_nothing_is_shared_with_the_sdk() -> None:
    assert wire.DESCRIPTOR.name != sdk.DESCRIPTOR.name
    assert wire.DESCRIPTOR.package == "palestra.tinker_wire"


@pytest.mark.parametrize("name", sorted(wire.DESCRIPTOR.message_types_by_name))
def test_every_field_is_the_sdks(name: str) -> None:
    theirs = sdk.DESCRIPTOR.message_types_by_name[name].fields_by_number
    for field in wire.DESCRIPTOR.message_types_by_name[name].fields:
        assert _form(field) == _form(theirs[field.number])


def _form(field: FieldDescriptor) -> tuple[object, ...]:
    kind = field.message_type or field.enum_type
    return field.name, field.type, field.is_repeated, field.has_presence, kind and kind.name


@pytest.mark.parametrize("name", sorted(wire.DESCRIPTOR.enum_types_by_name))
def test_every_enum_is_the_sdks(name: str) -> None:
    ours, theirs = (m.DESCRIPTOR.enum_types_by_name[name].values_by_number for m in (wire, sdk))
    assert {n: v.name for n, v in ours.items()} == {n: v.name for n, v in theirs.items()}
