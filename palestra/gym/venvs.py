"""The interpreter of a server: ours, or that of a virtual environment for what its folder requires.

Owns: reading requirements, building an environment once, sharing it between processes and starts. Never touches: the
server's code.

An environment is named by a hash of its content. It counts only with its mark, which is set last: one that was left
half built is built again. It sees our packages after its own, so that what NeMo Gym requires need not be installed
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palestra.gym.errors import GymConfigError, ServerStartError
from palestra.gym.nemo_gym_compat import COMPAT
from palestra.util import processes
from palestra.util.json_types import JsonObject
from palestra.util.locks import FileLock, Locked

MARK = ".palestra-complete"
INSTALL_S = 3600.0
LAST_LINES = 30
_STAND_IN = re.compile(
    r"(-e\s*|--editable[\s=])?(nemo[-_]gym\s*(\[[^]]*\])?\s*(@.*|[=<>!~;].*)?|\.\./\.\./?(\[[^]]*\])?)", re.IGNORECASE
)
_OTHER_FILE = re.compile(r"(-r|--requirement|-c|--constraint)[\s=]*(?P<file>\S+)")


def has_requirements(folder: Path) -> bool:
    """Whether it requires more than NeMo Gym itself."""
    return bool(requirements_of(folder))


def requirements_of(folder: Path) -> list[str]:
    """Returns requirements as pip reads them, without NeMo Gym. Raises GymConfigError if they cannot be read."""
    listed, project = folder / "requirements.txt", folder / "pyproject.toml"
    if listed.is_file() and project.is_file():
        raise GymConfigError(f"{folder}: has both requirements.txt and pyproject.toml; keep one")
    if listed.is_file():
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in listed.read_text(encoding="utf-8").splitlines()]
    elif project.is_file():
        lines = _dependencies(project)
    else:
        return []
    return [_beside(line, folder) for line in lines if line and not _STAND_IN.fullmatch(line)]


def _dependencies(project: Path) -> list[str]:
    try:
        return [
            str(one).strip() for one in tomllib.loads(project.read_text()).get("project", {}).get("dependencies", [])
        ]
    except tomllib.TOMLDecodeError as error:
        raise GymConfigError(f"{project}: not valid TOML ({error})") from None


def _beside(line: str, folder: Path) -> str:
    """Resolves a file that is named in a requirements file, relative to it."""
    found = _OTHER_FILE.fullmatch(line)
    return line if found is None else line.replace(found["file"], str((folder / found["file"]).absolute()))


async def interpreter_for(
    folder: Path,
    settings: JsonObject,
    report: Callable[[str], None],
    more: Sequence[str] = (),
    alone: Sequence[str] = (),
) -> str:
    """Returns its path; ours if nothing is required. May take minutes the first time. Raises ServerStartError.

    `more` is required in addition to the folder's own; so is `alone`, if it is another Python that cannot see our
    packages.
    """
    venvs = settings.get("uv_venv_dir")
    own = [Path(venvs, *folder.parts[-2:]) if venvs else folder, folder]
    if settings.get("skip_venv_if_present"):
        for place in own:
            if (place / ".venv/bin/python").exists():
                return str(place / ".venv/bin/python")
    lines = [*requirements_of(folder), *more]
    if not lines:
        return sys.executable
    if not _is_our_version(_version(settings)):
        lines += alone
    return str(await _built(folder, lines, settings, report) / "bin" / "python")


async def _built(folder: Path, lines: list[str], settings: JsonObject, report: Callable[[str], None]) -> Path:
    overrides = folder / "overrides.txt"
    version = _version(settings)
    replaced = overrides.read_text() if overrides.is_file() else ""
    content = "\n".join([*sorted(lines), replaced, version, sys.executable, sysconfig.get_paths()["purelib"]])
    name = hashlib.sha256(content.encode()).hexdigest()[:16]
    venv = _root(folder, settings) / name
    if (venv / MARK).exists():
        return venv
    async with _locked(venv.with_suffix(".lock")):
        if not (venv / MARK).exists():
            report(f"building an environment for {folder.name} ({', '.join(lines)}) at {venv}")
            shutil.rmtree(venv, ignore_errors=True)
            await _build(venv, folder, lines, version, settings)
            (venv / MARK).touch()
    return venv


def _version(settings: JsonObject) -> str:
    return str(settings.get("python_version") or ".".join(map(str, sys.version_info[:3])))


def _is_our_version(version: str) -> bool:
    return version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]


def _root(folder: Path, settings: JsonObject) -> Path:
    if settings.get("uv_venv_dir"):
        return Path(settings["uv_venv_dir"], *folder.parts[-2:]).absolute()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "palestra" / "gym" / folder.parts[-2] / folder.name


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Lets one process at a time build; the others wait, and find it built. The lock ends with its process."""
    while True:
        try:
            lock = FileLock(path)
            break
        except Locked:
            await asyncio.sleep(0.2)
    with lock:
        yield


async def _build(venv: Path, folder: Path, lines: list[str], version: str, settings: JsonObject) -> None:
    is_same = _is_our_version(version)
    interpreter = sys.executable if is_same else f"python{'.'.join(version.split('.')[:2])}"
    listed = venv / "palestra-requirements.txt"
    uv = shutil.which("uv")
    overrides = folder / "overrides.txt"
    if overrides.is_file() and uv is None:
        raise ServerStartError(f"{overrides}: only uv supports overrides; to install it: pip install uv")
    if uv is not None:
        await _run([uv, "venv", "--seed", "--python", interpreter if is_same else version, str(venv)], folder, settings)
        install = [uv, "pip", "install", "--python", str(venv / "bin/python")]
        install += ["--override", str(overrides)] if overrides.is_file() else []
    else:
        # our pip can install into it, and copying pip takes seconds
        has_pip = importlib.util.find_spec("pip") is not None
        await _run([interpreter, "-m", "venv", *(["--without-pip"] if has_pip else []), str(venv)], folder, settings)
        python = str(venv / "bin/python")
        install = [
            *([sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]),
            "install",
        ]
    if is_same:
        _see_ours(venv)
    else:
        lines = [*lines, str(COMPAT)]  # for its own requirements
    listed.write_text("\n".join(lines) + "\n")
    verbose = ["-v"] if settings.get("pip_install_verbose") else []
    await _run([*install, *verbose, "-r", str(listed)], folder, settings)


def _see_ours(venv: Path) -> None:
    """Makes our packages visible after its own; by `addsitedir`, so that editable installs count."""
    ours = dict.fromkeys([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in ours]
    for site in venv.glob("lib/python*/site-packages"):
        (site / "zz-palestra.pth").write_text("".join(lines))


async def _run(command: list[str], folder: Path, settings: JsonObject) -> None:
    environment = os.environ | ({"UV_CACHE_DIR": str(settings["uv_cache_dir"])} if settings.get("uv_cache_dir") else {})
    try:
        process = await processes.spawn(
            *command, cwd=folder, env=environment, stdout=processes.PIPE, stderr=processes.STDOUT
        )
    except OSError as error:
        raise ServerStartError(f"{folder}: cannot run {command[0]} ({error.strerror})") from None
    try:
        said, _ = await asyncio.wait_for(process.communicate(), INSTALL_S)
    except TimeoutError:
        raise ServerStartError(f"{folder}: {' '.join(command)} took over {INSTALL_S:.0f} s") from None
    finally:
        await processes.kill(process)
    if process.returncode:
        words = "\n".join(said.decode(errors="replace").splitlines()[-LAST_LINES:])
        raise ServerStartError(f"{folder}: its requirements cannot be installed; {' '.join(command)} printed:\n{words}")
