"""`make cookbook`: unmodified recipes of tinker-cookbook against our own server, offline.

Makes a small random model and a few synthetic rows, starts `palestra serve` with the model under a name the cookbook
knows, and runs each recipe in a child of the cookbook's own environment. A recipe passes when it exits with 0 and every
step it logged shows finite numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from recipes import CHECKPOINT, FAMILIES, FIRST, MORE, Recipe

HERE = Path(__file__).resolve().parent
READY = "Palestra is ready at "
START_S = 120  # a cold start reads torch from disk
RECIPE_S = 300
STOP_S = 30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
PROCESSOR_FILE = "preprocessor_config.json"


class CookbookError(Exception):
    """A step did not do what it promised; the message says which, and where to look."""


def main() -> int:
    options = parse_options()
    recipes = choose(options)
    work = Path(options.work or tempfile.mkdtemp(prefix="palestra-cookbook-")).resolve()
    started = time.monotonic()
    try:
        models = dict.fromkeys(one.model for one in recipes)
        prepare(work, options.python, options.shape, models)
        with serving(work, models) as url:
            failed = [one.name for one in recipes if not attempt(one, work, url, options.python)]
    except CookbookError as error:
        print(f"\n{error}\n\nleft for you to look at: {work}", file=sys.stderr)
        return 1
    print(f"\n{len(recipes) - len(failed)} of {len(recipes)} recipes in {time.monotonic() - started:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}; left for you to look at: {work}", file=sys.stderr)
    elif not options.work:
        shutil.rmtree(work)
    return 1 if failed else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run recipes of tinker-cookbook against a server of ours, offline.")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has tinker-cookbook")
    parser.add_argument("--all", action="store_true", help="every recipe that is known to work, not only the two")
    parser.add_argument("--only", metavar="NAME", help="recipes whose name begins so; implies --all")
    parser.add_argument("--shape", default="micro", help="of the random model: micro, tiny, small")
    parser.add_argument("--work", metavar="DIR", help="work here and leave everything; else a temporary folder")
    options = parser.parse_args()
    options.python = str(Path(options.python).absolute())  # not resolved: the link is what makes it that environment
    if subprocess.run([options.python, "-c", "import tinker_cookbook"], capture_output=True, check=False).returncode:
        sys.exit(f"{options.python} cannot import tinker_cookbook; type: make cookbook")
    return options


def choose(options: argparse.Namespace) -> list[Recipe]:
    known = [*FIRST, *MORE] if options.all or options.only else [*FIRST]
    chosen = [one for one in known if one.name.startswith(options.only or "")]
    if not chosen:
        sys.exit(f"no recipe is called {options.only!r}; there are: {', '.join(one.name for one in known)}")
    if any(CHECKPOINT in arg for one in chosen for arg in one.args) and FIRST[0] not in chosen:
        chosen.insert(0, FIRST[0])
    return chosen


def prepare(work: Path, python: str, shape: str, models: Iterable[str]) -> None:
    """The layout in which recipes find tokenizers and datasets without a network."""
    work.mkdir(parents=True, exist_ok=True)
    for model in models:
        family = FAMILIES[model]
        say(f"a random model of the family {family}")
        make = [sys.executable, "-m", "palestra.cli", "model", "random", str(folder_of(work, model))]
        make += ["--family", family, "--shape", shape, "--overwrite"]
        run_quietly("making a random model", make)
        tokenizer = work / model
        tokenizer.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            shutil.copy(folder_of(work, model) / name, tokenizer)
        if (processor := folder_of(work, model) / PROCESSOR_FILE).exists():
            shutil.copy(processor, tokenizer)
    say("synthetic rows")
    run_quietly("writing the synthetic rows", [python, str(HERE / "synthetic.py"), str(work)])


def folder_of(work: Path, model: str) -> Path:
    return work / "models" / FAMILIES[model]


def run_quietly(what: str, command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise CookbookError(f"{what} failed ({done.returncode}):\n{done.stdout}")


@contextmanager
def serving(work: Path, models: Iterable[str]) -> Iterator[str]:
    """A server of our own on a free port, which leaves nothing behind; yields its address."""
    log = work / "server.log"
    args = ["serve", "--port", "0", "--state", str(work / "state")]
    for model in models:
        args += ["--model", str(folder_of(work, model)), "--name", model]
    with log.open("wb") as out:
        server = subprocess.Popen([sys.executable, "-m", "palestra.cli", *args], stdout=out, stderr=out, cwd=work)
    try:
        url = wait_ready(server, log)
        say(f"serving {', '.join(models)} at {url}")
        yield url
    finally:
        code = stop(server)
    if code:
        raise CookbookError(f"the server ended with {code} when asked to stop:\n{tail(log)}")


def wait_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while READY not in (said := log.read_text(errors="replace")):
        if server.poll() is not None:
            raise CookbookError(f"the server ended with {server.returncode} before it was ready:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise CookbookError(f"the server was not ready after {START_S} s:\n{tail(log)}")
        time.sleep(0.05)
    return said.partition(READY)[2].split()[0].rstrip(".,")


def stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -signal.SIGKILL


def attempt(recipe: Recipe, work: Path, url: str, python: str) -> bool:
    print(f"\n{recipe.name}: {recipe.typed}", flush=True)
    started = time.monotonic()
    try:
        run_recipe(recipe, work, url, python)
    except CookbookError as error:
        print(f"  failed: {error}", file=sys.stderr, flush=True)
        return False
    print(f"  ok, {time.monotonic() - started:.0f} s", flush=True)
    return True


def run_recipe(recipe: Recipe, work: Path, url: str, python: str) -> None:
    runs = work / "runs" / recipe.name.replace(", ", "-").replace(" ", "-")
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    log = runs / "output.log"
    args = [arg.replace(CHECKPOINT, first_checkpoint(work)) if CHECKPOINT in arg else arg for arg in recipe.args]
    with log.open("wb") as out:
        child = subprocess.Popen(
            [python, "-m", recipe.module, *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=work,
            env=recipe_environment(work, url, runs),
        )
    try:
        seen = watch(child, runs, lambda step: print(f"  {summary(step, recipe)}", flush=True))
    finally:
        if child.poll() is None:
            stop(child)
    if child.returncode:
        raise CookbookError(f"it ended with {child.returncode}; the end of {log}:\n{tail(log)}")
    check_metrics(recipe, seen, runs)


def recipe_environment(work: Path, url: str, runs: Path) -> dict[str, str]:
    ours = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-cookbook",
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(runs),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")} | ours


def watch(child: subprocess.Popen[bytes], runs: Path, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Until the recipe ends; returns the steps it logged, each shown as it comes."""
    seen: list[dict[str, Any]] = []
    deadline = time.monotonic() + RECIPE_S
    while True:
        is_over = child.poll() is not None
        steps = read_metrics(runs)
        for step in steps[len(seen) :]:
            show(step)
        seen = steps
        if is_over:
            return seen
        if time.monotonic() > deadline:
            raise CookbookError(f"it did not end within {RECIPE_S} s; see {runs}")
        time.sleep(0.1)


