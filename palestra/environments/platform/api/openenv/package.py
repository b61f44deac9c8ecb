"""Writes an app as an OpenEnv package: a folder with a manifest, a client and a server, as OpenEnv's tools expect."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from palestra import __version__
from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.errors import PlatformError

TEMPLATE = "palestra.environments.platform.api.openenv"
SUFFIX = ".txt"
"""The suffix of all files there, so that they are not taken for code of ours."""
EPISODE_S = 600.0
"""How long an instance lives without use."""


def write_package(app: TaskApp, folder: Path) -> list[Path]:
    """Returns the written files. Raises PlatformError or OSError; a folder that is not empty is not changed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlatformError(f"{folder} is not empty; name a new folder")
    values = _template_values(app)
    written: list[Path] = []
    for name, template in _templates(files(TEMPLATE).joinpath("template"), Path()):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(template).substitute(values), encoding="utf-8")
        written.append(file)
    return written


def _template_values(app: TaskApp) -> dict[str, str]:
    return {
        "app": app.key,
        "package": f"palestra_{app.key}",
        "cls": app.key.capitalize(),
        "title": app.title,
        "description": app.description,
        "version": __version__,
        "tools": ", ".join(tool.name for tool in app.tools),
        "task": f"{app.key}-{app.templates[0].name}-{app.templates[0].difficulty}-17",
        "timeout": str(EPISODE_S),
    }


def _templates(folder: Traversable, path: Path) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_dir():
            found += _templates(one, path / one.name)
        else:
            found.append((path / one.name.removesuffix(SUFFIX), one.read_text(encoding="utf-8")))
    return found
