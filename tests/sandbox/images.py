"""An image for containers, made of this machine's own programs: nothing is fetched from anywhere."""

from __future__ import annotations

import asyncio
import functools
import glob
import io
import shutil
import subprocess
import sysconfig
import tarfile
from pathlib import Path

from palestra.sandbox import SandboxSpec, SandboxUnavailable, sandbox

NAME = "palestra-sandbox-test"
PROGRAMS = """
    cat chmod chroot cp cut date dd df dirname echo env false grep head id kill ln ls mkdir mkfifo mount newgrp nohup
    printf ps python3 readlink rm sed setsid sh sleep sort stat su tail tar test touch true unshare wc which yes
"""
FOLDERS = {".": 0o755, "tmp": 0o1777, "etc": 0o755, "dev": 0o755, "proc": 0o755, "sys": 0o755, "run": 0o755}


@functools.cache
def problem(program: str) -> str | None:
    """Makes the image; returns why containers cannot run here, as far as an image is needed to know."""
    subprocess.run([program, "rmi", "--force", NAME], capture_output=True, check=False)  # it would stay, without a name
    packed = subprocess.run([program, "import", "-", NAME], input=_root(), capture_output=True, check=False)
    if packed.returncode:
        return f"{program} cannot import an image: {packed.stderr.decode(errors='replace').strip()[-300:]}"
    try:
        asyncio.run(_start(program))
    except SandboxUnavailable as error:
        return f"{program} cannot run containers with limits here: {error}"
    return None


async def _start(program: str) -> None:
    async with sandbox(program, SandboxSpec(image=NAME)):
        pass


def _root() -> bytes:
    """A root file system as a tar archive: a shell, coreutils, tar, ps and Python, with their libraries."""
    packed = io.BytesIO()
    files: set[Path] = set()
    for name in PROGRAMS.split():
        if found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin"):
            files |= {Path(found), Path(found).resolve(), *_libraries(found)}
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for folder, mode in FOLDERS.items():
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for top in ("/bin", "/sbin", "/lib", "/lib64"):
            if Path(top).is_symlink():
                archive.add(top, recursive=False)
        above = {folder for file in files for folder in file.parents if len(folder.parts) > 1}
        for path in (*sorted(above), *sorted(files)):
            archive.add(path, recursive=False)
        for folder in glob.glob("/usr/lib/python3.*"):  # noqa: PTH207
            archive.add(folder, filter=_no_bytecode)
    return packed.getvalue()


def _libraries(program: str) -> set[Path]:
    """With the names by which they are found, and what those lead to."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    named = {Path(word) for word in listed.split() if word.startswith("/")}
    machine = sysconfig.get_config_var("MULTIARCH") or ""
    named |= {Path(one) for one in glob.glob(f"/usr/lib/{machine}/libffi.so*")}  # noqa: PTH207
    real = {Path("/usr") / str(one).lstrip("/") if not str(one).startswith("/usr") else one for one in named}
    return {path for one in real if one.exists() for path in (one, one.resolve())}


def _no_bytecode(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    skipped = ("__pycache__", "dist-packages", "/test")
    return None if any(part in entry.name for part in skipped) else entry
