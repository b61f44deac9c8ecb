"""Links from the site's pages to files of the repository that are not below `docs`.

A page such as `README.md` keeps links that work in a checkout (`docs/serving.md`, `examples/grpo.py`). In the site the
README is the home page, and whatever else is linked lies below `source/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from scripts.reference.pages import generated

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "AGENTS.md": "code-map.md",
    "SECURITY.md": "security.md",
}
"""Pages of the site that are kept outside of `docs`."""

LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s#]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"^\s*```")


class RepositoryLinks:
    def __init__(self) -> None:
        self._uris: dict[str, str] = {}
        """Path in the site by path in the repository, for what is not below `docs`."""

    def add_files(self, files: Files, config: MkDocsConfig) -> None:
        self._uris = dict(PAGES)
        waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files if file.is_documentation_page())]
        while waiting:
            path = waiting.pop()
            for target in self._targets(path):
                if target not in self._uris and not target.startswith("docs/") and (ROOT / target).is_file():
                    self._uris[target] = f"source/{target}"
                    waiting.append(target)
        for path, uri in self._uris.items():
            if uri.endswith(".md"):
                files.append(generated(config, uri, (ROOT / path).read_text(encoding="utf-8")))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))

    def resolve(self, markdown: str, uri: str) -> str:
        """The page's text, with links that hold inside the site."""
        path = self._path_of(uri)

        def resolved(found: re.Match[str]) -> str:
            text, target, anchor = found[1], found[2], found[3] or ""
            if _is_elsewhere(target):
                return found[0]
            meant = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if (ROOT / meant).is_dir():
                return text[1:-1]
            inside = meant.removeprefix("docs/") if meant.startswith("docs/") else self._uris.get(meant)
            if inside is None:
                return found[0]
            return f"{text}({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor})"

        return "".join(line if is_code else LINK.sub(resolved, line) for line, is_code in _lines(markdown))

    def _targets(self, path: str) -> Iterator[str]:
        file = ROOT / path
        if not path.endswith(".md") or not file.is_file():
            return
        for line, is_code in _lines(file.read_text(encoding="utf-8")):
            for found in () if is_code else LINK.finditer(line):
                if not _is_elsewhere(found[2]):
                    yield posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))

    def _path_of(self, uri: str) -> str:
        outside = {inside: path for path, inside in self._uris.items()}
        return outside.get(uri, f"docs/{uri}")


def _is_elsewhere(target: str) -> bool:
    return ":" in target.partition("/")[0] or target.startswith("/")


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is part of a code block."""
    is_code = False
    for line in markdown.splitlines(keepends=True):
        is_fence = bool(FENCE.match(line))
        yield line, is_code or is_fence
        is_code ^= is_fence
