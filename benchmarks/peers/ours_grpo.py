"""Ours in `time_to_reward`: `palestra train` with a server of its own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from peers.reward_job import BETAS, EPSILON, GRAD_CLIP, Job, Reporter

from palestra.config.bundled import find_config_file
from palestra.config.train import RunConfig, load_train_config
from palestra.runs.control import request_stop
from palestra.runs.listener import Silence, Stage
from palestra.runs.reader import RunReader
from palestra.runs.saved_checkpoints import find_checkpoint
from palestra.runs.writer import RunFolder
from palestra.training.launch import train


class ReportingListener(Silence):
    def __init__(self, job: Job, run: RunFolder, reporter: Reporter) -> None:
        self._job, self._run, self._reporter = job, run, reporter
        self._sampled = self._trained = 0.0

    def stage(self, stage: Stage, done: int, total: int) -> None:
        self._reporter.begin()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        paused_at = time.monotonic()
        self._sampled += metrics["length/mean"] * metrics["rollouts/total"]
        self._trained += metrics["batch/tokens"]
        if step % self._job.every:
            return
        reader = RunReader(self._run.path)
        adapter = find_checkpoint(reader).export(Path(self._job.folder) / f"adapter-{step}", base=self._job.model)
        counts = {"sampled": round(self._sampled), "trained": round(self._trained)}
        if not self._reporter.report(step, adapter, paused_at=paused_at, reward=metrics["reward/mean"], **counts):
            request_stop(reader)


def config_of(job: Job) -> RunConfig:
    settings = job.settings
    sizes = f"group_size: {settings.samples}, groups_per_step: {settings.groups}"
    limits = f"max_tokens: {settings.max_tokens}, max_context: {settings.max_context}"
    adam = f"lr: {job.lr}, beta1: {BETAS[0]}, beta2: {BETAS[1]}, eps: {EPSILON}, grad_clip: {GRAD_CLIP}"
    if job.is_shipped:
        own = (f"seed={job.seed}", f"runs={job.folder}", "eval.every=0", "checkpoint.keep_best=null")
        where = (f"model.name={job.model}", f"model.device={job.device}", f"checkpoint.every={job.every}")
        return load_train_config([find_config_file(job.task)], [*own, *where, *job.overrides])
    overrides = [
        *("kind=grpo", f"steps={job.steps}", f"seed={job.seed}", f"runs={job.folder}", "eval.every=0"),
        f"environments=[{{name: {job.task}}}]",
        f"model={{name: {job.model}, rank: {settings.rank}, train_unembed: false, device: {job.device}}}",
        f"rollout={{{sizes}, {limits}}}",
        # The same prompts in each step as everybody: a group that teaches nothing is not replaced.
        f"data={{max_sequence_length: {settings.max_context}, zero_variance: drop}}",
        f"optimizer={{{adam}}}",
        f"checkpoint.every={job.every}",
        *job.overrides,
    ]
    return load_train_config([], overrides)


def main() -> None:
    job, reporter = Reporter.open()
    config = config_of(job)
    with RunFolder.create(config.runs, "ours", config) as run:
        asyncio.run(train(config, run, ReportingListener(job, run, reporter)))


if __name__ == "__main__":
    main()
