"""How fast episodes are registered, claimed and ended over HTTP, each durable on disk before it is answered.

    python benchmarks/episodes.py --quick
    python benchmarks/episodes.py --queued 0,100000 --json
    python benchmarks/episodes.py --lightning .venv-lightning/bin/agl    # beside Agent Lightning's store
    python benchmarks/episodes.py --database postgresql://palestra@/palestra
    python benchmarks/episodes.py --peer-url http://127.0.0.1:8001 --peer-pid 4711    # beside another version of ours

Owns: the rows, their work and targets. Never touches: requests (`peers/episode_load.py`), processes
(`peers/tinker_server.py`), who runs when (`peers/api_contest.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness import (
    Measure,
    Progress,
    Report,
    Row,
    argument_parser,
    machine,
    positive,
    program_of,
    report,
    some_of,
    versions,
)
from peers.api_contest import Case, Contest, Figure, Run, Site
from peers.episode_load import AnyLoad, EpisodeLoad, Load, Played
from peers.lightning_load import LightningLoad, lightning_server
from peers.tinker_server import OurServer, Processes, our_server

T = TypeVar("T")

PACKAGES = ("palestra", "uvicorn", "uvloop", "fastapi", "sqlalchemy")
MODEL = "ephebe"  # bundled; it idles meanwhile
QUEUED = ("0", "1000", "100000")
SECONDS, QUICK_SECONDS = 4.0, 1.0
BATCH = 64
PEERS = {
    "0": {"1 worker": ("AgentJet, in memory", 116.0), "64 workers": ("AgentJet, in memory", 115.0)},
    "1000": {"1 worker": ("agent-lightning 0.3, in memory", 27.0)},
}
"""Cycles a second of the fastest in shared/peers.md, by what is queued."""
PEER_CPU_MS = ("agent-lightning 1.0, in memory", 3.6)
CALLS = ("claim", "register", "end")
MOST_OF_LIGHTNING = 1000  # queued: it looks through them


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    workers: int
    batch: int = 1
    cycles_per_s: float | None = None
    """None: as fast as they are answered."""
    of_lightning: float | None = None
    """How many times its cycles a second ours have to be: durable, beside a store in memory."""
    claim_ms: float | None = None
    """p95."""


PACE = 200.0
WORKS = (
    Work("1 worker", 1, of_lightning=1.0),
    Work("64 workers", 64, of_lightning=4.0),
    Work("64 workers, paced", 64, cycles_per_s=PACE, claim_ms=30),
    Work(f"1 worker, calls of {BATCH}", 1, BATCH),
    Work(f"64 workers, calls of {BATCH}", 64, BATCH),
)


def cycles(name: str, work: Work, queued: str) -> Run:
    """Registers, claims and ends for some seconds; what is queued stays as much."""

    def run(site: Site) -> dict[str, float]:
        client: AnyLoad = site.client
        client.queue(int(queued))
        load = Load(work.workers, work.batch, QUICK_SECONDS if site.quick else SECONDS, work.cycles_per_s)
        cpu = site.processes.own_cpu_s() if site.processes is not None else 0.0
        played = client.play(load)
        figures = {name: played.cycles / played.took_s} | _latencies(name, played)
        figures[f"{name}: client CPU"] = 1000 * played.client_cpu_s / played.cycles
        if site.processes is not None:
            figures[f"{name}: server CPU"] = 1000 * (site.processes.own_cpu_s() - cpu) / played.cycles
        return figures

    return run


def _latencies(name: str, played: Played) -> dict[str, float]:
    figures: dict[str, float] = {}
    for call, took in played.calls.items():
        hundredths = statistics.quantiles(took, n=100) if len(took) > 1 else took * 99
        figures[f"{name}: {call} p50"], figures[f"{name}: {call} p95"] = 1000 * hundredths[49], 1000 * hundredths[94]
    return figures


def case(work: Work, queued: str, *, is_beside_lightning: bool) -> Case:
    name = f"{work.name}, {int(queued):,} queued"
    ratio = work.of_lightning if is_beside_lightning else None
    figures = [
        Figure(name, "cycles/s", target_ratio=ratio, known=_of_all(PEERS.get(queued, {}).get(work.name))),
        less(f"{name}: server CPU", "ms/cycle", known=PEER_CPU_MS if work.batch == 1 else None),
        less(f"{name}: client CPU", "ms/cycle"),
    ]
    for call in CALLS:
        most = work.claim_ms if call == "claim" else None
        figures += [less(f"{name}: {call} p50", "ms"), less(f"{name}: {call} p95", "ms", most)]
    return Case(name, cycles(name, work, queued), tuple(figures), shapes=("",))


def less(what: str, unit: str, target: float | None = None, known: tuple[str, float] | None = None) -> Figure:
    return Figure(what, unit, less_is_better=True, targets=_of_all(target), known=_of_all(known))


def _of_all(value: T | None) -> dict[str, T]:
    """There are no shapes here."""
    return {} if value is None else {"": value}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("episodes", "Register, claim and end over HTTP, durable on disk.")
    known = ", ".join(QUEUED)
    parser.add_argument(
        "--queued", type=some_of("queue", QUEUED), metavar="N,…", help=f"only with so many queued ({known})"
    )
    parser.add_argument("--database", metavar="URL", help="an empty one for our server  [SQLite in a scratch folder]")
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="on the disk to be measured  [the system's]")
    parser.add_argument(
        "--lightning", type=program_of("lightning"), metavar="AGL", help="Agent Lightning's command (make lightning)"
    )
    parser.add_argument("--peer-pid", type=positive, metavar="PID", help="of the peer's HTTP process")
    parser.add_argument(
        "--palestra",
        type=Path,
        default=Path(sys.executable).with_name("palestra"),
        metavar="FILE",
        help="the command to start ours with  [the one beside this Python]",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace, progress: Progress) -> tuple[Report, bool]:
    queued = args.queued or (QUEUED[:2] if args.quick else QUEUED)
    works = [work for work in WORKS if not (args.quick and work.cycles_per_s)]
    notes, is_beside_lightning = _notes(args), args.lightning is not None and not args.peer_url
    with tempfile.TemporaryDirectory(prefix="palestra-bench-", dir=args.scratch) as scratch:
        settings = [f"database={args.database}"] if args.database else []
        with our_server(args.palestra, MODEL, Path(scratch), *settings) as server, _lightning(args) as lightning:
            sites = [_site("ours", server.url, args, server)]
            if args.peer_url:
                sites.append(_site(args.peer_url, args.peer_url, args, None))
            contest = Contest([*sites, *lightning], args.rounds, progress, notes)
            alone = Contest(sites, args.rounds, progress, notes)
            rows: list[Row] = []
            for n in queued:
                in_it = contest if int(n) <= MOST_OF_LIGHTNING else alone
                rows += [
                    row for work in works for row in in_it.run(case(work, n, is_beside_lightning=is_beside_lightning))
                ]
            rows += _with_a_queue(sites[0], server, queued[-1])
        with our_server(args.palestra, MODEL, Path(scratch), *settings) as server:
            rows.append(_row(f"start to ready, {int(queued[-1]):,} queued", "s", server.ready_s))
    return Report("episodes", machine(), versions(PACKAGES), rows, notes), not (contest.has_failed or alone.has_failed)


def _site(name: str, url: str, args: argparse.Namespace, server: OurServer | None) -> Site:
    load = EpisodeLoad(url, f"bench-{uuid.uuid4().hex[:8]}")
    processes = server.processes if server else Processes(args.peer_pid) if args.peer_pid else None
    return Site(name, load, "", args.quick, server, processes, server and server.processes.memory_gb())


@contextlib.contextmanager
def _lightning(args: argparse.Namespace) -> Iterator[list[Site]]:
    if args.lightning is None:
        yield []
        return
    with lightning_server(args.lightning) as (url, processes):
        yield [Site("agent-lightning, in memory", LightningLoad(url), "", args.quick, None, processes)]


def _with_a_queue(site: Site, server: OurServer, queued: str) -> list[Row]:
    """What a long queue costs beside the calls."""
    site.client.queue(int(queued))
    assert site.ready_gb is not None
    start = time.perf_counter()
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        answer.read()
    scrape_ms = 1000 * (time.perf_counter() - start)
    suffix = f", {int(queued):,} queued"
    more_gb = server.processes.memory_gb() - site.ready_gb
    return [_row(f"memory since the start{suffix}", "GB", more_gb), _row(f"a scrape{suffix}", "ms", scrape_ms)]


def _row(what: str, unit: str, value: float) -> Row:
    return Row(what, unit, Measure((value,)), less_is_better=True)


def _notes(args: argparse.Namespace) -> list[str]:
    notes = [
        "a cycle is an episode registered (a group of one), claimed and ended, each on disk when it is answered",
        f"calls of {BATCH}: as many episodes in each; paced: {PACE:g} cycles/s in all, evenly",
        "client and server share the cores; server CPU is of the process that speaks HTTP, its writer thread included",
    ]
    if args.lightning:
        notes.append("agent-lightning keeps everything in memory, and ends one by one: it has no call for several")
    if not args.peer_url and not args.lightning:
        notes.append('"not of this run": peers of shared/peers.md, on another machine and without a disk')
    if args.database:
        notes.append("the database's own processes are not in the server's CPU")
    if args.quick:
        notes.append("--quick: less work and few rounds; targets are meant for the full run")
    return notes


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not args.palestra.is_file():
        print(f"no command {args.palestra}; say where it is with --palestra FILE", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our server is stopped too
    progress = Progress()
    try:
        result, ok = run(args, progress)
    finally:
        progress.done()
    report(result, json_line=args.json)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
