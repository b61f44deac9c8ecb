"""How fast the local platform is: in process, over MCP, over Fleet's REST API, and how much memory instances take.

    python benchmarks/local_platform.py --quick
    python benchmarks/local_platform.py --openenv-python .venv-openenv/bin/python --json

Owns: the rows, their work and targets. Never touches: sockets and processes (`peers/platform_load.py`), peers
(`peers/mcp_server.py`, `peers/openenv_peer.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from harness import Measure, Progress, Report, Row, argument_parser, machine, positive, program_of, report, versions
from peers.platform_load import AUTH, Served, ask, platform_command, request, served, take, tool_request

from palestra.environments.fleet.env import FleetTaskEnv
from palestra.environments.platform import APPS, Instance, PlatformTask, make_task, verify
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.seeds import seed_named

PACKAGES = ("palestra", "uvicorn", "uvloop", "httptools", "msgspec", "mcp")
PEERS = Path(__file__).parent / "peers"
ROUNDS, QUICK_ROUNDS = 5, 3
SECONDS, QUICK_SECONDS = 4.0, 1.0
CLIENTS = 32
LIVE, QUICK_LIVE = 10_000, 2_000
PLAYED = {"keys": ("keys-by_verb-0c-7", "list"), "mail": ("mail-mark_read-0-7", "search_messages")}
"""For each app: a task, whose last call writes and can be repeated; and a tool that reads."""
WRITE = ("set", {"name": "a", "value": 3})  # takes no more room however often it is said
MCP_PEER, OPENENV_PEER = "mcp, stateless, JSON", "OpenEnv"


def timed(work: Callable[[], object], count: int) -> float:
    """Median in milliseconds."""
    taken: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def row(what: str, values: list[float], target: float | None = None, unit: str = "ms", **more: Any) -> Row:
    return Row(what, unit, Measure(tuple(values)), target_value=target, less_is_better=unit != "calls/s", **more)


# In process


def in_process(app: str, rounds: int, count: int) -> list[Row]:
    key, reading = PLAYED[app]
    task = make_task(key)
    played = Instance(task.seed)
    golden = play_golden(task, played)
    tool, arguments = WRITE if app == "keys" else (golden.steps[-1][0].tool, golden.steps[-1][0].arguments)
    warm = Instance(task.seed)
    works: dict[str, tuple[Callable[[], object], float | None]] = {
        "instance create": (lambda: Instance(task.seed).close(), 0.5),
        "create and first call": (lambda: called(Instance(task.seed), reading, {}), None),
        "tool call that reads, p50": (lambda: called(warm, reading, {}), 0.15),
        "tool call that writes, p50": (lambda: called(warm, tool, arguments), 0.15),
        "verifier": (lambda: judged(task, played, golden.answer), 2.0),
        "snapshot": (warm.snapshot, None),
        "reset": (warm.reset, 0.3),
    }
    found = [
        row(f"{app}: {what}", [timed(work, count) for _ in range(rounds)], target)
        for what, (work, target) in works.items()
    ]
    return [
        *found,
        row(f"{app}: FleetTaskEnv init_async", [whole_init(app, key, count // 10) for _ in range(rounds)], 5.0),
    ]


def called(instance: Instance, tool: str, arguments: dict[str, Any]) -> None:
    result = instance.call(tool, arguments)
    if result.is_error:
        raise RuntimeError(f"what is measured does not work: {result.text}")


def judged(task: PlatformTask, instance: Instance, answer: str | None) -> None:
    if verify(task, instance, answer).score != 1.0:
        raise RuntimeError(f"the solution of {task.key} is not worth 1")


def whole_init(app: str, key: str, count: int) -> float:
    async def measured() -> float:
        taken: list[float] = []
        for _ in range(count):
            env = FleetTaskEnv({"tasks_file": f"platform:{app}"}, {"task_key": key})
            began = time.perf_counter()
            await env.init_async([])
            taken.append(1000 * (time.perf_counter() - began))
            await env.close_async()
        return statistics.median(taken)

    return asyncio.run(measured())


# Over HTTP


def made(server: Served, app: str = "keys") -> str:
    """Where its tools are."""
    answer: Any = ask(server.url, request("POST", f"{server.url}/v1/env/instances", {"env_key": app}, AUTH))
    return answer["urls"]["root"] + "mcp"


def over_http(ours: Served, peer: Served | None, rounds: int, seconds: float) -> list[Row]:
    """A B A B: ours, then the official server."""
    clients = {"1 client": 1, f"{CLIENTS} clients": CLIENTS}
    figures: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, count in clients.items():
            urls = [made(ours) for _ in range(count)]
            sides = {"ours": (ours, [tool_request(url, *WRITE) for url in urls])}
            if peer is not None:
                sides["peer"] = (peer, [tool_request(peer.url, *WRITE)] * count)
            for side, (server, requests) in sides.items():
                taken = take(server, requests, seconds)
                figures.setdefault(f"{name} p50", {}).setdefault(side, []).append(statistics.median(taken.latencies_ms))
                figures.setdefault(f"{name}, rate", {}).setdefault(side, []).append(taken.per_second)
                figures.setdefault(f"{name}, server CPU", {}).setdefault(side, []).append(taken.server_cpu_ms)
    targets = {"1 client p50": 1.5, f"{CLIENTS} clients, rate": 1500.0}
    return [
        row(
            f"MCP tool call, {what}",
            sides["ours"],
            targets.get(what),
            "calls/s" if "rate" in what else "ms",
            peer=MCP_PEER if peer else None,
            peer_value=Measure(tuple(sides["peer"])) if peer else None,
        )
        for what, sides in figures.items()
    ]


def rest(ours: Served, rounds: int, seconds: float) -> list[Row]:
    create = request("POST", f"{ours.url}/v1/env/instances", {"env_key": "keys"}, AUTH)
    taken = [take(ours, [create], seconds / 2, is_same=False) for _ in range(rounds)]
    return [
        row("keys: instance create over REST", [statistics.median(one.latencies_ms) for one in taken], 3.0),
        row("keys: instance create over REST, server CPU", [one.server_cpu_ms for one in taken]),
    ]


def openenv(python: Path, seconds: float, server: Served | None = None) -> Measure:
    """OpenEnv's own client at our server, or at its own."""
    command = [python, PEERS / "openenv_peer.py", str(seconds)]
    if server is not None:
        command += [f"{server.url}/openenv/keys", str(server.process.pid)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return Measure(tuple(json.loads(ran.stdout.splitlines()[-1])["server_cpu_ms"]))


# Memory


def live(count: int, calls: int) -> float:
    """GiB that so many live instances take, in a process of their own."""
    command = [sys.executable, __file__, "--hold", str(count), "--calls", str(calls)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout)


def hold(count: int, calls: int) -> float:
    seed = seed_named(APPS["keys"], "small-0")
    before = psutil.Process().memory_info().rss
    kept = [Instance(seed) for _ in range(count)]
    for instance in kept:
        for value in range(calls):
            called(instance, "put", {"value": value})
    return (psutil.Process().memory_info().rss - before) / 2**30


def memory(count: int) -> list[Row]:
    return [
        row(f"{count:,} live instances, {what}", [live(count, calls)], 1.5 * count / LIVE, "GiB")
        for what, calls in (("none called yet", 0), ("each called 3 times", 3))
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("local_platform", "Instances, tool calls, verdicts: in process, over MCP and REST.")
    peer = "a Python that has openenv (make clients), to run beside"
    parser.add_argument("--openenv-python", type=program_of("clients"), metavar="FILE", help=peer)
    parser.add_argument("--hold", type=positive, help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, progress: Progress) -> Report:
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    seconds, count = (QUICK_SECONDS, 300) if args.quick else (SECONDS, 2000)
    notes = [
        "client and server share the cores; a peer's tool writes to a dict or list, ours to its database",
        "every answer is checked: a refusal would be faster",
    ]
    rows: list[Row] = []
    for app in PLAYED:
        progress.doing(f"{app} in process")
        rows += in_process(app, rounds, count)
    progress.doing("over HTTP")
    with (
        tempfile.TemporaryDirectory(prefix="palestra-bench-") as scratch,
        served(platform_command(Path(scratch))) as ours,
    ):
        rows += rest(ours, rounds, seconds)
        with served([sys.executable, str(PEERS / "mcp_server.py")]) as peer:
            time.sleep(1)  # it says where before it is there
            rows += over_http(ours, peer, rounds, seconds)
        if args.openenv_python:
            progress.doing("OpenEnv")
            both = (openenv(args.openenv_python, seconds, ours), OPENENV_PEER, openenv(args.openenv_python, seconds))
            rows.append(Row("tool call of OpenEnv's client, server CPU", "ms", *both, less_is_better=True))
            notes.append("OpenEnv's server runs after ours, not in turns with it; CPU only: its calls mostly wait here")
        else:
            notes.append("OpenEnv: not available (--openenv-python)")
    progress.doing("memory")
    return Report(
        "local_platform", machine(), versions(PACKAGES), rows + memory(QUICK_LIVE if args.quick else LIVE), notes
    )


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.hold:
        print(hold(args.hold, args.calls))
        return 0
    progress = Progress()
    try:
        result = run(args, progress)
    finally:
        progress.done()
    report(result, json_line=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
