"""The unit under a real systemd, in a container of systemd-nspawn: started, tried, restarted, stopped."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checks.base import DEPLOY, CheckFailed, CheckSkipped, Workplace, free_port, need, need_root, run, smoke
from checks.image import RELEASE

PACKAGES = "systemd,systemd-sysv,dbus,python3"
START_S = 300.0
LOOK_EVERY_S = 0.5
UNIT = "palestra.service"


def check_machine(work: Workplace) -> str:
    need_root()
    need("mmdebstrap", "mmdebstrap")
    nspawn, enter = need("systemd-nspawn", "systemd-container"), need("nsenter", "util-linux")
    if not (programs := work.path("programs") / "palestra").is_dir():
        raise CheckSkipped("it takes its programs from the engine's image, and there is none")
    root, port = _root(work), free_port()
    (root / "etc/palestra/serve.yaml").write_text(f"port: {port}\nmodels: [{{path: ephebe, threads: 1}}]\n")
    (root / "etc/palestra/serve.yaml").chmod(0o600)
    boot = (
        nspawn,
        "--directory",
        root,
        "--boot",
        "--register=no",
        "--keep-unit",
        f"--bind-ro={programs}:/opt/palestra",
    )
    with _booted([str(word) for word in boot], work.path("machine.log")) as leader:
        inside = (enter, "--target", str(leader), "--all")
        _wait_until_active(inside)
        result = smoke(port, "--restart", " ".join((*inside, "systemctl", "restart", UNIT)))
        facts = run(*inside, "systemctl", "show", UNIT, "--property=User,DynamicUser,NRestarts,Result")
    if "Result=success" not in facts or "DynamicUser=yes" not in facts:
        raise CheckFailed(f"the unit is not well: {facts}")
    return f"under systemd, as a user of its own; {result}"


def _root(work: Workplace) -> Path:
    root = work.path("machine")
    if not (root / "etc").is_dir():
        shutil.rmtree(root, ignore_errors=True)
        run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, root)
    for folder in ("etc/palestra", "opt/palestra", "etc/systemd/system/multi-user.target.wants"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("var/lib/private", "var/cache/private"):
        shutil.rmtree(root / folder, ignore_errors=True)
    units = root / "etc/systemd/system"
    shutil.copy(DEPLOY / UNIT, units / UNIT)
    wanted = units / "multi-user.target.wants" / UNIT
    wanted.unlink(missing_ok=True)
    wanted.symlink_to(f"/etc/systemd/system/{UNIT}")
    return root


@contextmanager
def _booted(command: list[str], log: Path) -> Iterator[int]:
    """Yields the number of the first process of the machine."""
    with log.open("wb") as out, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as machine:
        try:
            yield _leader(machine, log)
        finally:
            machine.terminate()  # it halts the machine
            machine.wait()


def _leader(machine: subprocess.Popen[bytes], log: Path) -> int:
    children, until = Path(f"/proc/{machine.pid}/task/{machine.pid}/children"), time.monotonic() + START_S
    while time.monotonic() < until and machine.poll() is None:
        for child in children.read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                return int(child)
        time.sleep(LOOK_EVERY_S)
    raise CheckSkipped(f"systemd-nspawn cannot boot a machine here: {log.read_text(errors='replace')[-300:]}")


def _wait_until_active(inside: tuple[str, ...]) -> None:
    until, state = time.monotonic() + START_S, ""
    while time.monotonic() < until:
        done = subprocess.run([*inside, "systemctl", "is-active", UNIT], capture_output=True, text=True, check=False)
        state = done.stdout.strip()
        if state == "active":
            return
        if state == "failed":
            break
        time.sleep(LOOK_EVERY_S)
    raise CheckFailed(f"the unit is {state or 'unknown'}: {run(*inside, 'journalctl', '--no-pager', '--unit', UNIT)}")
