"""Dockerfiles of the simple kind, as steps that need no image."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from palestra.coding.errors import TaskError
from palestra.coding.task import RunStep, TaskFile

OF_THE_BUILD = {"Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"}
"""Names at the top of a build's folder that are not of the environment."""
RUBBISH = {".DS_Store", "__pycache__"}
HAS_NO_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "USER", "SHELL"}
PLAIN_PROGRAMS = """
    cat cd chmod cp echo export find git gzip gunzip head install ln ls mkdir mv printf rm sed seq set sort tail tar tee
    test touch tr true wc
"""
"""Programs that a command of a simple Dockerfile may use: none of them installs something."""
BETWEEN_COMMANDS = {";", "&&", "||", "|", "&", "(", ")"}


@dataclass(slots=True)
class DockerBuild:
    """What a Dockerfile comes to."""

    workdir: str = "/"
    steps: list[TaskFile | RunStep] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    needs_image: str | None = None
    """Why the steps are not all that there is to do; None: they are."""


def read_dockerfile(file: Path, context: Path, hidden: set[str] | None = None) -> DockerBuild:
    """Returns the steps of a Dockerfile. What is called as in `hidden` at the top of the context is left out."""
    found = DockerBuild()
    has_base = False
    for number, name, rest in _instructions(file.read_text(encoding="utf-8", errors="replace")):
        line = f"{file}, line {number}: {name} {rest}"
        if name == "FROM":
            problem = f"{line[:200]} is a second stage" if has_base else None
            has_base = True
        else:
            problem = _follow(found, name, rest, context, (hidden or set()) | OF_THE_BUILD)
            problem = problem and f"{line[:200]} {problem}"
        found.needs_image = found.needs_image or problem
    return found


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Returns line number, name and rest of each instruction; comments and continued lines are resolved."""
    found: list[tuple[int, str, str]] = []
    whole, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not whole):
            continue
        start = start or number
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        name, _, rest = (whole + line).strip().partition(" ")
        found.append((start, name.upper(), rest.strip()))
        whole, start = "", 0
    return found


def _follow(found: DockerBuild, name: str, rest: str, context: Path, hidden: set[str]) -> str | None:
    """Adds one instruction; returns what about it needs Docker."""
    if name in HAS_NO_EFFECT:
        return None
    if "$" in rest and name != "RUN":
        return "has variables"
    match name:
        case "WORKDIR":
            found.workdir = posixpath.normpath(posixpath.join(found.workdir, rest.strip("\"'")))
            return None
        case "ENV":
            return _set_env(found, rest)
        case "COPY" | "ADD":
            return _copy(found, rest, context, hidden)
        case "RUN":
            if _is_plain(rest):
                found.steps.append(RunStep(rest, found.workdir))
                return None
            return "is not one of the plain commands that can be followed without it"
    return "cannot be followed without it"


def _set_env(found: DockerBuild, rest: str) -> str | None:
    arguments = shlex.split(rest)
    if arguments and all("=" in one for one in arguments):
        found.env |= {one.partition("=")[0]: one.partition("=")[2] for one in arguments}
    elif len(arguments) > 1:
        found.env[arguments[0]] = rest.split(maxsplit=1)[1]
    else:
        return "has no value"
    return None


def _copy(found: DockerBuild, rest: str, context: Path, hidden: set[str]) -> str | None:
    arguments = [one for one in shlex.split(rest) if not one.startswith(("--chown=", "--chmod="))]
    if rest.startswith("[") or any(one.startswith("--") or "://" in one for one in arguments) or len(arguments) < 2:
        return "copies from elsewhere than files of the task"
    *sources, target = arguments
    into = posixpath.join(found.workdir, target)
    is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    for source in sources:
        matches = sorted(context.glob(source.strip("/"))) if source.strip("./") else [context]
        if not matches:
            return f"copies {source}, which is not there"
        for path in matches:
            check_inside(path, context)
            if path.parent == context and path.name in hidden:
                continue
            if path.is_dir():
                found.steps += folder_files(path, posixpath.normpath(into), hidden if path == context else set())
            else:
                is_into = is_folder or len(matches) > 1
                to = posixpath.join(into, path.name) if is_into else into
                found.steps.append(TaskFile(path, posixpath.normpath(to)))
    return None


def folder_files(folder: Path, into: str, hidden: Collection[str] = ()) -> list[TaskFile]:
    """Returns the files below a folder and where they go, without those of hidden names at its top. Raises TaskError if
    one leads out of it."""
    found: list[TaskFile] = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if inside.parts[0] in hidden or RUBBISH.intersection(inside.parts) or path.is_dir():
            continue
        check_inside(path, folder)
        found.append(TaskFile(path, posixpath.join(into, inside.as_posix())))
    return found


def check_inside(path: Path, folder: Path) -> None:
    """Raises TaskError where a path or a link leads out of a folder: tasks are untrusted."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TaskError(f"{path} leads out of {folder}; put a copy of the file there")


def _is_plain(command: str) -> bool:
    if command.startswith(("[", "<<", "--")) or re.search(r"\$\(|`|<<", command):
        return False
    reader = shlex.shlex(command, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    is_first = True
    try:
        for word in reader:
            if word in BETWEEN_COMMANDS:
                is_first = True
            elif is_first and word not in PLAIN_PROGRAMS.split():
                return False
            else:
                is_first = False
    except ValueError:  # quotes that do not match
        return False
    return True
