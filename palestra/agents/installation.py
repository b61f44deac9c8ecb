"""Finds where an agent is installed on this machine, so that a sandbox here can show it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from palestra.agents.registry import UnknownAgentProgram
from palestra.sandbox.spec import OWN_FOLDERS

SEEN = (Path("/usr"), Path("/bin"), Path("/lib"))
"""What sandboxes of this machine show anyway."""
NODE_MODULES = "node_modules"


@dataclass(frozen=True, slots=True)
class Installation:
    """A program that can be started where these folders are visible."""

    program: str
    folders: tuple[str, ...] = ()
    search_path: tuple[str, ...] = ()
    """Folders of interpreters that the program looks for by name."""

    def hidden_by(self, own_folders: Iterable[str] = OWN_FOLDERS) -> str | None:
        """Returns why a sandbox with these folders of its own cannot show the program, and what to do; None: it can."""
        for folder in self.folders:
            for own in own_folders:
                if Path(folder).is_relative_to(own):
                    return (
                        f"{self.program} needs {folder}, but a sandbox has its own {own}: "
                        "install it elsewhere, for example with `npm install --prefix ~/agents` or in ~/.venv"
                    )
        return None


def find_installation(program: str) -> Installation:
    """Finds a program by its name or path. Raises UnknownAgentProgram."""
    found = shutil.which(program)
    if found is None:
        raise UnknownAgentProgram(f"{program} is not installed here, or not in PATH")
    path = Path(found).absolute()
    target = path.resolve()
    interpreter = _interpreter(target)
    folders = [*_folders(path, target), *(_installed_in(interpreter.resolve()) if interpreter else [])]
    hidden = [one for one in dict.fromkeys(folders) if not any(one.is_relative_to(seen) for seen in SEEN)]
    outside = interpreter is not None and any(interpreter.resolve().is_relative_to(one) for one in hidden)
    # A virtual environment's own folder tells a Python program which packages it has: links there are not followed.
    started = path if _environment_of(path) else target
    return Installation(
        str(started), tuple(map(str, hidden)), (str(interpreter.parent),) if outside and interpreter else ()
    )


def _folders(path: Path, target: Path) -> Iterator[Path]:
    if environment := _environment_of(path):
        yield environment
    elif NODE_MODULES in target.parts:
        yield Path(*target.parts[: target.parts.index(NODE_MODULES) + 1])
    else:
        yield target.parent


def _environment_of(path: Path) -> Path | None:
    """The Python environment in whose `bin` a program is."""
    folder = path.parent.parent
    return folder if (folder / "pyvenv.cfg").is_file() else None


def _interpreter(program: Path) -> Path | None:
    """The interpreter that the first line of a script names."""
    with program.open("rb") as file:
        line = file.readline(512)
    command = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if not command:
        return None
    name = command[0]
    if name.endswith("/env"):
        name = next((one for one in command[1:] if not one.startswith("-")), "")
    found = shutil.which(name)
    return Path(found).absolute() if found else None


def _installed_in(interpreter: Path) -> list[Path]:
    return [interpreter.parents[1] if interpreter.parent.name == "bin" else interpreter.parent]
