"""Makes new server folders from a working skeleton, finds them, and checks one without a model."""

from __future__ import annotations

import asyncio
import json
import keyword
import os
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

import yaml

from palestra.gym.errors import GymConfigError
from palestra.gym.nemo_gym_compat import stock_path
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.registry import OURS, implementations, is_stock, load_class
from palestra.gym.search_folders import did_you_mean
from palestra.gym.servers.base import GymServer
from palestra.gym.servers.gymnasium import GymnasiumServer
from palestra.gym.servers.resources import RESERVED, ResourcesServer
from palestra.gym.testing import opened
from palestra.gym.venvs import interpreter_for
from palestra.types.gym import PARAMS
from palestra.types.gym_failures import error_text
from palestra.util.json_types import JsonObject

SKELETON = Path(__file__).parent / "skeleton"
"""A folder for each kind that can be made; `NAME` in a file's name is replaced by the server's name."""
SUFFIX = ".txt"
MAKE_ROWS = "data/make_rows.py"
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


def make_server(name: str, below: Path, kind: ServerKind = ServerKind.RESOURCES) -> list[Path]:
    """Returns the files that were written. Raises GymConfigError; existing files are not touched."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name in RESERVED:
        raise GymConfigError(
            f"{name!r} cannot be a server's name; use lower-case letters, digits and _, beginning with a letter"
        )
    if name in OURS.get(kind, ()):
        raise GymConfigError(f"{name!r} is a server of Palestra itself; choose another name")
    folder = below / kind / name
    if folder.exists():
        raise GymConfigError(f"{folder} already exists; choose another name or remove it first")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    fields = {"name": name, "class": class_name, "title": name.replace("_", " ").capitalize()}
    skeleton = SKELETON / kind
    for template in sorted(skeleton.rglob(f"*{SUFFIX}")):
        file = folder / template.relative_to(skeleton).as_posix().removesuffix(SUFFIX).replace("NAME", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(template.read_text(encoding="utf-8")).substitute(fields), encoding="utf-8")
    if (folder / MAKE_ROWS).is_file():
        runpy.run_path(str(folder / MAKE_ROWS), run_name="__main__")
    return sorted(file for file in folder.rglob("*") if file.suffix != ".pyc" and file.is_file())


class UnknownServer(GymConfigError, LookupError):
    """No folder has a server of this name."""


def find_folder(name: str, roots: Sequence[Path]) -> Path:
    """Returns the folder of a server: `NAME`, or `KIND/NAME`. Raises UnknownServer."""
    kinds = [kind for kind in ServerKind if name.startswith(f"{kind}/")] or list(ServerKind)
    plain = name.rpartition("/")[2]
    for root in roots:
        for kind in kinds:
            if any((root / kind / plain).glob("*.py")):
                return root / kind / plain
    known = {one for kind in kinds for one in implementations(kind, roots)}
    places = "".join(f"\n  not below {root}" for root in roots)
    raise UnknownServer(f"there is no server {name!r}{places}{did_you_mean(plain, known)}")


class PytestRun(NamedTuple):
    command: list[str]
    environment: dict[str, str]


def pytest_command(folder: Path, report: Callable[[str], None]) -> PytestRun:
    """Returns what runs pytest with the interpreter of the server, which may have to be made first."""
    interpreter = asyncio.run(interpreter_for(folder, {}, report))
    environment = dict(os.environ)
    if any(is_stock(file) for file in folder.glob("*.py")):
        environment["PYTHONPATH"] = stock_path(folder)
    return PytestRun([interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], environment)


EXAMPLES = "data/example.jsonl"


def check_folder(folder: Path) -> list[str]:
    """Returns what was found, in words. Raises GymConfigError."""
    file = folder / EXAMPLES
    rows = read_rows(file) if file.is_file() else {}
    lines = [f"{file}: {len(rows)} rows"] if rows else []
    if is_stock(folder / "app.py"):
        return lines
    server_class = load_class(_instance(folder))
    if rows and issubclass(server_class, ResourcesServer):
        _begin_all(server_class, own_settings(folder), {f"{file}:{number}": row for number, row in rows.items()})
        lines.append("each of them can be seeded")
    elif (settings := own_settings(folder)) and settings == _configured(folder):
        _check_settings(server_class, settings, _config_file(folder))
        lines.append("its config is valid")
    return [*lines, f"{server_class.__name__} loads"]


def read_rows(file: Path) -> dict[int, JsonObject]:
    """Returns rows by line number. Raises GymConfigError with the first invalid one."""
    rows: dict[int, JsonObject] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise GymConfigError(f"{file}:{number}: not valid JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(PARAMS), dict):
            raise GymConfigError(f"{file}:{number}: a row must be an object with {PARAMS}")
        rows[number] = row
    return rows


def own_settings(folder: Path) -> JsonObject:
    """Returns its settings in its own config, without values that another file has to fill in."""
    configured = _configured(folder)
    return {name: value for name, value in configured.items() if "???" not in str(value) and "${" not in str(value)}


def _config_file(folder: Path) -> Path:
    return folder / "configs" / f"{folder.name}.yaml"


def _configured(folder: Path) -> JsonObject:
    file = _config_file(folder)
    found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    for server in (found or {}).values():
        settings = server.get(folder.parent.name, {}).get(folder.name) if isinstance(server, dict) else None
        if isinstance(settings, dict):
            return settings
    return {}


def _check_settings(server_class: type[GymServer], settings: JsonObject, file: Path) -> None:
    try:
        with opened(server_class, **settings):
            pass
    except GymConfigError as error:
        raise GymConfigError(f"{file}: {error}") from None


def _begin_all(server_class: type[ResourcesServer], settings: JsonObject, rows: dict[str, JsonObject]) -> None:
    path = "/reset" if issubclass(server_class, GymnasiumServer) else "/seed_session"
    with opened(server_class, **settings) as server:
        for where, row in rows.items():
            answer = server.caller().post(path, row)
            if not answer.is_ok:
                raise GymConfigError(f"{where}: {path} answered {answer.status}: {error_text(answer.raw())}")


def _instance(folder: Path) -> ServerInstance:
    return ServerInstance(
        name=folder.name,
        kind=ServerKind(folder.parent.name),
        implementation=folder.name,
        settings={"entrypoint": "app.py"},
        host="127.0.0.1",
        port=0,
        folder=folder,
    )
