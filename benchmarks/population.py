"""What a population of runs costs beside one run: `palestra sweep` against `palestra train`, by the wall clock.

    python benchmarks/population.py --quick
    python benchmarks/population.py --rows cpu,memory --file rows.jsonl
    python benchmarks/population.py --rows h200-0.6b,h200-bits --model models/ephebe-0.6b --file rows.jsonl
    python benchmarks/population.py --rows h200-4b,h200-64 --file rows.jsonl

Each figure is a whole command, with its server's start. What was measured is kept in a file, so that the same command
goes on where it stopped. `h200-bits` compares members with their lone runs: every metric but times, and the files of
the last adapter. `memory` reads the resident memory of the engine while 64 runs of a small random model take 100 steps
each, and compares its highest values in the second and in the last fifth of all steps.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
from harness import Measure, Progress, Report, Row, argument_parser, machine, report, some_of, versions
from msgspec import Struct
from peers.tinker_server import our_server

from palestra.runs.reader import RunReader
from palestra.runs.record_files import LineFile, read_lines
from palestra.runs.saved_checkpoints import find_checkpoint
from palestra.testing.random_model import make_random_model

HERE = Path(__file__).parent
SETUPS = ("cpu", "memory", "h200-0.6b", "h200-4b", "h200-bits", "h200-64")
CUDA = ("model.device=cuda",)
RANDOM = (
    *("rollout.group_size=8", "rollout.groups_per_step=8", "rollout.max_tokens=256", "rollout.max_context=512"),
    *(
        "data.max_sequence_length=512",
        "rollout.endings.length=grade",
        "data.zero_variance=keep",
        "update_guard.enabled=false",
    ),
    *("eval.every=0", "checkpoint.every=1000", "checkpoint.keep_best=null", "steps=5", "optimizer.lr=1e-5"),
)
CROWD = 64
CROWDED = ("steps=100", "rollout.group_size=2", "rollout.groups_per_step=1", "rollout.max_tokens=8", "model.rank=16")
SMALL_CACHES = ("models.0.cache_tokens=16384", "models.0.sampler_memory_bytes=67108864")
"""They are full before the first figure; as they ship, they fill for some hundred steps, which is no leak."""
WATCH_EVERY_S = 1.0
LONE = 4
"""Members whose bits are compared with lone runs."""
CLOCKS = ("time", "attempt")
"""Columns, and beginnings of the names of metrics, that the clock decides."""


class Timed(Struct, frozen=True):
    """A command that was measured."""

    key: str
    seconds: float
    differing: list[str] | None = None
    """What was not equal to the bit; None if nothing was compared."""
    growth: float | None = None
    """Late memory of the engine by early; None if it was not read."""


class TimedFile:
    """What was measured earlier, by key."""

    def __init__(self, path: Path | None) -> None:
        found = [msgspec.convert(row, Timed) for row in read_lines(path)] if path is not None else []
        self._known = {one.key: one for one in found}
        self._file = None if path is None else LineFile(path)

    def get(self, key: str, measure: Callable[[], Timed]) -> Timed:
        if key not in self._known:
            self._known[key] = found = measure()
            if self._file is not None:
                self._file.append(msgspec.to_builtins(found))
        return self._known[key]


class Bench:
    def __init__(self, args: argparse.Namespace, scratch: Path, progress: Progress) -> None:
        self._args, self._scratch, self._progress = args, scratch, progress
        self._file = TimedFile(args.file)

    def rows(self) -> Iterator[Row]:
        for setup in self._args.setups:
            match setup:
                case "cpu":
                    yield self._ratio(setup, ["arithmetic", "model.device=cpu"], 8, 6.0)
                case "memory":
                    yield self._memory()
                case "h200-0.6b":
                    yield self._ratio(setup, ["arithmetic", *self._taught(), *CUDA], 16, 3.0)
                case "h200-4b":
                    yield self._ratio(setup, [*self._random("qwen3-4b", "bfloat16"), *CUDA], 8, 4.0)
                case "h200-bits":
                    yield self._bits(["arithmetic", *self._taught(), *CUDA, "steps=10"])
                case "h200-64":
                    rates = "optimizer.lr=1.5e-3,3e-3,6e-3,12e-3"
                    whole = self._run(setup, "sweep", ["arithmetic", *self._bfloat16(), *CUDA, rates, "seed=0..15"])
                    yield Row(
                        "64 runs of arithmetic (16 seeds, 4 rates)",
                        "s",
                        Measure((whole.seconds,)),
                        target_value=480.0,
                        less_is_better=True,
                    )

    def _ratio(self, setup: str, arguments: list[str], members: int, most: float) -> Row:
        arguments = [*arguments, *self._args.set]
        alone = self._run(f"{setup} alone", "train", [*arguments, "seed=0"])
        together = self._run(f"{setup} x{members}", "sweep", [*arguments, f"seed=0..{members - 1}"])
        ratio = together.seconds / alone.seconds
        what = f"{setup}: {members} members ({together.seconds:.0f} s) against one run ({alone.seconds:.0f} s)"
        return Row(what, "x", Measure((ratio,)), target_value=most, less_is_better=True)

    def _run(self, key: str, command: str, arguments: list[str]) -> Timed:
        def measure() -> Timed:
            place = self._scratch / key.replace(" ", "-")
            return Timed(key, self._command(command, arguments, place))

        return self._file.get(" ".join([key, *self._args.set]), measure)

    def _command(
        self,
        command: str,
        arguments: list[str],
        runs: Path,
        name: str = "one",
        watch: Callable[[int], None] | None = None,
    ) -> float:
        """`watch` is called with the command's process every second."""
        display = ["--display", "none"] if command == "train" else ["--json"]
        python_path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        self._progress.say(f"palestra {command} {' '.join(arguments)}")
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "palestra.cli", command, *arguments, f"runs={runs}", "--name", name, *display],
            env={**os.environ, "PYTHONPATH": python_path},
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if watch is None else WATCH_EVERY_S)
            if watch is not None:
                watch(process.pid)
        seconds = time.monotonic() - begin
        if process.returncode:
            raise SystemExit(f"palestra {command} ended with code {process.returncode}")
        self._progress.say(f"  {seconds:.1f} s")
        return seconds

    def _memory(self) -> Row:
        arguments = [*self._random("tiny", "float32"), *CROWDED, *self._args.set]
        runs, seen = self._scratch / "memory", list[tuple[int, int]]()

        def measure() -> Timed:
            command, folder = Path(sys.executable).with_name("palestra"), self._scratch / "tiny"
            with our_server(command, folder, self._scratch / "state", *SMALL_CACHES) as server:

                def watch(_: int) -> None:
                    steps = sum(len(file.read_bytes().splitlines()) for file in runs.glob("one-*/metrics.jsonl"))
                    seen.append((steps, engine_bytes(server.process.pid)))

                names = [f"server={server.url}", "model.name=tiny", f"model.tokenizer={folder}"]
                seconds = self._command("sweep", [*arguments, *names, f"seed=0..{CROWD - 1}"], runs, watch=watch)
            last = seen[-1][0]
            early = max(size for steps, size in seen if last / 5 <= steps < 2 * last / 5)
            late = max(size for steps, size in seen if steps >= 4 * last / 5)
            self._progress.say(f"  {last:,} steps; the engine has {early / 2**20:.0f} MiB, then {late / 2**20:.0f}")
            return Timed("memory", seconds, growth=late / early)

        found = self._file.get(" ".join(["memory", *self._args.set]), measure)
        what = f"memory of the engine, {CROWD} runs: last fifth of the steps against the second"
        return Row(what, "x", Measure((found.growth or 0.0,)), target_value=1.02, less_is_better=True)

    def _bits(self, arguments: list[str]) -> Row:
        arguments = [*arguments, *self._args.set]

        def measure() -> Timed:
            runs = self._scratch / "bits"
            seconds = self._command("sweep", [*arguments, f"seed=0..{LONE - 1}"], runs)
            differing = []
            for seed in range(LONE):
                self._command("train", [*arguments, f"seed={seed}"], runs, f"lone-{seed}")
                differing += differences(RunReader(runs / f"one-{seed}"), RunReader(runs / f"lone-{seed}"))
            return Timed("bits", seconds, differing)

        found = self._file.get(" ".join(["bits", *self._args.set]), measure)
        for text in found.differing or []:
            self._progress.say(f"  differs: {text}")
        count = float(len(found.differing or []))
        return Row(
            f"{LONE} members and their lone runs: figures that differ",
            "",
            Measure((count,)),
            target_value=0.0,
            less_is_better=True,
        )

    def _taught(self) -> list[str]:
        if self._args.model is None:
            raise SystemExit("these rows need the taught model of time_to_reward: --model FOLDER")
        return [f"model.name={self._args.model.absolute()}"]

    def _random(self, shape: str, dtype: str) -> list[str]:
        folder = self._scratch / shape
        if not folder.exists():
            make_random_model(folder, shape=shape, dtype=dtype)
        (self._scratch / "random.yaml").write_text("environments: [{name: 'peers.random_reward:RandomReward'}]\n")
        return [str(self._scratch / "random.yaml"), f"model.name={folder}", *RANDOM]

    def _bfloat16(self) -> list[str]:
        """Ephebe in half precision: its folder with another dtype in config.json, which is what it is computed in."""
        from palestra.config.bundled import BUNDLED, EPHEBE

        folder = self._scratch / "ephebe-bfloat16"
        folder.mkdir(exist_ok=True)
        for file in (BUNDLED / EPHEBE).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = msgspec.json.decode((folder / "config.json").read_bytes())
        config |= {"compute_dtype": "bfloat16", "torch_dtype": "bfloat16", "dtype": "bfloat16"}
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        return [f"model.name={folder}"]


