"""How fast the server is through the official SDK, over a socket, beside a second server given by URL.

    python benchmarks/tinker_api.py --quick
    python benchmarks/tinker_api.py --shape tiny --rows forward_backward,tenants_16 --json
    python benchmarks/tinker_api.py --peer-url http://127.0.0.1:8001 --peer-pid 4711

Owns: the rows, their work and targets. Never touches: requests (`peers/tinker_client.py`), processes
(`peers/tinker_server.py`), who runs when (`peers/api_contest.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Progress, Report, Row, argument_parser, machine, positive, report, some_of, versions
from peers.api_contest import Case, Contest, Figure, Run, Site
from peers.tinker_client import TinkerClient
from peers.tinker_server import Processes, make_model, our_server

PACKAGES = ("palestra", "tinker", "torch")
SHAPES = ("tiny", "small")
CROWD = 10_000
LORA_RANK = 8  # as the peer's figures in shared/peers.md were taken


# The work. Each returns a value for each of its figures.


def seconds(what: str, work: Callable[[TinkerClient], float]) -> Run:
    return lambda site: {what: work(site.client)}


def start(site: Site) -> dict[str, float]:
    return {"start": site.start_another()} if site.start_another else {}


def optim_step(site: Site) -> dict[str, float]:
    site.client.forward_backward(1, 64)
    return {"optim_step": site.client.optim_step()}


def train_steps(site: Site) -> dict[str, float]:
    steps = 5 if site.quick else 20
    return {"train 1 x 64": steps / site.client.train(1, 1, 64, steps=steps)}


def tenants(n: int) -> Run:
    def run(site: Site) -> dict[str, float]:
        steps = 2 if site.quick else max(2, 32 // n)
        return {f"tenants_{n}": n * steps / site.client.train(n, 4, 64, steps=steps)}

    return run


def sampled(what: str, prompts: int, *, samples: int = 1) -> Run:
    """64 tokens in and 64 out."""

    def run(site: Site) -> dict[str, float]:
        return {what: prompts * samples * 64 / site.client.sample(prompts, 64, 64, samples=samples)}

    return run


def sample_single(site: Site) -> dict[str, float]:
    took = site.client.sample(1, 64, 64)
    return {"sample_single": took, "sample_1": 64 / took}


def crowd(site: Site) -> dict[str, float]:
    """Every answer is checked: this raises unless all of them are there and whole."""
    took = site.client.sample_crowd(CROWD, 16, 8)
    return {"crowd, answered": CROWD, "crowd, time": took}


def training_beside_sampling(site: Site) -> dict[str, float]:
    window, work = 8.0, (4, 64)
    steps_alone, _ = site.client.rates(window, train=work)
    _, tokens_alone = site.client.rates(window, samples_in_flight=16)
    steps, tokens = site.client.rates(window, train=work, samples_in_flight=16)
    train_share, sample_share = 100 * steps / steps_alone, 100 * tokens / tokens_alone
    return {
        "both: training's share": train_share,
        "both: sampling's share": sample_share,
        "both: sum of shares": train_share + sample_share,
    }


def sample_while_training(site: Site) -> dict[str, float]:
    n = 40
    idle = site.client.latencies(n)
    busy = site.client.latencies(n, train=(32, 256))
    figures = {"busy sample p95 / idle": p95(busy) / p95(idle), "busy sample p95": p95(busy)}
    if site.server is not None:  # no client sees single tokens: the worker's own measure, of the last 512 steps
        (gap_s,) = site.server.metrics().values["palestra_token_gap_p95_seconds"].values()
        figures["busy inter-token p95"] = 1000 * gap_s
    return figures


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def overhead(site: Site) -> dict[str, float]:
    """By the server's own count at p50; and what callers saw beyond the computation, of which only the mean is told."""
    if site.server is None:
        return {}
    found: dict[str, float] = {}
    works: dict[str, Callable[[], float]] = {
        "optim_step": site.client.optim_step,
        "forward_backward": lambda: site.client.forward_backward(1, 64),
    }
    for kind, work in works.items():
        before = site.server.metrics()
        seen = statistics.mean(work() for _ in range(20 if site.quick else 60))
        after = site.server.metrics()
        inside = after.histogram_since(before, "palestra_call_overhead_seconds", kind)
        compute = after.histogram_since(before, "palestra_compute_seconds", kind)
        found[f"overhead {kind}, server"] = 1000 * inside.quantile(0.5)
        found[f"overhead {kind}, end to end, mean"] = 1000 * (seen - compute.mean)
    return found


def idle(site: Site) -> dict[str, float]:
    """With a session and a model; a snapshot that is due is not idleness, so it comes first."""
    if site.processes is None:
        return {}
    site.client.train_step(1, 64)
    time.sleep(1 if site.quick else 15)
    return {"idle CPU": site.processes.cpu_percent(5)}


def memory(site: Site) -> dict[str, float]:
    if site.processes is None:
        return {}
    site.client.train(16, 4, 64, steps=1)
    found = {"memory, 16 tenants": site.processes.memory_gb()}
    return found if site.ready_gb is None else {"memory, ready": site.ready_gb} | found


