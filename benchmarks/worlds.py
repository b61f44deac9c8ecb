"""What long tasks and users cost beside short tasks: an instance, a call, a reset; and 1,000 instances at once.

    python benchmarks/worlds.py --quick
    python benchmarks/worlds.py --json

Long tasks and short tasks of the same app are measured in turns. Calls are those of an instance in which the task has
been played to its end.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from harness import Measure, Progress, Report, Row, argument_parser, machine, positive, report, versions

from palestra.environments.platform import APPS, Instance, make_task
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import InstanceSpec, PoolLimits

PACKAGES = ("palestra", "msgspec")
ROUNDS, QUICK_ROUNDS = 7, 3
COUNT, QUICK_COUNT = 400, 100
PEER = "a short task"
TARGET = 1 / 1.5  # of a short task's speed
HELD, QUICK_HELD = 1000, 200
RESIDENT_BYTES = 128 << 20  # of instances in memory; the rest are on disk
TARGET_GIB = 0.5
WORLDS = 8  # of which they are copies
PAIRS = {
    "mail": ("mail-label_sender-1-7", "mail-errands_50-6-7", "list_folders"),
    "forge": ("forge-create_issue-1-7", "forge-errands_50-6-7", "list_repos"),
    "stay": ("stay-message_host-1-7", "stay-errands_50-6-7", "list_cards"),
    "forum": ("forum-comment_top-1-7", "forum-errands_50-6-7", "list_communities"),
    "travel": ("travel-stay_to_calendar-1-7", "travel-errands_50-6-7", "stay.list_cards"),
    "team": ("team-mail_assignee-1-7", "team-outages_50-6-7", "forge.list_repos"),
}
"""For each app: a short task, a long one, and a tool that only reads, and whose answer does not grow with the task."""


def timed(work: Callable[[], object], count: int) -> float:
    """Median in milliseconds."""
    taken: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def works(key: str, reading: str) -> dict[str, Callable[[], object]]:
    task = make_task(key)
    played, again = (Instance(task.seed, variables=task.variables) for _ in range(2))
    play_golden(task, played)

    def reset() -> None:
        again.reset()

    return {
        "instance create": lambda: Instance(task.seed, variables=task.variables).close(),
        "call": lambda: played.call(reading, {}),
        "reset": reset,
    }


def ratios(app: str, rounds: int, count: int) -> list[Row]:
    """A B A B: the short task, then the long one."""
    short_key, long_key, reading = PAIRS[app]
    short, long = works(short_key, reading), works(long_key, reading)
    rows: list[Row] = []
    for what, work in long.items():
        found = [(timed(short[what], count), timed(work, count)) for _ in range(rounds)]
        shorter, longer = (Measure(tuple(one[side] for one in found)) for side in (0, 1))
        rows.append(Row(f"{app}: {what}", "ms", longer, PEER, shorter, target_ratio=TARGET, less_is_better=True))
    return rows


def hold(count: int) -> float:
    """GiB that so many instances of `travel` take in a pool, each called three times."""
    before = psutil.Process().memory_info().rss
    limits = PoolLimits(max_instances=count, max_per_team=count, max_resident_bytes=RESIDENT_BYTES)
    app = APPS["travel"]
    with tempfile.TemporaryDirectory() as folder, InstancePool(limits, Path(folder)) as pool:
        specs = [InstanceSpec(app=app.key, data=f"small-{n % WORLDS}", version=app.version) for n in range(count)]
        made = [pool.create("team", spec) for spec in specs]
        for one in made:
            for _ in range(3):
                with pool.use(one.id) as instance:
                    instance.call("stay.list_bookings", {})
        assert pool.usage().instances == count
        return (psutil.Process().memory_info().rss - before) / 2**30


def memory(count: int) -> Row:
    """In a process of its own."""
    ran = subprocess.run([sys.executable, __file__, "--hold", str(count)], capture_output=True, text=True, check=True)
    held = Measure((float(ran.stdout),))
    return Row(f"{count:,} instances at once", "GiB", held, target_value=TARGET_GIB, less_is_better=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("worlds", "Long tasks beside short ones: instances, calls, resets; 1,000 at once.")
    parser.add_argument("--hold", type=positive, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, progress: Progress) -> Report:
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    rows: list[Row] = []
    for app in PAIRS:
        progress.doing(app)
        rows += ratios(app, rounds, QUICK_COUNT if args.quick else COUNT)
    progress.doing("memory")
    rows.append(memory(QUICK_HELD if args.quick else HELD))
    notes = [f"of instances {RESIDENT_BYTES >> 20} MiB stay in memory, those used longest ago are on disk"]
    return Report("worlds", machine(), versions(PACKAGES), rows, notes)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.hold:
        print(hold(args.hold))
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
