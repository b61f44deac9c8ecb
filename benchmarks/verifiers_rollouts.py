"""CPU of an evaluation of a verifiers environment: by `palestra eval`, and by verifiers' own runner, on the same rows.

    make clients                                              # once
    .venv/bin/python benchmarks/verifiers_rollouts.py

The model is a script at an endpoint of this process, which is not counted. Each side plays few rows, and many;
the difference is what rows cost, without the start of Python. Whole process trees are counted, by the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.environments.verifiers.test_parity import PACKAGES, RUN_V1, V1, sums  # noqa: E402
from tests.scripted_endpoint import scripted_endpoint  # noqa: E402

AGENT = {"agent": {"harness": {"id": "direct"}, "runtime": {"type": "subprocess"}}}


def cpu_s(command: list[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGES}:{ROOT}", "ANY_KEY": "x", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(url: str, count: int, folder: Path) -> float:
    entry = {"verifiers": "v1_sums", "args": {"count": 1}, "eval_args": {"count": count}}
    config = {"environments": [{**entry, "config": {"env": AGENT, "python": str(V1)}}], "model": {"name": "scripted"}}
    (folder / "eval.yaml").write_text(json.dumps(config))
    options = ["--model", "scripted", "--server", url, "--key", "x", f"tasks={count}", "concurrency=64"]
    return cpu_s([sys.executable, "-m", "palestra", "eval", "eval.yaml", *options], folder)


def theirs(url: str, count: int, folder: Path) -> float:
    env = {"taskset": {"id": "v1_sums", "count": count}, **AGENT}
    config = {"model": "scripted", "env": env, "rich": None, "max_concurrent": 64}
    config["client"] = {"base_url": url, "api_key_var": "ANY_KEY"}
    (folder / "eval.json").write_text(json.dumps(config))
    return cpu_s([str(V1), "-c", RUN_V1, str(folder / "eval.json")], folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--few", type=int, default=20)
    parser.add_argument("--many", type=int, default=420)
    arguments = parser.parse_args()
    with scripted_endpoint(sums) as url:
        for name, side in {"palestra eval": ours, "verifiers": theirs}.items():
            found: list[float] = []
            for count in (arguments.few, arguments.many):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(side(url, count, Path(folder)))
            rows = arguments.many - arguments.few
            each_ms = 1000 * (found[1] - found[0]) / rows
            print(
                f"{name:14} {found[0]:6.2f} s with {arguments.few} rows, {found[1]:6.2f} s with {arguments.many}: "
                f"{each_ms:.1f} ms of CPU for each row"
            )


if __name__ == "__main__":
    main()
