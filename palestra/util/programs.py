"""Programs of the machine that parts of Palestra and of its tests call: where they are, and how to get them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

ADMIN_FOLDERS = "/usr/sbin:/sbin"
"""Daemons are here, which is not in every user's PATH."""
EMULATORS = ("qemu-x86_64-static", "qemu-aarch64-static")


@dataclass(frozen=True, slots=True)
class MachineProgram:
    name: str
    commands: tuple[str, ...]
    """Any of these is it."""
    used_for: str
    install: str
    """What to type on Debian and Ubuntu; elsewhere packages have similar names."""

    def find(self) -> str | None:
        folders = os.pathsep.join((os.environ.get("PATH", os.defpath), ADMIN_FOLDERS))
        return next((path for one in self.commands if (path := shutil.which(one, path=folders))), None)

    def missing(self) -> str | None:
        """Returns that it is not installed, and the command that installs it; None: it is."""
        return None if self.find() else f"{self.name} is not installed ({self.install})"


def _program(name: str, used_for: str, *commands: str, install: str | None = None) -> MachineProgram:
    return MachineProgram(name, commands or (name,), used_for, install or f"apt-get install {name}")


PROGRAMS = {
    one.name: one
    for one in (
        _program("bubblewrap", "sandboxes of this machine: agents, verifiers, models' programs", "bwrap"),
        _program("git", "coding tasks: what an agent has changed"),
        _program("docker", "sandboxes with images, for tasks that bring one", install="apt-get install docker.io"),
        _program("podman", "sandboxes with images, without a daemon"),
        _program("ssh", "sandboxes on other machines", install="apt-get install openssh-client"),
        _program("ray", "workers and gym servers on several machines", install="pip install 'palestra[ray]'"),
        _program("psql", "a look into a PostgreSQL database", install="apt-get install postgresql-client"),
        _program("nvidia-smi", "the NVIDIA driver", install="install the driver of your card"),
        _program("chromium", "tests of pages", "chromium", "chromium-browser", "google-chrome"),
        _program("postgres", "tests of databases", "postgres", "pg_ctlcluster", install="apt-get install postgresql"),
        _program("nginx", "tests behind a proxy"),
        _program("sshd", "tests of sandboxes on other machines", install="apt-get install openssh-server"),
        _program(
            "qemu", "tests of programs for other processors", *EMULATORS, install="apt-get install qemu-user-static"
        ),
        _program("openssl", "tests of encrypted connections"),
        _program("curl", "the example without Python"),
        _program("jq", "the example without Python"),
    )
}


def missing(*names: str) -> str | None:
    """Returns the first of these programs that is not installed, with the command that installs it; None: all are."""
    return next((text for name in names if (text := PROGRAMS[name].missing())), None)
