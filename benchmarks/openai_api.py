"""How fast the model endpoint is over HTTP, beside a second server given by URL (vLLM's, say).

    python benchmarks/openai_api.py --quick
    python benchmarks/openai_api.py --rows requests_64,stream_64 --json
    python benchmarks/openai_api.py --model FOLDER --peer-url http://127.0.0.1:8001 --peer-pid 4711

Owns: the rows, their work and targets. Never touches: requests (`peers/openai_client.py`), processes
(`peers/tinker_server.py`), who runs when (`peers/api_contest.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import Progress, Report, argument_parser, machine, positive, report, some_of, versions
from peers.api_contest import Case, Contest, Figure, Run, Site
from peers.openai_client import OpenAIClient
from peers.tinker_server import Processes, make_model, our_server

PACKAGES = ("palestra", "torch", "uvicorn", "fastapi")
SHAPE = "tiny"
TOKENS = 64  # in, and out
TURNS, TURN_TOKENS = 20, 16


def requests(what: str, n: int) -> Run:
    def run(site: Site) -> dict[str, float]:
        start = time.perf_counter()
        heard = site.client.complete(n, TOKENS, TOKENS)
        return {what: sum(one.tokens for one in heard) / (time.perf_counter() - start)}

    return run


def streams(n: int) -> Run:
    """The process that speaks HTTP alone: what streaming costs beside the computing."""

    def run(site: Site) -> dict[str, float]:
        cpu = site.processes.own_cpu_s() if site.processes is not None else 0.0
        start = time.perf_counter()
        heard = site.client.complete(n, TOKENS, TOKENS, stream=True)
        tokens = sum(one.tokens for one in heard)
        figures = {
            f"stream_{n}": tokens / (time.perf_counter() - start),
            f"stream_{n}, first token": 1000 * statistics.median(one.first_s for one in heard),
        }
        if site.processes is not None:
            figures[f"stream_{n}, server CPU a token"] = 1e6 * (site.processes.own_cpu_s() - cpu) / tokens
        return figures

    return run


def plain_cpu(site: Site) -> dict[str, float]:
    if site.processes is None:
        return {}
    cpu = site.processes.own_cpu_s()
    heard = site.client.complete(64, TOKENS, TOKENS)
    return {"server CPU a request": 1000 * (site.processes.own_cpu_s() - cpu) / len(heard)}


def turns(site: Site) -> dict[str, float]:
    """The median of the last five over that of the second to the sixth."""
    took = site.client.converse(TURNS, TURN_TOKENS)
    late, early = statistics.median(took[-5:]), statistics.median(took[1:6])
    return {"turn 16-20": 1000 * late, "turn 16-20 / turn 2-6": late / early}


def start(site: Site) -> dict[str, float]:
    return {"start": site.start_another()} if site.start_another else {}


def memory(site: Site) -> dict[str, float]:
    if site.processes is None:
        return {}
    loaded = {"memory, after load": site.processes.memory_gb()}
    return loaded if site.ready_gb is None else {"memory, ready": site.ready_gb} | loaded


def more(what: str, unit: str, target: float | None = None, known: float | None = None) -> Figure:
    return _figure(what, unit, target, known, less=False)


def less(what: str, unit: str, target: float | None = None, known: float | None = None) -> Figure:
    return _figure(what, unit, target, known, less=True)


def _figure(what: str, unit: str, target: float | None, known: float | None, *, less: bool) -> Figure:
    targets = {} if target is None else {SHAPE: target}
    knowns = {} if known is None else {SHAPE: ("vLLM 0.32 (CPU)", known)}
    return Figure(what, unit, less_is_better=less, targets=targets, known=knowns)


def stream_figures(n: int) -> tuple[Figure, ...]:
    return (
        more(f"stream_{n}", "tok/s"),
        less(f"stream_{n}, first token", "ms"),
        less(f"stream_{n}, server CPU a token", "µs"),
    )


CASES = (
    Case("start", start, (less("start", "s", 6, 35),), rounds=2, quick_rounds=1, warmups=0),
    Case("request_1", requests("request_1", 1), (more("request_1", "tok/s", 300, 94),), rounds=15, quick_rounds=4),
    Case("requests_64", requests("requests_64", 64), (more("requests_64", "tok/s", 2400, 954),), rounds=5),
    Case("requests_256", requests("requests_256", 256), (more("requests_256", "tok/s", 2800, 957),), quick_rounds=0),
    Case("cpu", plain_cpu, (less("server CPU a request", "ms"),), rounds=3),
    Case("stream_1", streams(1), stream_figures(1), rounds=15, quick_rounds=4),
    Case("stream_64", streams(64), stream_figures(64), rounds=5),
    Case(
        "turns",
        turns,
        (less("turn 16-20", "ms"), less("turn 16-20 / turn 2-6", "x", 1.3)),
        rounds=5,
        quick_rounds=2,
    ),
    Case(
        "memory",
        memory,
        (less("memory, ready", "GB", 0.6, 2.7), less("memory, after load", "GB")),
        rounds=1,
        warmups=0,
    ),
)
NAMES = tuple(case.name for case in CASES)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("openai_api", "Speed of the model endpoint over HTTP, beside a second server.")
    parser.add_argument("--rows", type=some_of("row", NAMES), metavar="NAME,…", help=f"only these ({', '.join(NAMES)})")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the model that the peer serves too  [a random one]"
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
    notes = ["client and server share the cores, the other server stands still; 64 token ids in, 64 out"]
    if not args.peer_url:
        notes.append('"not of this run": figures from shared/peers.md, on another machine; give --peer-url')
    if args.quick:
        notes.append("--quick: less work and few rounds; targets are meant for the full run")
    cases = [c for c in CASES if c.name in (args.rows or NAMES) and (args.rows or c.quick_rounds or not args.quick)]
    with tempfile.TemporaryDirectory(prefix="palestra-bench-") as scratch, contextlib.ExitStack() as stack:
        progress.doing("making the model")
        model = args.model or make_model(args.palestra, Path(scratch) / SHAPE, SHAPE)
        sites = [_ours(args, model, Path(scratch), stack)]
        if args.peer_url:
            processes = Processes(args.peer_pid) if args.peer_pid else None
            sites.append(Site(args.peer_url, _client(args.peer_url), SHAPE, args.quick, None, processes))
        contest = Contest(sites, args.rounds, progress, notes)
        rows = [row for case in cases for row in contest.run(case)]
    return Report("openai_api", machine(), versions(PACKAGES), rows, notes), not contest.has_failed


def _client(url: str) -> OpenAIClient:
    client = OpenAIClient(url)
    client.prepare()
    return client


def _ours(args: argparse.Namespace, model: Path, scratch: Path, stack: contextlib.ExitStack) -> Site:
    numbers = itertools.count()

    def start_another() -> float:
        with our_server(args.palestra, model, scratch / f"state-{next(numbers)}") as server:
            _client(server.url).complete(1, TOKENS, 1)
            return time.perf_counter() - server.started

    server = stack.enter_context(our_server(args.palestra, model, scratch / "state"))
    ready_gb = server.processes.memory_gb()
    return Site("ours", _client(server.url), SHAPE, args.quick, server, server.processes, ready_gb, start_another)


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
