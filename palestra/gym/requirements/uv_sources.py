"""Sources of a project's packages: `[tool.uv.sources]` as direct references, which pip and uv both read.

A package index has a package of almost any name, by any author. So what a project takes from another place is taken
from there or not at all: whatever cannot be written as a direct reference is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from packaging.markers import InvalidMarker, Marker, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from palestra.gym.errors import GymConfigError
from palestra.util.json_types import JsonObject

GIT_REFERENCES = {"rev": "", "tag": "refs/tags/", "branch": "refs/heads/"}
"""Full names of tags and branches: one of the other kind may have the same short name."""
_CONDITIONS = ("marker", "extra", "group")
_KEYS = {
    "git": ("subdirectory", *GIT_REFERENCES),
    "url": ("subdirectory",),
    "path": ("editable",),
}
INDEX_SETTINGS = ("index", "index-url", "extra-index-url", "find-links", "no-index")
"""Settings of `[tool.uv]` that say where packages come from. With several indexes, pip takes a package from any."""
_REPLACING_SETTINGS = ("override-dependencies", "constraint-dependencies", "build-constraint-dependencies")
UV_SETTINGS = (*INDEX_SETTINGS, *_REPLACING_SETTINGS, "exclude-dependencies", "extra-build-dependencies")
"""Settings that change what is installed, and that pip does not know."""


class UvSources:
    """The sources of one project. `file` is its pyproject.toml, with its content, and that of uv.lock beside it;
    `version` is that of the Python it is installed for."""

    def __init__(self, file: Path, table: JsonObject, lock: JsonObject, version: str) -> None:
        self._file = file
        self._lock: dict[str, JsonObject] = {one["name"]: one for one in lock.get("package", []) if "name" in one}
        uv = table.get("tool", {}).get("uv", {})
        given: JsonObject = uv.get("sources") or {}
        self._sources = {
            canonicalize_name(name): value if isinstance(value, list) else [value] for name, value in given.items()
        }
        self._environment = {
            **{key: str(value) for key, value in default_environment().items()},
            "python_version": ".".join(version.split(".")[:2]),
            "python_full_version": version,
        }
        for key in _REPLACING_SETTINGS:
            for line in uv.get(key) or []:
                if (name := canonicalize_name(self._read(line).name)) in self._sources:
                    raise GymConfigError(self._refusal(name, f"a source, and is listed in tool.uv.{key}, too"))

    def lines(self, requirements: Iterable[str]) -> list[str]:
        """Returns the requirements with their sources. Raises GymConfigError if a source cannot be handed on."""
        return [line for one in requirements for line in self._line(one)]

    def _line(self, text: str) -> Iterator[str]:
        requirement = self._read(text)
        source = self._source(canonicalize_name(requirement.name))
        if source is None:
            yield text
        elif requirement.url is not None:
            raise GymConfigError(self._refusal(requirement.name, f"a source, and is required from {requirement.url}"))
        elif requirement.marker is None or requirement.marker.evaluate(self._environment):
            yield self._reference(requirement, source)

    def _read(self, text: str) -> Requirement:
        try:
            return Requirement(text)
        except InvalidRequirement as error:
            raise GymConfigError(f"{self._file}: {text!r} is not a requirement ({error})") from None

    def _source(self, name: NormalizedName) -> Mapping[str, Any] | None:
        """Returns the source that holds on this machine. Those of extras and groups do not: none is installed."""
        for one in self._sources.get(name, []):
            if not isinstance(one, dict):
                raise GymConfigError(self._refusal(name, f"the source {one!r}"))
            if "extra" in one or "group" in one:
                continue
            try:
                if "marker" not in one or Marker(one["marker"]).evaluate(self._environment):
                    return one
            except InvalidMarker as error:
                raise GymConfigError(self._refusal(name, f"the marker {one['marker']!r} ({error})")) from None
        return None

    def _reference(self, requirement: Requirement, source: Mapping[str, Any]) -> str:
        kind = next((key for key in _KEYS if key in source), None)
        stray = sorted(set(source) - {kind, *_KEYS.get(kind or "", ()), *_CONDITIONS})
        given = {key: value for key, value in source.items() if key not in ("editable", *_CONDITIONS)}
        if kind is None or stray or any(not isinstance(one, str) or one.split() != [one] for one in given.values()):
            raise GymConfigError(self._refusal(requirement.name, f"the source {dict(source)}"))
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        if kind == "path":
            return self._at_path(requirement.name, extras, source)
        url = source[kind]
        if "://" not in url:
            raise GymConfigError(self._refusal(requirement.name, f"the address {url!r}, which is not a URL"))
        if kind == "git":
            pins = [f"{prefix}{source[key]}" for key, prefix in GIT_REFERENCES.items() if key in source]
            if len(pins) > 1:
                raise GymConfigError(self._refusal(requirement.name, f"several references ({', '.join(pins)})"))
            commit = self._locked_commit(requirement.name, source)
            url = "@".join([f"git+{url.removeprefix('git+')}", *([commit] if commit else pins)])
        elif "#" not in url and (digest := self._locked_hash(requirement.name, url)):
            url = f"{url}#{digest}"
        parts = [f"subdirectory={source['subdirectory']}"] if "subdirectory" in source else []
        name = f"{requirement.name}{extras}"
        if url.startswith("git+file:"):  # before pip 24, a reference needs a host
            return f"{url}#{'&'.join([f'egg={name}', *parts])}"
        return f"{name} @ {url}" + "".join(f"{'&' if '#' in url else '#'}{part}" for part in parts)

    def _locked_commit(self, name: str, source: Mapping[str, Any]) -> str | None:
        """Returns the commit of the project's lock, if that was made for this very source."""
        place, _, commit = str(self._lock.get(canonicalize_name(name), {}).get("source", {}).get("git", "")).partition(
            "#"
        )
        url, _, query = place.partition("?")
        pin = [(key, source[key]) for key in GIT_REFERENCES if key in source]
        references = [one for one in parse_qsl(query) if one[0] in GIT_REFERENCES]
        return commit if commit and url == source["git"] and references == pin else None

    def _locked_hash(self, name: str, url: str) -> str | None:
        """Returns the hash of the project's lock for the file at this address, as a URL has it."""
        found = self._lock.get(canonicalize_name(name), {})
        files = [*found.get("wheels", []), *([found["sdist"]] if "sdist" in found else [])]
        if found.get("source", {}).get("url") != url or len(files) != 1:
            return None
        return str(files[0].get("hash", "")).replace(":", "=", 1) or None

    def _at_path(self, name: str, extras: str, source: Mapping[str, Any]) -> str:
        place = (self._file.parent / source["path"]).absolute().resolve()
        if not place.exists():
            raise GymConfigError(self._refusal(name, f"the path {place}, which is not there"))
        if source.get("editable") and place.is_dir():
            return f"-e {place}{extras}"
        return f"{name}{extras} @ {place.as_uri()}"

    def _refusal(self, name: str, what: str) -> str:
        return (
            f"{self._file}: {name} has {what} ([tool.uv.sources]); that cannot be handed on, and {name} is taken from "
            "nowhere else.\n  write one git, url or path for it there; or build the folder's own environment "
            f"(cd {self._file.parent} && uv sync), and take it by ++skip_venv_if_present=true"
        )
