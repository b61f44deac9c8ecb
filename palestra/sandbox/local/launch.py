"""The helper that becomes bubblewrap, after it has left behind another helper that finishes the sandbox.

It imports the standard library only, reads one order from its control socket, and sends back descriptors or a line
that says what failed.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
from typing import Any

from palestra.sandbox import first_process
from palestra.sandbox.local import namespaces as ns

SCRATCH = "/.scratch"
MODES = {"/tmp": 0o1777, "/dev/shm": 0o1777}


def read_order(control: socket.socket) -> dict[str, Any]:
    with control.makefile("rb") as stream:
        return json.loads(stream.readline())


def prepare(order: dict[str, Any]) -> None:
    """Sets what processes of the sandbox inherit: their cores, and their place before the OOM killer."""
    ns.be_first_to_go()
    os.sched_setaffinity(0, order["cores"])


def main(control: socket.socket, _: int) -> None:
    order = read_order(control)
    info, info_for_bwrap = os.pipe()
    ready, ready_for_bwrap = os.pipe()
    bwrap = os.pidfd_open(os.getpid())
    filter_for_bwrap = _filled(bytes.fromhex(order["filter"]))
    if os.fork() == 0:
        if os.fork() == 0:
            os.close(info_for_bwrap)
            os.close(ready_for_bwrap)
            _finish_and_exit(order, control, info, ready, bwrap)
        os._exit(0)
    os.wait()
    control.close()
    prepare(order)
    if order["cgroup"]:
        with open(order["cgroup"], "wb", buffering=0) as members:
            members.write(b"0")
    own = ["--info-fd", _passed(info_for_bwrap), "--seccomp", _passed(filter_for_bwrap)]
    for path, text in order["texts"].items():
        own += ["--file", _passed(_filled(text.encode())), path]
    own += ["--perms", "0555", "--file", _passed(_filled(first_process.executable())), first_process.PATH]
    ns.become(order["user"])
    os.dup2(ready_for_bwrap, 1)
    os.execve(order["bwrap"], [order["bwrap"], *own, *order["arguments"]], {})


def _passed(descriptor: int) -> str:
    os.set_inheritable(descriptor, True)
    return str(descriptor)


def _filled(data: bytes) -> int:
    """A pipe from which the data can be read; it is small enough for one."""
    readable, writable = os.pipe()
    os.write(writable, data)
    os.close(writable)
    return readable


def _finish_and_exit(order: dict[str, Any], control: socket.socket, info: int, ready: int, bwrap: int) -> None:
    try:
        os.closerange(0, 2)
        ns.become(order["user"])
        pid = _child(_read_all(info))
        process = _first_process(pid, ready, bwrap) if pid else None
        if pid is None or process is None:
            raise InterruptedError("")  # bubblewrap has said why, or was killed
        ns.hide()
        ns.enter_as_owner(pid)
        _mount(order)
        found = [process, os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)]
        if order["proxy_port"]:
            found.append(_listen(order["proxy_port"]).detach())
        control.sendmsg([b"{}\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", found))])
    except BaseException as error:  # boundary: the owner hears of everything
        with contextlib.suppress(OSError):  # the owner has ended
            control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        os.killpg(0, signal.SIGKILL)  # a child of bubblewrap that was killed would wait for it for ever
    os._exit(0)


def _child(info: bytes) -> int | None:
    """Returns the child of which bubblewrap told; None: it ended before it had."""
    try:
        return json.loads(info)["child-pid"]
    except ValueError:
        return None


def _first_process(pid: int, ready: int, bwrap: int) -> int | None:
    """Returns the sandbox's process 1 when it runs and bubblewrap still does; None: one of them ended before."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    events = select.poll()
    events.register(ready, select.POLLIN)
    events.register(process, select.POLLIN)
    events.register(bwrap, select.POLLIN)
    return process if list(dict(events.poll())) == [ready] and os.read(ready, 1) == b"\n" else None


def _read_all(descriptor: int) -> bytes:
    found = b""
    while more := os.read(descriptor, 4096):
        found += more
    return found


def _mount(order: dict[str, Any]) -> None:
    """All that is writable lies in one file system in memory, which has a size."""
    size = f"size={order['disk_bytes']},nr_inodes={order['files']},mode=0755"
    ns.mount("sandbox", SCRATCH, "tmpfs", ns.NO_SUID | ns.NO_DEVICES, size)
    mounted: list[str] = []
    for place, target in enumerate(sorted(order["writable"])):
        if any(target.startswith(f"{above}/") for above in mounted):
            os.makedirs(target, exist_ok=True)
            continue
        folder = f"{SCRATCH}/{place}"
        os.mkdir(folder)
        os.chmod(folder, MODES.get(target, 0o755))
        ns.mount(folder, target, None, ns.BIND)
        mounted.append(target)
    ns.unmount(SCRATCH)


def _listen(port: int) -> socket.socket:
    """A socket in the sandbox's network, at which the owner outside listens."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    found.listen(64)
    return found
