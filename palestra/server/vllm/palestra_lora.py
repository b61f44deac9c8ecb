"""Lets a vLLM server fetch the adapters of a Palestra server, by digest: a LoRA resolver of vLLM's.

It runs in vLLM's Python, so it imports nothing of Palestra's. Settings, from the environment:

PALESTRA_URL       the address of the Palestra server, or of several, with commas between them
PALESTRA_KEY       a key with the right `replica` or `admin`
PALESTRA_ADAPTERS  a folder for the adapters; by default one that ends with vLLM, in memory where there is /dev/shm
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections import OrderedDict
from functools import cached_property
from pathlib import Path

from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry  # pyright: ignore[reportMissingImports]

log = logging.getLogger("vllm.palestra_lora")

NAME = re.compile(r"palestra-[0-9a-f]+-([0-9a-f]{64})(?:-[0-9]+)?")
CONFIG = "palestra_adapter_config"
PART_BYTES = 4 << 20
MAX_TRIES = 3
TIMEOUT_S = 60.0
MAX_KEPT = 64  # vLLM reads an adapter again when it has left its memory


class PalestraResolver(LoRAResolver):
    def __init__(self, urls: list[str], key: str, folder: str | None):
        self._urls, self._key, self._given_folder = urls, key, folder
        self._kept: OrderedDict[str, None] = OrderedDict()
        """Digests of the adapters in the folder, the least recently used first."""
        self._fetching: dict[str, asyncio.Lock] = {}

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        found = NAME.fullmatch(lora_name)
        if found is None:
            return None
        digest = found[1]
        async with self._fetching.setdefault(digest, asyncio.Lock()):
            if digest not in self._kept and not await asyncio.to_thread(self._fetch, digest):
                return None
        self._kept[digest] = None
        self._kept.move_to_end(digest)
        while len(self._kept) > MAX_KEPT:
            oldest, _ = self._kept.popitem(last=False)
            shutil.rmtree(self._folder / oldest, ignore_errors=True)
        return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(self._folder / digest))

    @cached_property
    def _folder(self) -> Path:
        if self._given_folder is not None:
            Path(self._given_folder).mkdir(parents=True, exist_ok=True)
            return Path(self._given_folder)
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = tempfile.mkdtemp(prefix="palestra-adapters-", dir=memory)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _fetch(self, digest: str) -> bool:
        """Fetches an adapter from the server that has it; returns whether one has."""
        failed: Exception | None = None
        for url in self._urls:
            try:
                self._fetch_from(url, digest)
                return True
            except urllib.error.HTTPError as e:
                if e.code != 404:
                    failed = RuntimeError(f"{url} refuses adapter {digest[:12]}: {e.code} {e.reason}")
            except (OSError, RuntimeError) as e:
                failed = e
        if failed is not None:
            log.error("adapter %s could not be fetched: %s", digest[:12], failed)
            raise failed
        return False

    def _fetch_from(self, url: str, digest: str) -> None:
        """Fetches a file, again if it does not match its digest."""
        for _ in range(MAX_TRIES):
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                file = Path(folder) / "adapter_model.safetensors"
                if self._download(url, digest, file) != digest:
                    log.error("adapter %s from %s does not match its digest", digest[:12], url)
                    continue
                (Path(folder) / "adapter_config.json").write_text(_config_of(file))
                shutil.rmtree(self._folder / digest, ignore_errors=True)
                Path(folder).rename(self._folder / digest)
                Path(folder).mkdir()  # for TemporaryDirectory to remove
                return
        raise RuntimeError(f"adapter {digest[:12]} from {url} does not match its digest, {MAX_TRIES} times in a row")

    def _download(self, url: str, digest: str, file: Path) -> str:
        """Returns the digest of what arrived. A connection that breaks is taken up where it ended."""
        hashed, size, broken, why = hashlib.sha256(), -1, 0, "it ends its answers early"
        with file.open("wb") as stream:
            while stream.tell() != size:
                if broken == MAX_TRIES:
                    raise RuntimeError(f"{url} does not answer: {why}")
                broken += 1
                request = urllib.request.Request(
                    f"{url}/engine/adapters/{digest}",
                    headers={"X-API-Key": self._key, "Range": f"bytes={stream.tell()}-"},
                )
                try:
                    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                        size = stream.tell() + int(response.headers["content-length"])
                        while part := response.read(PART_BYTES):
                            stream.write(part)
                            hashed.update(part)
                except urllib.error.HTTPError:
                    raise
                except OSError as e:
                    why = str(e)
        return hashed.hexdigest()


def _config_of(file: Path) -> str:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return header["__metadata__"][CONFIG]


def register() -> None:
    """Called by vLLM in each of its processes."""
    urls = [url.strip().rstrip("/") for url in os.environ.get("PALESTRA_URL", "").split(",") if url.strip()]
    if urls:
        key, folder = os.environ.get("PALESTRA_KEY", ""), os.environ.get("PALESTRA_ADAPTERS")
        LoRAResolverRegistry.register_resolver("palestra", PalestraResolver(urls, key, folder))
