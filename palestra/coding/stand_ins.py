"""Stand-ins for installers that a test script calls: they install nothing, and say what is missing.

A test script in Harbor's usual form installs uv from the network and runs pytest by it; with these, it runs the pytest
that the sandbox has.
"""

from __future__ import annotations

from palestra.coding.work import LOGS, TESTS
from palestra.sandbox import Sandbox, SandboxError

FOLDER = f"{TESTS}/.stand-ins"
MISSING = f"{LOGS}/missing.txt"
NAMES = ("apt", "apt-get", "curl", "pip", "pip3", "uv", "uvx", "wget")
CALL = f'#!/bin/sh\nexec python3 {FOLDER}/stand_in.py "${{0##*/}}" "$@"\n'
RUN_PYTEST = "import sys\n\nimport pytest\n\nsys.exit(pytest.main(sys.argv[1:]))\n"
STAND_IN = f'''"""Does for an installer what can be done without a network."""

import importlib.metadata
import os
import re
import sys

VALUED = {{"-p", "--python", "-w", "--with", "--from", "--index-url", "-r"}}


def need(requirements):
    missing = []
    for one in requirements:
        name = re.split("[^A-Za-z0-9._-]", one)[0]
        try:
            if name and name != "pytest-json-ctrf":
                importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        with open("{MISSING}", "a") as file:
            print(*missing, file=file)
        sys.exit(f"not installed in this sandbox, which has no network: {{', '.join(missing)}}")


def split(args):
    """Returns the packages that options name, and the words after the options."""
    packages, place = [], 0
    while place < len(args) and args[place].startswith("-"):
        option, is_joined, value = args[place].partition("=")
        if option in VALUED and not is_joined:
            place += 1
            value = args[place]
        if option in ("-w", "--with"):
            packages += value.split(",")
        place += 1
    return packages, args[place:]


def run(args):
    packages, command = split(args)
    if not command:
        return
    name, *rest = command
    if name.split("@")[0].split("=")[0] == "pytest":
        need(["pytest", *packages])
        if "--ctrf" in rest:
            del rest[rest.index("--ctrf") : rest.index("--ctrf") + 2]
        os.execvp("python3", ["python3", "{FOLDER}/run_pytest.py", *rest])
    need(packages)
    os.execvp(name, command)


name, args = sys.argv[1], sys.argv[2:]
if name == "uv" and args[:2] == ["tool", "run"]:
    run(args[2:])
elif name == "uvx" or (name == "uv" and args[:1] == ["run"]):
    run(args if name == "uvx" else args[1:])
elif "install" in args[:2] and name.startswith(("pip", "uv")) or args[:1] == ["add"]:
    need([one for one in args if not one.startswith("-") and one not in ("pip", "install", "add")])
'''
BEFORE = f'mkdir -p "$HOME/.local/bin" && : > "$HOME/.local/bin/env"; PATH={FOLDER}:$PATH exec "$@"'
"""The shell's words before a command for which the stand-ins are there; some scripts read a file of uv's own."""


async def put_stand_ins(sandbox: Sandbox) -> None:
    """Puts the programs in. Raises SandboxError."""
    await sandbox.write(f"{FOLDER}/stand_in.py", STAND_IN.encode())
    await sandbox.write(f"{FOLDER}/run_pytest.py", RUN_PYTEST.encode())
    await sandbox.write(f"{FOLDER}/call", CALL.encode())
    done = await sandbox.exec(
        f"cd {FOLDER} && chmod 755 call && for name in {' '.join(NAMES)}; do ln -s call $name; done"
    )
    if done.status:
        raise SandboxError(f"stand-ins for installers cannot be put in: {done.stderr.decode(errors='replace')[:200]}")


async def missing_packages(sandbox: Sandbox) -> str | None:
    """Returns the packages that a script wanted and that are not there; None: there were none."""
    try:
        return " ".join((await sandbox.read(MISSING)).decode(errors="replace").split())
    except SandboxError:
        return None
