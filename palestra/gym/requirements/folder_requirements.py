"""Reads the requirements of a server's folder, as pip and uv do."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.gym.errors import GymConfigError
from palestra.gym.requirements.uv_sources import INDEX_SETTINGS, UV_SETTINGS, UvSources
from palestra.util.json_types import JsonObject

_STAND_IN = re.compile(
    r"(-e\s*|--editable[\s=])?(nemo[-_]gym\s*(\[[^]]*\])?\s*(@.*|[=<>!~;].*)?|\.\./\.\./?(\[[^]]*\])?)", re.IGNORECASE
)
_OTHER_FILE = re.compile(r"(-r|--requirement|-c|--constraint)[\s=]*(?P<file>\S+)")
_LEGACY_BACKEND = "setuptools.build_meta:__legacy__"


@dataclass(frozen=True, slots=True)
class BuildBackend:
    """The program that knows what a project requires, if its pyproject.toml does not say it."""

    name: str
    """`module` or `module:object`."""
    requires: list[str]
    path: list[str]
    """Folders of the project in which the backend itself is."""


def has_requirements(folder: Path) -> bool:
    """Whether it requires more than NeMo Gym itself. A project whose backend has to be asked counts."""
    return bool(_listed(folder)) or is_computed(folder)


def requirements_of(folder: Path, version: str, more: Sequence[str] = ()) -> list[str]:
    """Returns requirements without NeMo Gym, for this version of Python: the folder's, and `more`, each from where the
    folder says. Raises GymConfigError if that cannot be read or handed on."""
    lines = [*_listed(folder), *_others(more)]
    return _sources(folder, version).lines(lines) if (folder / "pyproject.toml").is_file() else lines


def is_computed(folder: Path) -> bool:
    """Whether the project's build backend must be asked for its requirements: the files of the folder do not have
    them."""
    table = _table(folder / "pyproject.toml")
    if _dynamic_files(table) is not None:
        return False
    if "project" not in table:
        return "build-system" in table
    return "dependencies" in table["project"].get("dynamic", [])


def backend_of(folder: Path, version: str) -> BuildBackend:
    """Returns the build backend of a project. Raises GymConfigError like `requirements_of`."""
    build = _table(folder / "pyproject.toml").get("build-system", {"requires": ["setuptools"]})
    return BuildBackend(
        name=build.get("build-backend", _LEGACY_BACKEND),
        requires=_sources(folder, version).lines(build.get("requires", [])),
        path=build.get("backend-path", []),
    )


def _sources(folder: Path, version: str) -> UvSources:
    project = folder / "pyproject.toml"
    return UvSources(project, _table(project), _table(folder / "uv.lock"), version)


def uv_settings(folder: Path) -> JsonObject:
    """Returns the settings that change what is installed and that only uv follows: the folder's own, and the indexes of
    the gym that it belongs to."""
    above = folder.absolute().parents[1]
    return _settings_of(above, INDEX_SETTINGS) | _settings_of(folder, UV_SETTINGS)


def _settings_of(folder: Path, keys: Iterable[str]) -> JsonObject:
    project = _table(folder / "pyproject.toml").get("tool", {}).get("uv", {})
    given = project | _table(folder / "uv.toml")
    return {key: given[key] for key in keys if given.get(key)}


def _listed(folder: Path) -> list[str]:
    """Returns what the files of the folder list."""
    listed, project = folder / "requirements.txt", folder / "pyproject.toml"
    table = _table(project)
    files = _dynamic_files(table)
    if listed.is_file() and project.is_file() and listed.name not in (files or ()):
        raise GymConfigError(f"{folder}: has both requirements.txt and pyproject.toml; keep one")
    if files is not None:
        return _others(line for name in files for line in _read_lines(folder / name))
    if project.is_file():
        return _others(str(one).strip() for one in table.get("project", {}).get("dependencies", []))
    return [_beside(line, folder) for line in _others(_read_lines(listed) if listed.is_file() else ())]


def _others(lines: Iterable[str]) -> list[str]:
    """Leaves out NeMo Gym."""
    return [line for line in lines if line and not _STAND_IN.fullmatch(line)]


def _dynamic_files(table: JsonObject) -> list[str] | None:
    """Returns the files from which setuptools takes a project's requirements."""
    if "dependencies" not in table.get("project", {}).get("dynamic", []):
        return None
    given = table.get("tool", {}).get("setuptools", {}).get("dynamic", {}).get("dependencies", {}).get("file")
    return [given] if isinstance(given, str) else given


def _read_lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise GymConfigError(f"{file}: cannot be read ({error.strerror})") from None
    return [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]


def _table(file: Path) -> JsonObject:
    if not file.is_file():
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GymConfigError(f"{file}: not valid TOML ({error})") from None


def _beside(line: str, folder: Path) -> str:
    """Resolves a file that is named in a requirements file, relative to it."""
    found = _OTHER_FILE.fullmatch(line)
    return line if found is None else line.replace(found["file"], str((folder / found["file"]).absolute()))