def engine_bytes(pid: int) -> int:
    """Resident memory of the engine that a command has started; 0 if there is none now."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            if "palestra.engine" in child.cmdline():
                return child.memory_info().rss
    return 0


def differences(member: RunReader, alone: RunReader) -> list[str]:
    """Where a member's metrics and final adapter are not those of its lone run."""
    found = []
    for ours, theirs in zip(member.read_metrics(), alone.read_metrics(), strict=True):
        names = sorted(name for name in {*ours, *theirs} if not name.startswith((*CLOCKS, "throughput/")))
        found += [
            f"{member.name} step {ours['step']} {name}: {ours.get(name)} and {theirs.get(name)}"
            for name in names
            if ours.get(name) != theirs.get(name) and not _are_nan(ours.get(name), theirs.get(name))
        ]
    folders = [find_checkpoint(run, "last").folder for run in (member, alone)]
    assert folders[0] is not None
    assert folders[1] is not None
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    unequal = [name for name in files if (folders[0] / name).read_bytes() != (folders[1] / name).read_bytes()]
    return found + [f"{member.name}: {name}" for name in unequal]


def _are_nan(*values: object) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in values)


def main() -> None:
    args = parse()
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="population-") as scratch:
        rows = list(Bench(args, Path(scratch), progress).rows())
    progress.done()
    facts = machine(), versions(("palestra", "torch", "tinker"))
    report(Report("population", *facts, rows, [f"{' '.join(args.set)}"] if args.set else []), json_line=args.json)


def parse() -> argparse.Namespace:
    parser = argument_parser("population", "What a population of runs costs beside one run.")
    known = some_of("row", SETUPS)
    parser.add_argument("--rows", dest="setups", type=known, default=["cpu"], metavar="NAME,…", help=", ".join(SETUPS))
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="the 0.6B model, taught as for time_to_reward")
    parser.add_argument("--file", type=Path, metavar="FILE", help="what was measured; continued if it exists")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs")
    args = parser.parse_args()
    if args.quick:
        args.set += ["steps=1", "eval.tasks=16", "rollout.groups_per_step=2"]
    return args


if __name__ == "__main__":
    main()