# The table. Peer figures: the best of its setups in shared/peers.md, used when no peer is given.


def timing(what: str, target: float | None = None, known: tuple[str, float] | None = None, **small: float) -> Figure:
    """In seconds, on tiny; `small` and `small_known` on small."""
    targets = {} if target is None else {"tiny": target}
    knowns = {} if known is None else {"tiny": known}
    if "small" in small:
        targets["small"], knowns["small"] = small["small"], ("SkyRL S", small["small_known"])
    return Figure(what, "s", less_is_better=True, targets=targets, known=knowns)


def rate(what: str, unit: str, target: float | None = None, known: tuple[str, float] | None = None) -> Figure:
    return Figure(
        what, unit, targets={} if target is None else {"tiny": target}, known={} if known is None else {"tiny": known}
    )


def less(what: str, unit: str, target: float | None = None, known: tuple[str, float] | None = None) -> Figure:
    return Figure(
        what,
        unit,
        less_is_better=True,
        targets={} if target is None else {"tiny": target},
        known={} if known is None else {"tiny": known},
    )


SMALL_TOO = ("tiny", "small")
CASES = (
    Case("start", start, (timing("start", 6, ("SkyRL S", 45)),), quick_rounds=1, warmups=0),
    Case("idle", idle, (less("idle CPU", "% of a core", 1, ("SkyRL S", 5)),), rounds=2, warmups=0),
    Case(
        "forward_backward",
        seconds("forward_backward 1 x 64", lambda c: c.forward_backward(1, 64)),
        (timing("forward_backward 1 x 64", 0.05, ("SkyRL S", 0.266), small=0.36, small_known=0.98),),
        rounds=30,
        quick_rounds=10,
        warmups=3,
        shapes=SMALL_TOO,
    ),
    Case(
        "forward_backward_8",
        seconds("forward_backward 8 x 64", lambda c: c.forward_backward(8, 64)),
        (timing("forward_backward 8 x 64", None, ("SkyRL D", 2.0), small=2.1, small_known=3.57),),
        rounds=5,
        quick_rounds=0,
        shapes=SMALL_TOO,
    ),
    Case(
        "forward_backward_32",
        seconds("forward_backward 32 x 256", lambda c: c.forward_backward(32, 256)),
        (timing("forward_backward 32 x 256", 3.0, ("SkyRL S", 5.7)),),
        rounds=5,
        warmups=0,
    ),
    Case(
        "optim_step",
        optim_step,
        (timing("optim_step", 0.015, ("SkyRL S", 0.108)),),
        rounds=30,
        quick_rounds=10,
        warmups=3,
    ),
    Case("train", train_steps, (rate("train 1 x 64", "steps/s", 15, ("SkyRL S", 3.67)),), rounds=5),
    Case(
        "overhead",
        overhead,
        (
            less("overhead optim_step, server", "ms", 3),
            less("overhead optim_step, end to end, mean", "ms"),
            less("overhead forward_backward, server", "ms", 3),
            less("overhead forward_backward, end to end, mean", "ms"),
        ),
        warmups=0,
    ),
    Case("tenants_1", tenants(1), (rate("tenants_1", "steps/s", 8, ("SkyRL M", 1.44)),)),
    Case("tenants_4", tenants(4), (rate("tenants_4", "steps/s", 10, ("SkyRL M", 1.57)),)),
    Case("tenants_16", tenants(16), (rate("tenants_16", "steps/s", 11, ("SkyRL M", 1.53)),)),
    Case(
        "memory",
        memory,
        (less("memory, ready", "GB", 0.6, ("SkyRL S", 1.3)), less("memory, 16 tenants", "GB", 0.9, ("SkyRL M", 3.6))),
        rounds=1,
        warmups=0,
    ),
    Case(
        "save",
        seconds("save_weights_and_get_sampling_client", lambda c: c.save()),
        (timing("save_weights_and_get_sampling_client", 0.02, ("SkyRL S", 0.21)),),
        rounds=20,
        quick_rounds=5,
    ),
    Case(
        "sample_single",
        sample_single,
        (timing("sample_single", 0.2, ("SkyRL S", 0.32)), rate("sample_1", "tok/s")),
        rounds=15,
        quick_rounds=4,
    ),
    Case(
        "sample_64",
        sampled("sample_64", 64),
        (
            Figure(
                "sample_64",
                "tok/s",
                targets={"tiny": 2500, "small": 260},
                known={"tiny": ("SkyRL M", 380), "small": ("SkyRL S", 76)},
            ),
        ),
        rounds=5,
        shapes=SMALL_TOO,
    ),
    Case("sample_512", sampled("sample_512", 512), (rate("sample_512", "tok/s"),), quick_rounds=0, warmups=0),
    Case(
        "sample_group",
        sampled("sample_group 1 x 16", 1, samples=16),
        (rate("sample_group 1 x 16", "tok/s", 1800, ("SkyRL S", 947)),),
        rounds=7,
    ),
    Case(
        "compute_logprobs",
        seconds("compute_logprobs 1 x 64", lambda c: c.compute_logprobs(64)),
        (timing("compute_logprobs 1 x 64", 0.03, ("SkyRL S", 0.16)),),
        rounds=20,
        quick_rounds=5,
        warmups=2,
    ),
    Case(
        "both",
        training_beside_sampling,
        (
            rate("both: training's share", "%", None, ("SkyRL S", 48)),
            rate("both: sampling's share", "%", None, ("SkyRL S", 28)),
            rate("both: sum of shares", "%", 90, ("SkyRL S", 76)),
        ),
        quick_rounds=0,
        warmups=0,
    ),
    Case(
        "busy",
        sample_while_training,
        (
            less("busy sample p95 / idle", "x", 2.5),
            less("busy sample p95", "s"),
            less("busy inter-token p95", "ms", 60),
        ),
        rounds=2,
        quick_rounds=0,
        warmups=0,
    ),
    Case("tenants_64", tenants(64), (rate("tenants_64", "steps/s"),), rounds=2, quick_rounds=0),
    Case(
        "crowd",
        crowd,
        (rate("crowd, answered", "samples", CROWD), less("crowd, time", "s")),
        rounds=1,
        quick_rounds=0,
        warmups=0,
    ),
)
NAMES = tuple(case.name for case in CASES)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("tinker_api", "Speed of the server through the official SDK, beside a second server.")
    parser.add_argument(
        "--shape", type=some_of("shape", SHAPES), metavar="NAME,…", help=f"run every row on these: {', '.join(SHAPES)}"
    )
    parser.add_argument("--rows", type=some_of("row", NAMES), metavar="NAME,…", help=f"only these ({', '.join(NAMES)})")
    parser.add_argument("--rank", type=positive, default=LORA_RANK, help=f"of every adapter  [{LORA_RANK}]")
    parser.add_argument("--peer-pid", type=positive, metavar="PID", help="of the peer, for its memory and idle CPU")
    parser.add_argument(
        "--palestra",
        type=Path,
        default=Path(sys.executable).with_name("palestra"),
        metavar="FILE",
        help="the command to start ours with, where this Python has only an SDK  [the one beside it]",
    )
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> dict[str, list[Case]]:
    """The rows to run on each shape: a server is started once. The peer serves one model, so it meets one shape."""
    wanted = [c for c in CASES if c.name in (args.rows or NAMES) and (args.rows or c.quick_rounds or not args.quick)]
    shapes: dict[str, list[Case]] = {}
    for case in wanted:
        only_tiny = args.quick or args.peer_url
        for shape in args.shape or (case.shapes[:1] if only_tiny else case.shapes):
            shapes.setdefault(shape, []).append(case)
    return shapes


