"""What a GRPO step costs on the bundled model, stage by stage, and how long the engine has nothing to do.

    python benchmarks/training.py --quick
    python benchmarks/training.py --steps 12 --rounds 3 --json

The same config is trained synchronously and asynchronously in turns, against one server. A step's first figures are
dropped: the first step fills what later ones find full. Idle is the clock less the seconds the engine trained and
sampled, by its own count.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from harness import Measure, Progress, Report, Row, argument_parser, machine, positive, report, versions

from palestra.config.bundled import BUNDLED, EPHEBE, find_config_file
from palestra.config.train import RunConfig, load_train_config
from palestra.endpoints.own_server import own_server
from palestra.runs.listener import Silence
from palestra.runs.writer import RunFolder
from palestra.training.launch import train

MODES = ("sync", "async")
STAGES = ("collect", "score", "update", "sync")
BUSY = ("palestra_train_seconds_total", "palestra_sample_seconds_total")
MOST_IDLE = 0.15


class Clock(Silence):
    """Notes when the first step was over and how busy the engine had been by then."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.begin: tuple[float, float] | None = None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self.begin is None:
            self.begin = time.monotonic(), busy_seconds(self._url)

    def idle_share(self) -> float:
        assert self.begin is not None
        begin, busy = self.begin
        return 1 - (busy_seconds(self._url) - busy) / (time.monotonic() - begin)


def main() -> None:
    parser = argument_parser("training", "What a GRPO step costs on the bundled model.")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="of each run, the first of them dropped")
    args = parser.parse_args()
    rounds, steps = (1, 3) if args.quick else (args.rounds or 3, args.steps)
    progress = Progress()
    found = asyncio.run(measure(rounds, max(steps, 2), progress))
    progress.done()
    rows = [row for mode in MODES for row in rows_of(mode, found)]
    notes = [f"{rounds} runs of {steps} steps each, in turns; 12 groups of 8 rollouts in a step"]
    report(Report("training", machine(), versions(("palestra", "tinker", "torch")), rows, notes), json_line=args.json)


async def measure(rounds: int, steps: int, progress: Progress) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        state, log = folder / "state", folder / "log"
        async with own_server(str(BUNDLED / EPHEBE), EPHEBE, state, log, progress.doing, device="cpu") as url:
            for number in range(rounds):
                for mode in MODES:
                    progress.doing(f"round {number + 1} of {rounds}: {mode}")
                    found[mode].append(await one_run(folder, url, mode, number, steps))
    return found


async def one_run(folder: Path, url: str, mode: str, number: int, steps: int) -> dict[str, float]:
    settings = [f"steps={steps}", f"seed={number}", "eval.every=0", "early_stop=null", f"runs={folder / 'runs'}"]
    settings += [f"server={url}", f"asynchronous.enabled={str(mode == 'async').lower()}", "checkpoint.every=1000000"]
    config: RunConfig = load_train_config([find_config_file("demo")], settings)
    clock = Clock(url)
    with RunFolder.create(config.runs, f"{mode}-{number}", config) as run:
        await train(config, run, clock)
        idle = clock.idle_share()
        rows = run.read_metrics()[1:]
    mean = {
        name: sum(row[name] for row in rows) / len(rows) for name in rows[0] if name.startswith(("time/", "batch/"))
    }
    sampled = sum(row["length/mean"] * row["rollouts/total"] for row in rows)
    seconds = sum(row["time/total_s"] for row in rows)
    return {
        "idle": idle,
        "step": mean["time/total_s"],
        "sampled tokens": sampled / seconds,
        "trained tokens": sum(row["batch/tokens"] for row in rows) / seconds,
        **{stage: mean[f"time/{stage}_s"] for stage in STAGES},
    }


def rows_of(mode: str, found: Mapping[str, list[dict[str, float]]]) -> list[Row]:
    def row(what: str, unit: str, **options: float | bool | None) -> Row:
        ours = Measure(tuple(values[what] for values in found[mode]))
        return Row(f"{mode}: {what}", unit, ours, **options)  # pyright: ignore[reportArgumentType]

    return [
        row("step", "s", less_is_better=True),
        *(row(stage, "s", less_is_better=True) for stage in STAGES),
        row("sampled tokens", "tok/s"),
        row("trained tokens", "tok/s"),
        row("idle", "of the time", less_is_better=True, target_value=MOST_IDLE if mode == "async" else None),
    ]


def busy_seconds(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(BUSY))


if __name__ == "__main__":
    main()
