"""The open parts that every training loop gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.config.train import RunConfig
from palestra.endpoints.model_folders import SetupError
from palestra.runs.advisories import RunAdvisor
from palestra.runs.listener import RunListener, Stage
from palestra.runs.run_state import RunState
from palestra.runs.writer import EventKind, RunFolder
from palestra.training.policy import Policy
from palestra.training.run_checkpoints import RunCheckpoints
from palestra.training.trackers import Trackers
from palestra.util.suggest import did_you_mean

GRADED = {"eval/success", "eval/loss"}
"""Metrics that every evaluation has in which anything was graded."""


class TrainingSession(Struct):
    config: RunConfig
    """The run's config, with a number as its learning rate."""
    policy: Policy
    tokenizer: ChatTokenizer
    run: RunFolder
    checkpoints: RunCheckpoints
    state: RunState
    listener: RunListener
    trackers: Trackers
    url: str
    """Address of the server."""
    advisor: RunAdvisor

    def advise(self) -> None:
        """Reports what the metrics that were written last say is going wrong."""
        for advisory in self.advisor.take_new():
            self.listener.advise(advisory)

    async def track(self, step: int, metrics: dict[str, float]) -> None:
        """Sends metrics to the trackers in another thread, because they may use the network."""
        await asyncio.to_thread(self.trackers.log, step, metrics)

    async def save_evaluation(
        self,
        metrics: Mapping[str, float],
        save: Callable[[], Awaitable[None]],
        *,
        is_last: bool = False,
        may_save: bool = True,
    ) -> None:
        """Saves that this step was evaluated, so that a resumed run does not evaluate it again. If the run ends here
        (`is_last`), or if no weights that are kept are better, the weights are saved too.

        `may_save`: a loop whose weights cannot be saved now, such as one that keeps a gradient for its next step, says
        False. What is not saved cannot be selected later, so older weights stay the best.
        """
        self._rate(metrics)
        if self.checkpoints.amend(self.state):
            await self.checkpoints.delete_old(self.policy)
        elif may_save and (is_last or self.checkpoints.is_best(self.state.step)):
            await save()

    def _rate(self, metrics: Mapping[str, float]) -> None:
        metric = self.checkpoints.keep_best
        if metric is None:
            return
        if (value := metrics.get(metric)) is not None:
            self.checkpoints.rate(self.state.step, value)
        elif not GRADED.isdisjoint(metrics):  # otherwise no rollout of this evaluation could be graded
            hint = did_you_mean(metric, sorted(name for name in metrics if name.startswith("eval/")))
            raise SetupError(f"checkpoint.keep_best: an evaluation has no {metric!r}; {hint}")

    async def is_stopped(self, save: Callable[[], Awaitable[None]]) -> bool:
        """Whether the run was asked to end after its step (`palestra run stop`); its state is then saved. Every
        training loop asks before each step."""
        if not self.run.is_asked_to_stop:
            return False
        if self.state.step > 0 and not self.checkpoints.amend(self.state):
            await save()
        self.run.event(EventKind.STOP, step=self.state.step)
        self.listener.note(f"this run was asked to stop; it ends after step {self.state.step}")
        return True

    async def save(self) -> None:
        self.listener.stage(Stage.SAVE, 0, 0)
        await self.checkpoints.save(self.state, self.policy)
        self.run.event(EventKind.CHECKPOINT, step=self.state.step, address=self.state.address)