def run(args: argparse.Namespace, progress: Progress) -> tuple[Report, bool]:
    rows: list[Row] = []
    notes = [f"LoRA of rank {args.rank}; client and server share the cores"]
    if not args.peer_url:
        notes.append('"not of this run": SkyRL\'s figures from shared/peers.md, on another machine; give --peer-url')
    if args.quick:
        notes.append("--quick: less work and few rounds; targets are meant for the full run")
    ok = True
    for shape, cases in plan(args).items():
        with tempfile.TemporaryDirectory(prefix="palestra-bench-") as scratch, contextlib.ExitStack() as stack:
            progress.doing(f"making the {shape} model")
            model = make_model(args.palestra, Path(scratch) / shape, shape)
            sites = [_ours(args, shape, model, Path(scratch), stack)]
            if args.peer_url:
                sites.append(_peer(args, shape, stack))
            contest = Contest(sites, args.rounds, progress, notes)
            for case in cases:
                rows += contest.run(case)
            ok = ok and not contest.has_failed
    return Report("tinker_api", machine(), versions(PACKAGES), rows, notes), ok


def _ours(args: argparse.Namespace, shape: str, model: Path, scratch: Path, stack: contextlib.ExitStack) -> Site:
    numbers = itertools.count()

    def start_another() -> float:
        with our_server(args.palestra, model, scratch / f"state-{next(numbers)}") as server:
            client = TinkerClient(server.url, args.rank)
            client.train_step(1, 64)
            took = time.perf_counter() - server.started
            client.close()
        return took

    server = stack.enter_context(our_server(args.palestra, model, scratch / "state"))
    ready_gb = server.processes.memory_gb()
    client = TinkerClient(server.url, args.rank)
    stack.callback(client.close)
    return Site("ours", client, shape, args.quick, server, server.processes, ready_gb, start_another)


def _peer(args: argparse.Namespace, shape: str, stack: contextlib.ExitStack) -> Site:
    client = TinkerClient(args.peer_url, args.rank)
    stack.callback(client.close)
    processes = Processes(args.peer_pid) if args.peer_pid else None
    return Site(args.peer_url, client, shape, args.quick, None, processes)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not args.palestra.is_file():
        print(f"no command {args.palestra}; say where it is with --palestra FILE", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our server is stopped too
    # A crowd holds a connection for each request.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    progress = Progress()
    try:
        result, ok = run(args, progress)
    finally:
        progress.done()
    report(result, json_line=args.json)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
