"""The interpreter of a server: ours, or that of a virtual environment for what its folder requires.

An environment is named by a hash of its content. It counts only with its mark, which is set last: one that was left
half built is built again. It sees our packages after its own, so that what NeMo Gym requires need not be installed
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palestra.gym.errors import ServerStartError
from palestra.gym.nemo_gym_compat import COMPAT
from palestra.gym.requirements.computed_requirements import computed_requirements
from palestra.gym.requirements.folder_requirements import backend_of, is_computed, requirements_of, uv_settings
from palestra.util import processes
from palestra.util.json_types import JsonObject
from palestra.util.locks import FileLock, Locked

MARK = ".palestra-complete"
INSTALL_S = 3600.0
LAST_LINES = 30
_DIRECT = re.compile(r"(-e|--editable)\b|[./]|[^-].*://")
"""A requirement that says where its package is."""


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
    if (present := present_interpreter(folder, settings)) is not None:
        return present
    version = python_version(settings)
    computed = await _computed(folder, settings, report) if is_computed(folder) else []
    lines = requirements_of(folder, version, [*computed, *more])
    if not lines:
        return sys.executable
    if not _is_our_version(version):
        lines += alone
    return str(await _built(folder, lines, settings, report) / "bin" / "python")


def present_interpreter(folder: Path, settings: JsonObject) -> str | None:
    """Returns that of the folder's own `.venv`, if it is there and shall be taken as it is."""
    venvs = settings.get("uv_venv_dir")
    own = [Path(venvs, *folder.parts[-2:]) if venvs else folder, folder]
    found = (place / ".venv/bin/python" for place in own if settings.get("skip_venv_if_present"))
    return next((str(one) for one in found if one.exists()), None)


def python_version(settings: JsonObject) -> str:
    """Returns the version of Python for which environments are built."""
    return str(settings.get("python_version") or ".".join(map(str, sys.version_info[:3])))


async def _computed(folder: Path, settings: JsonObject, report: Callable[[str], None]) -> list[str]:
    """Returns what the project's own code says that it requires."""
    backend = backend_of(folder, python_version(settings))
    packages: Path | None = None
    if backend.requires:
        venv = await _built(folder, backend.requires, settings, report)
        packages = next(venv.glob("lib/python*/site-packages"))
    allowed = (settings.get("gym") or {}).get("allow_setup") or []
    return await computed_requirements(folder, backend, packages, is_allowed=folder.name in allowed)


async def _built(folder: Path, lines: list[str], settings: JsonObject, report: Callable[[str], None]) -> Path:
    overrides = folder / "overrides.txt"
    version = python_version(settings)
    replaced = overrides.read_text() if overrides.is_file() else ""
    configured = json.dumps(uv_settings(folder), sort_keys=True, default=str)
    ours = [version, sys.executable, sysconfig.get_paths()["purelib"]]
    content = "\n".join([*sorted(lines), replaced, configured, *ours])
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
    if uv is None and (settings_of_uv := uv_settings(folder)):
        names = ", ".join(f"tool.uv.{key}" for key in settings_of_uv)
        raise ServerStartError(f"{folder}: {names}: only uv follows this; to install it: pip install uv")
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
    install += ["-v"] if settings.get("pip_install_verbose") else []
    if uv is None and (direct := [line for line in lines if _DIRECT.match(line)]):
        # pip leaves out what is there in the same version, and it sees our packages; uv looks into the environment only
        named = venv / "palestra-direct.txt"
        named.write_text("\n".join(direct) + "\n")
        await _run([*install, "--ignore-installed", "--no-deps", "-r", str(named)], folder, settings)
    await _run([*install, "-r", str(listed)], folder, settings)


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
        output, _ = await asyncio.wait_for(process.communicate(), INSTALL_S)
    except TimeoutError:
        raise ServerStartError(f"{folder}: {' '.join(command)} took over {INSTALL_S:.0f} s") from None
    finally:
        await processes.kill(process)
    if process.returncode:
        end = "\n".join(output.decode(errors="replace").splitlines()[-LAST_LINES:])
        raise ServerStartError(f"{folder}: its requirements cannot be installed; {' '.join(command)} printed:\n{end}")
