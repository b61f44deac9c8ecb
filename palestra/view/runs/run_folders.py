"""The run folders that are shown: those below one folder, as far as no link leads out of it."""

from __future__ import annotations

import os
from pathlib import Path

from palestra.runs.reader import Part, RunNotFound, RunReader
from palestra.util.suggest import nearest


class ShownRun(RunReader):
    """A run whose files are all below one folder."""

    def __init__(self, path: Path, root: Path) -> None:
        super().__init__(path)
        self._root = root

    def step_file(self, part: Part, step: int) -> Path:
        """The file of a step. Raises RunNotFound if it is a link that leads out."""
        file = super().step_file(part, step)
        if leads_out(file, self._root):
            raise RunNotFound(f"{file} is a link that leads out of {self._root}, and is not followed")
        return file

    def _is_own(self, entry: os.DirEntry[str]) -> bool:
        return not entry.is_symlink() or not leads_out(Path(entry.path), self._root)

    def log_files(self) -> list[Path]:
        found = (file for file in (self.path / "logs").glob("*") if file.suffix in (".log", ".txt", ".out"))
        return sorted(file for file in found if file.is_file() and not leads_out(file, self._root))


class RunFolders:
    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self) -> list[ShownRun]:
        """The runs, newest first. What is no run, leads elsewhere or was deleted meanwhile is left out."""
        found: list[tuple[float, ShownRun]] = []
        for path in self._folders():
            try:
                if self._link_out(path) is None:
                    changed = os.stat(f"{path}/config.json").st_mtime  # noqa: PTH116 (a thousand runs: pathlib is slow)
                    found.append((changed, ShownRun(path, self.root)))
            except (OSError, RunNotFound):
                continue
        return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def open(self, name: str) -> ShownRun:
        """The run of this name. Raises RunNotFound; a name never leads out of the folder."""
        path = self.root / name
        if name not in ("", ".", "..") and "/" not in name and os.path.isfile(path / "config.json"):  # noqa: PTH113
            if link := self._link_out(path):
                raise RunNotFound(f"{link} is a link that leads out of {self.root}, and is not followed")
            return ShownRun(path, self.root)
        near = nearest(name, [run.name for run in self.list()])
        hint = f"; did you mean {near}?" if near else ""
        raise RunNotFound(f"there is no run {name[:100]!r} in {self.root}{hint}")

    def _folders(self) -> list[Path]:
        try:
            names = os.listdir(self.root)  # noqa: PTH208
        except OSError:
            return []
        return [self.root / name for name in names if _is_text(name)]

    def _link_out(self, path: Path) -> Path | None:
        """Returns a path in a run's folder that leads out of the root, if there is one."""
        if leads_out(path, self.root):
            return path
        with os.scandir(path) as entries:
            links = [path / entry.name for entry in entries if entry.is_symlink()]
        return next((link for link in links if leads_out(link, self.root)), None)


def leads_out(path: Path, root: Path) -> bool:
    """Whether a path is a link to something that is not below the root."""
    if not path.is_symlink():
        return False
    real = os.path.realpath(path)  # unlike `resolve`, in spite of links that lead to themselves
    return not Path(real).is_relative_to(root.resolve())


def _is_text(name: str) -> bool:
    """Whether a name can be written into a page: file systems allow others."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
