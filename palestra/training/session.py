"""The open parts that every training loop gets.

Owns: saving the run's state. Never touches: how the parts are made (`launch` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.runs.advisories import RunAdvisor
from palestra.runs.writer import EventKind, RunFolder
from palestra.training.listener import RunListener
from palestra.training.policy import Policy
from palestra.training.state import RunCheckpoints, RunState
from palestra.training.trackers import Trackers


class TrainingSession(Struct):
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

    async def save_evaluation(self, *, is_last: bool = False) -> None:
        """Saves that this step was evaluated, so that a resumed run does not evaluate it again. `is_last`: the run ends
        here, so its weights are saved too."""
        if not self.checkpoints.amend(self.state) and is_last:
            await self.save()

    async def is_stopped(self, save: Callable[[], Awaitable[None]]) -> bool:
        """Whether somebody has asked the run to end after its step (`palestra run stop`). Its state is then saved."""
        if not self.run.is_asked_to_stop:
            return False
        if self.state.step > 0 and not self.checkpoints.amend(self.state):
            await save()
        self.run.event(EventKind.STOP, step=self.state.step)
        self.listener.note(f"somebody asked this run to stop; it ends after step {self.state.step}")
        return True

    async def save(self) -> None:
        await self.checkpoints.save(self.state, self.policy)
        self.run.event(EventKind.CHECKPOINT, step=self.state.step, address=self.state.address)
