"""Adapters at one vLLM server: loaded before they are needed, unloaded when others are.

A name always stands for one folder with one content, because vLLM caches keys and values by name.

Owns: what is loaded, who uses it. Never touches: who samples, the folders themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from palestra.server.vllm.client import VllmClient
from palestra.server.vllm.errors import VllmError, VllmLost, VllmRefused, VllmUnfit, VllmUnknownModel
from palestra.types import LoraConfig

log = structlog.get_logger()

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


ATTENTION, MLP, UNEMBED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"), ("lm_head",)


@dataclass(frozen=True, slots=True)
class VllmAdapter:
    folder: str
    digest: str
    """A hash of the folder and of the file in it: other content that is written there later is another adapter."""
    lora: LoraConfig

    @classmethod
    def read(cls, folder: str) -> VllmAdapter:
        try:
            stat = (Path(folder) / WEIGHTS).stat()
            config = json.loads((Path(folder) / CONFIG).read_text())
            rank, modules = int(config["r"]), tuple(config["target_modules"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise VllmRefused(f"there is no complete adapter in {folder} ({e}); it may have been deleted") from None
        identity = f"{folder}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        lora = LoraConfig(
            rank=rank,
            train_attn=any(m.endswith(ATTENTION) for m in modules),
            train_mlp=any(m.endswith(MLP) for m in modules),
            train_unembed=any(m.endswith(UNEMBED) for m in modules),
        )
        return cls(folder, _digest(identity, 12), lora)


class LoadedAdapters:
    def __init__(self, client: VllmClient, owner: Path, *, max_loaded: int, on_load: Callable[[], None]):
        self._client, self._max_loaded, self._on_load = client, max_loaded, on_load
        self._prefix = f"palestra-{_digest(str(owner), 4)}-"
        """Contains the state folder's hash: others may load adapters there, too."""
        self._loaded: OrderedDict[str, None] = OrderedDict()
        """Loaded adapters, the least recently used first."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._users: dict[str, int] = {}
        self._unwanted: set[str] = set()
        """Adapters to be unloaded when their last user is gone."""
        self._tidying: set[asyncio.Task[None]] = set()

    def meet(self, names: Iterable[str]) -> None:
        """Notes which adapters a server has that is up (again)."""
        self._loaded = OrderedDict.fromkeys(name for name in names if name.startswith(self._prefix))

    def forget(self, adapter: VllmAdapter) -> None:
        """Notes that the server does not have an adapter."""
        self._loaded.pop(self.name_of(adapter), None)

    def name_of(self, adapter: VllmAdapter) -> str:
        return self._prefix + adapter.digest

    @asynccontextmanager
    async def using(self, adapter: VllmAdapter) -> AsyncIterator[str]:
        """Keeps an adapter loaded during the block, and gives its name at the server."""
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

    async def load(self, adapter: VllmAdapter) -> None:
        """Loads an adapter once, however many ask for it."""
        name = self.name_of(adapter)
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(name, adapter.folder), name=f"load {name}")
            task.add_done_callback(lambda done: self._load_ended(name, done))
        await asyncio.shield(task)

    def _load_ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._loading.pop(name, None)
        if not task.cancelled():
            task.exception()  # those who wait get the error; there may be none left

    async def _load(self, name: str, folder: str) -> None:
        try:
            await self._client.load(name, folder)
        except VllmUnknownModel as e:  # it does not find the folder
            raise VllmUnfit(f"vLLM at {self._client.url} cannot read {folder}: {e}") from None
        except VllmLost as e:
            # vLLM answers 500 if it does not accept an adapter.
            if "LoRA" in str(e):
                raise VllmRefused(f"vLLM cannot load this adapter: {e}") from None
            raise
        self._loaded[name] = None
        self._on_load()
        self._tidy()

    def drop(self, adapter: VllmAdapter) -> None:
        """Unloads an adapter that nobody will use again."""
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
            await self._client.unload(name)
        except VllmError as e:
            log.warning("an adapter could not be unloaded", adapter=name, error=str(e))


def _digest(text: str, size_bytes: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size_bytes).hexdigest()
