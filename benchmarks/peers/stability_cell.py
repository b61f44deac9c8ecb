"""One training run of `stability`, in a process of its own with cores of its own.

Reads a job from its standard input and prints one line of JSON when the run has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import tinker
from msgspec import Struct
from tinker import types

from palestra.config.api_key import api_key
from palestra.config.bundled import find_config_file
from palestra.config.train import GrpoConfig, load_train_config
from palestra.endpoints.model_folders import model_folder
from palestra.endpoints.own_server import own_server
from palestra.runs.listener import Silence
from palestra.runs.writer import RunFolder
from palestra.training.launch import train

PERTURBATION = 1e-6


class CellJob(Struct, frozen=True, kw_only=True):
    config: str
    """Name of a shipped config, or a file."""
    overrides: tuple[str, ...]
    seed: int
    is_perturbed: bool
    """Whether the first adapter is changed by 1e-6, which stands for another machine's rounding."""
    cores: tuple[int, ...] = ()
    """The cores that the run may use; empty: all."""
    settings: tuple[str, ...] = ()
    """Settings of its server."""


class CellResult(Struct, frozen=True, kw_only=True):
    untrained: float
    best: float
    final: float
    """Success of the weights of the last step."""
    curve: list[tuple[int, float]]
    """Steps and success of all evaluations."""
    undone: int
    """How many updates the guard has undone."""
    skipped: int
    kept: int
    """Steps that kept their gradient."""
    kls: list[float]
    """KL per token of each step's update at its full size."""
    steps: int
    train_s: float
    """Seconds of all steps, without evaluations."""
    seconds: float


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=CellJob)
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    with tempfile.TemporaryDirectory(prefix="stability-") as folder:
        found = asyncio.run(run_cell(job, Path(folder)))
    os.write(out, msgspec.json.encode(found) + b"\n")


async def run_cell(job: CellJob, folder: Path) -> CellResult:
    begin = time.monotonic()
    config = job_config(job, [f"runs={folder / 'runs'}"])
    model, log = str(model_folder(config.model)), folder / "server.log"
    device = config.model.device
    settings = {"device": device, "settings": job.settings}
    async with own_server(model, config.model.name, folder / "state", log, Silence().note, **settings) as url:
        places = [f"server={url}", f"runs={folder / 'runs'}"]
        if job.is_perturbed:
            places.append(f"model.start_from={await perturbed(config, url)}")
        config = job_config(job, places)
        with RunFolder.create(config.runs, "run", config) as run:
            await train(config, run, Silence())
            rows = run.read_metrics()
    return result_of(rows, time.monotonic() - begin)


def job_config(job: CellJob, places: list[str]) -> GrpoConfig:
    file = job.config if Path(job.config).is_file() else find_config_file(job.config)
    config = load_train_config([file], [*job.overrides, f"seed={job.seed}", *places])
    assert isinstance(config, GrpoConfig)
    return config


async def perturbed(config: GrpoConfig, url: str) -> str:
    """Saves the run's first adapter after one optimizer step of 1e-6: Adam's first step moves every number that has a
    gradient by the learning rate."""
    service = tinker.ServiceClient(base_url=url, api_key=api_key())
    client = await service.create_lora_training_client_async(
        base_model=config.model.name, rank=config.model.rank, seed=config.seed
    )
    tokens = list(range(1, 65))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 63}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)  # pyright: ignore[reportArgumentType]
    passed = await client.forward_backward_async([datum], "cross_entropy")
    stepped = await client.optim_step_async(types.AdamParams(learning_rate=PERTURBATION))
    await passed.result_async()
    await stepped.result_async()
    return (await (await client.save_state_async("perturbed")).result_async()).path


def result_of(rows: list[dict], seconds: float) -> CellResult:
    evals = [(row["step"], row["eval/success"]) for row in rows if "eval/success" in row]
    steps = [row for row in rows if "reward/mean" in row]
    return CellResult(
        untrained=evals[0][1],
        best=max(success for _, success in evals[1:]),
        final=evals[-1][1],
        curve=evals,
        undone=int(sum(row.get("guard/undone", 0.0) for row in steps)),
        skipped=int(sum(row.get("guard/skipped", 0.0) for row in steps)),
        kept=int(sum(row.get("optim/kept", 0.0) for row in steps)),
        kls=[float(f"{row['guard/kl_first']:.3g}") for row in steps if "guard/kl_first" in row],
        steps=len(steps),
        train_s=round(sum(row["time/total_s"] for row in steps), 1),
        seconds=round(seconds, 1),
    )


if __name__ == "__main__":
    main()
