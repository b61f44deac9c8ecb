"""A new server of a gym, from a skeleton that works.

Owns: names, the files of the skeleton. Never touches: what a server does.
"""

from __future__ import annotations

import keyword
import re
import runpy
from pathlib import Path
from string import Template

from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerKind
from palestra.gym.registry import OURS
from palestra.gym.servers.resources import RESERVED

SKELETON = Path(__file__).parent / "skeleton"
"""A folder for each kind that can be made; `NAME` in a file's name is the server's."""
SUFFIX = ".txt"
MAKE_ROWS = "data/make_rows.py"
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


def make_server(name: str, below: Path, kind: ServerKind = ServerKind.RESOURCES) -> list[Path]:
    """The files that were written. Raises GymConfigError; nothing that exists is touched."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name in RESERVED:
        raise GymConfigError(
            f"{name!r} cannot be a server's name: small letters, digits and _, beginning with a letter"
        )
    if name in OURS.get(kind, ()):
        raise GymConfigError(f"{name!r} is always taken from us, not from a folder; choose another name")
    folder = below / kind / name
    if folder.exists():
        raise GymConfigError(f"{folder} exists already; choose another name or remove it first")
    words = {"name": name, "class": _class_name(name), "title": name.replace("_", " ").capitalize()}
    skeleton = SKELETON / kind
    for template in sorted(skeleton.rglob(f"*{SUFFIX}")):
        file = folder / template.relative_to(skeleton).as_posix().removesuffix(SUFFIX).replace("NAME", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
    if (folder / MAKE_ROWS).is_file():
        runpy.run_path(str(folder / MAKE_ROWS), run_name="__main__")
    return sorted(file for file in folder.rglob("*") if file.suffix != ".pyc" and file.is_file())


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_") if part)
