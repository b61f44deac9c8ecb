"""A run for a trainer that is a thread.

Owns: nothing; `async_run` does the work. Never touches: the trainer's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from palestra.episodes.client.async_run import AsyncRun
from palestra.episodes.client.facade import Facade, iterates, waits
from palestra.episodes.client.listener import Listener
from palestra.episodes.client.loop_thread import SHARED
from palestra.types.episodes import NewGroup, Registered, RunInfo


class Run(Facade[AsyncRun]):
    """A run, made by `EpisodeClient.run`. Every call may be repeated without harm."""

    @property
    def info(self) -> RunInfo:
        """State of the run at the last call."""
        return self.inner.info

    @property
    def name(self) -> str:
        return self.inner.name

    def register(self, groups: Iterable[NewGroup]) -> list[Registered]:
        """Registers groups, waiting while the queue is full. Groups that are already registered do not change."""
        return SHARED.wait(self.inner.register(list(groups)))  # list() here: a generator is the caller's code

    def listen(
        self, address: str, *, after: int | None = None, wait_s: float | None = None, told: str | None = None
    ) -> Listener:
        """The same as `groups`, pushed to `address` over ZeroMQ, each committed by its acknowledgement:

            with run.listen("tcp://127.0.0.1:5555") as groups:
                for pushed in groups:
                    save(pushed.group)
                    pushed.ack()

        Groups up to `after`, the last one that is safe here, are acknowledged unseen (None: none are). Ends when none
        came for `wait_s`. `told`: how the server reaches it, where that is another address."""
        SHARED.wait(self.inner.check_cursor(after))
        return Listener(self.inner.listen(address, after=after, wait_s=wait_s, told=told))

    refresh = waits(AsyncRun.refresh)
    groups = iterates(AsyncRun.groups)
    commit = waits(AsyncRun.commit)
    publish = waits(AsyncRun.publish)
    pause = waits(AsyncRun.pause)
    resume = waits(AsyncRun.resume)
    cancel = waits(AsyncRun.cancel)
    delete = waits(AsyncRun.delete)
    requeue = waits(AsyncRun.requeue)
    episodes = waits(AsyncRun.episodes)