def read_metrics(runs: Path) -> list[dict[str, Any]]:
    """The lines of its metrics.jsonl that are whole."""
    for file in runs.rglob("metrics.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def check_metrics(recipe: Recipe, steps: list[dict[str, Any]], runs: Path) -> None:
    shown = [step for step in steps if any(name in step for name in recipe.shows)]
    if len(shown) != recipe.steps:
        raise CookbookError(f"{len(shown)} of {recipe.steps} steps have {recipe.shows} in metrics.jsonl; see {runs}")
    for number, step in enumerate(shown):
        missing = [name for name in recipe.shows if name not in step]
        if missing:
            raise CookbookError(f"step {number} does not show {', '.join(missing)}; see {runs}")
    for number, step in enumerate(steps):
        for name, value in step.items():
            if isinstance(value, int | float) and not math.isfinite(value):
                raise CookbookError(f"line {number + 1} of metrics.jsonl has {name} = {value}; see {runs}")


def first_checkpoint(work: Path, path: str = "state_path") -> str:
    """`path` is `state_path`, to train on, or `sampler_path`."""
    for file in (work / "runs" / FIRST[0].name).rglob("checkpoints.jsonl"):
        return json.loads(file.read_text().splitlines()[-1])[path]
    raise CookbookError(f"{FIRST[0].name} left no checkpoint to start from")


def summary(step: dict[str, Any], recipe: Recipe) -> str:
    told = [f"{name} {step[name]:.4g}" for name in recipe.shows if isinstance(step.get(name), int | float)]
    return f"step {step.get('step', '-')}: {', '.join(told) or 'other metrics'}"


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def say(text: str) -> None:
    print(f"- {text}", flush=True)


def interrupted(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    sys.exit(main())
