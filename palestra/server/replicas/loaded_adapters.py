"""Adapters at one replica: loaded before they are needed, unloaded when others are.

A name contains the digest of the adapter's file, so it always stands for the same weights: keys and values are cached
by name.

The server decides which adapters a replica has; a replica deletes none by itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

from palestra.server.core.checkpoints.adapter_transfers import TransferredAdapter
from palestra.server.replicas.errors import ReplicaError

log = structlog.get_logger()


class AdapterHost(Protocol):
    """Where adapters are loaded."""

    async def load_adapter(self, name: str, adapter: TransferredAdapter) -> None:
        """Returns when samples can name it. It is no error if it is loaded already."""
        ...

    async def unload_adapter(self, name: str) -> None: ...


class LoadedAdapters:
    def __init__(self, host: AdapterHost, *, prefix: str = "", max_loaded: int, on_load: Callable[[], None]):
        self._host, self._prefix, self._max_loaded, self._on_load = host, prefix, max_loaded, on_load
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """Loaded adapters, the least recently used first."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._users: dict[str, int] = {}
        self._unwanted: set[str] = set()
        """Adapters to be unloaded when their last user is gone."""
        self._tidying: set[asyncio.Task[None]] = set()

    def meet(self, names: Iterable[str]) -> None:
        """Notes which adapters a replica has that is up (again)."""
        self._loaded = OrderedDict.fromkeys(name for name in names if name.startswith(self._prefix))
        self._tidy()

    def forget(self, adapter: TransferredAdapter) -> None:
        """Notes that the replica does not have an adapter."""
        self._loaded.pop(self.name_of(adapter), None)

    def name_of(self, adapter: TransferredAdapter) -> str:
        return self._prefix + adapter.digest

    @asynccontextmanager
    async def using(self, adapter: TransferredAdapter) -> AsyncIterator[str]:
        """Keeps an adapter loaded during the block, and gives its name at the replica."""
        name = self.name_of(adapter)
        self._users[name] = self._users.get(name, 0) + 1
        try:
            await self.load(adapter)
            yield name
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._tidy()

    async def load(self, adapter: TransferredAdapter) -> None:
        """Loads an adapter once, however many ask for it."""
        name = self.name_of(adapter)
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name, adapter), name=f"load {name}")
            task.add_done_callback(lambda done: self._load_ended(name, done))
        await asyncio.shield(task)

    def _load_ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._loading.pop(name, None)
        if not task.cancelled():
            task.exception()  # those who wait get the error; there may be none left

    async def _load(self, name: str, adapter: TransferredAdapter) -> None:
        await self._host.load_adapter(name, adapter)
        self._loaded[name] = None
        self._on_load()
        self._tidy()

    def drop(self, adapter: TransferredAdapter) -> None:
        """Unloads an adapter that will not be used again."""
        self._unwanted.add(self.name_of(adapter))
        self._tidy()

    async def unload_all(self) -> None:
        names, self._loaded = list(self._loaded), OrderedDict()
        await asyncio.gather(*(self._unload(name) for name in names))

    def _tidy(self) -> None:
        idle = [name for name in self._loaded if name not in self._users]
        too_many = max(0, len(self._loaded) - self._max_loaded)
        leaving = dict.fromkeys(idle[:too_many]) | dict.fromkeys(name for name in idle if name in self._unwanted)
        for name in leaving:
            del self._loaded[name]
            task = asyncio.create_task(self._unload(name), name=f"unload {name}")
            self._tidying.add(task)
            task.add_done_callback(self._tidying.discard)
        self._unwanted &= self._users.keys() | self._loading.keys()

    async def _unload(self, name: str) -> None:
        try:
            await self._host.unload_adapter(name)
        except ReplicaError as e:
            log.warning("an adapter could not be unloaded", adapter=name, error=str(e))
