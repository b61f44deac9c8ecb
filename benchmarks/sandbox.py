"""Sandboxes of the backend local: how many are started, used and removed in a second, what a thousand of them hold, and
how many programs are graded in them in a second, beside the processes that only compute.

    make bench BENCH=sandbox            # all of it
    make bench BENCH=sandbox ARGS="--alive 100 --seconds 3"

Memory is the proportional set size (PSS) of all processes that belong to the sandboxes, and beside it what the kernel
itself holds more than before (slabs, stacks, page tables, files in memory), on a machine where nothing else happens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import time
from pathlib import Path

import psutil

from palestra.gym.grading.programs import Program, sandbox_named
from palestra.sandbox import SandboxSpec, backend, sandbox

MIB = 1024 * 1024
KERNEL = ("Slab", "KernelStack", "PageTables", "Percpu", "Shmem")


async def turnover(seconds: float, at_once: int) -> tuple[float, float]:
    """Returns sandboxes a second, each started, used for one command and removed, and seconds of CPU for each."""
    deadline, done, cpu_s = time.monotonic() + seconds, 0, _cpu_s()

    async def one_after_another() -> None:
        nonlocal done
        while time.monotonic() < deadline:
            async with sandbox("local", SandboxSpec()) as box:
                assert (await box.exec("echo used")).text == "used\n"
            done += 1

    begin = time.monotonic()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return done / (time.monotonic() - begin), (_cpu_s() - cpu_s) / done


async def graded(name: str | None, seconds: float, at_once: int) -> tuple[float, float]:
    """Returns programs a second, and seconds of CPU for each."""
    programs, deadline, done, cpu_s = sandbox_named(name, at_once), time.monotonic() + seconds, 0, _cpu_s()

    async def one_after_another() -> None:
        nonlocal done
        while time.monotonic() < deadline:
            (outcome,) = await programs.run(Program(source="print(int(input()) + 1)", inputs=["41"]))
            assert outcome.printed == "42\n", outcome
            done += 1

    begin = time.monotonic()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return done / (time.monotonic() - begin), (_cpu_s() - cpu_s) / done


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


async def alive(count: int, at_once: int) -> tuple[float, float, float]:
    """Starts that many and uses each once; returns MiB by PSS, MiB of the kernel, and seconds it took."""
    kernel, own, begin = _kernel(), psutil.Process(), time.monotonic()
    before = own.memory_full_info().pss
    gate = asyncio.Semaphore(at_once)
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> None:
            async with gate:
                box = await stack.enter_async_context(sandbox("local", SandboxSpec()))
                assert (await box.exec("echo used")).text == "used\n"

        await asyncio.gather(*(start() for _ in range(count)))
        took_s = time.monotonic() - begin
        pss = own.memory_full_info().pss - before
        pss += sum(_pss(one) for one in own.children(recursive=True))
        return pss / MIB, _kernel() - kernel, took_s


def _kernel() -> float:
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return sum(int(fields[1]) for fields in lines if fields[0].rstrip(":") in KERNEL) / 1024


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for starting and removing")
    parser.add_argument("--at-once", type=int, default=2, help="how many are started at the same time")
    parser.add_argument("--alive", type=int, default=1000, help="how many are alive at once")
    args = parser.parse_args()
    if problem := backend("local").problem():
        raise SystemExit(problem)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rate, cpu_s = asyncio.run(turnover(args.seconds, args.at_once))
    print(
        f"started, used and removed: {rate:.1f} a second on {psutil.cpu_count()} cores, {cpu_s:.3f} s of CPU for each"
    )
    for title, name in (("processes that only compute", None), ("sandboxes of their own", "local")):
        rate, cpu_s = asyncio.run(graded(name, args.seconds, args.at_once))
        print(f"programs graded in {title}: {rate:.1f} a second, {cpu_s:.3f} s of CPU for each")
    pss, kernel, took_s = asyncio.run(alive(args.alive, args.at_once))
    print(f"{args.alive} alive at once: {pss:.0f} MiB (PSS) and {kernel:.0f} MiB of the kernel, after {took_s:.0f} s")


if __name__ == "__main__":
    main()
