"""A new resources server, from a skeleton that works.

Owns: names, the files of the skeleton. Never touches: running them.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerKind
from palestra.gym.servers.resources import RESERVED

SKELETON = Path(__file__).parent / "skeleton"
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


def make_server(name: str, below: Path) -> list[Path]:
    """The files that were written. Raises GymConfigError; nothing that exists is touched."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name in RESERVED:
        raise GymConfigError(
            f"{name!r} cannot be a server's name: small letters, digits and _, beginning with a letter"
        )
    folder = below / ServerKind.RESOURCES / name
    if folder.exists():
        raise GymConfigError(f"{folder} exists already; choose another name or remove it first")
    words = {"name": name, "class": _class_name(name), "title": name.replace("_", " ").capitalize()}
    files = {
        folder / "app.py": _filled("app.py.txt", words),
        folder / "configs" / f"{name}.yaml": _filled("config.yaml.txt", words),
        folder / "data" / "example.jsonl": _filled("example.jsonl.txt", words),
        folder / "tests" / "test_app.py": _filled("test_app.py.txt", words),
        folder / "README.md": _filled("README.md.txt", words),
    }
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return list(files)


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_") if part)


def _filled(template: str, words: dict[str, str]) -> str:
    return Template((SKELETON / template).read_text(encoding="utf-8")).substitute(words)
