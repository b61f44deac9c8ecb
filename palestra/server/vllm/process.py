"""A vLLM server of our own: started, its end noticed, stopped with all its children."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from palestra import __version__
from palestra.config.serve import ModelConfig
from palestra.server.vllm.probe import TARGETS
from palestra.types.engine import ModelCard
from palestra.util import processes
from palestra.util.log_files import last_lines, last_output, open_log

LAUNCHER = Path(__file__).with_name("launcher.py")
PLUGIN = Path(__file__).with_name("palestra_lora.py")
STOP_S = 15.0
ERROR_BYTES = 1 << 16
SHOWN_LINES = 3
# vLLM's own summary of a failure names nothing; the cause comes before it.
CAUSE = re.compile(r"(?:\w*(?:Error|Exception)|error): (?!Engine core init|.*root cause)(.+)")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where a server fetches adapters."""

    url: str
    key: str


class VllmProcess:
    def __init__(self, model: ModelConfig, number: int, source: AdapterSource, folder: Path, log_file: Path):
        self._model, self._number, self._source, self.log_file = model, number, source, log_file
        self._folder = folder
        """For its own use: the plugin that fetches adapters, and what it fetched."""
        self.api_key = secrets.token_hex(16)
        """Keeps others on this machine from using its port."""
        self.url = ""
        self._log_bytes_before = 0
        """Bytes of the log that earlier processes wrote."""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, card: ModelCard) -> None:
        """Starts it and returns at once: loading takes a while."""
        shutil.rmtree(self._folder, ignore_errors=True)
        plugins = await asyncio.to_thread(install_plugin, self._folder / "plugin")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with open_log(self.log_file) as out:
            self._log_bytes_before = out.seek(0, os.SEEK_END)
            self._process = await processes.spawn(
                *(str(self._model.vllm.python), LAUNCHER, str(os.getpid()), *self._arguments(card, port)),
                stdout=out,
                stderr=out,
                env=self._environment(plugins),
            )

    def _arguments(self, card: ModelCard, port: int) -> list[str]:
        vllm = self._model.vllm
        return [
            *("--model", str(self._model.path), "--served-model-name", self._model.name[0]),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", card.dtype),
            *("--enable-lora", "--max-lora-rank", str(vllm.max_lora_rank), "--max-loras", str(vllm.max_loras)),
            *("--lora-target-modules", *TARGETS),
            *("--max-cpu-loras", str(max(vllm.max_adapters, vllm.max_loras))),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prompt-tokens-details"),
            *("--structured-outputs-config", '{"backend": "guidance"}', "--disable-uvicorn-access-log", *vllm.args),
        ]

    def _environment(self, plugins: Path) -> dict[str, str]:
        ours = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": self.api_key, "VLLM_NO_USAGE_STATS": "1"}
        ours |= {"PALESTRA_URL": self._source.url, "PALESTRA_KEY": self._source.key}
        ours |= {"PALESTRA_ADAPTERS": str(self._folder / "adapters")}
        ours |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(plugins), os.environ.get("PYTHONPATH"))))}
        if self._model.vllm.devices:
            ours["CUDA_VISIBLE_DEVICES"] = self._model.vllm.devices[self._number]
        return os.environ | ours

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> None:
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """Stops it and its children; the latter also if it is dead already."""
        if self._process is not None:
            await processes.stop(self._process, STOP_S)

    @property
    def last_lines(self) -> str:
        """Returns its last lines joined to one, for a server that hangs."""
        return " | ".join(last_lines(self.log_file)[-SHOWN_LINES:])

    @property
    def last_output(self) -> str:
        """Returns why a process has ended."""
        written = self.log_file.stat().st_size - self._log_bytes_before
        lines = last_lines(self.log_file, min(written, ERROR_BYTES))
        causes = [found[1] for line in lines if (found := CAUSE.search(line))]
        return causes[-1].strip() if causes else last_output(self.log_file)


def install_plugin(folder: Path) -> Path:
    """Makes a folder for PYTHONPATH in which vLLM finds the plugin, as if it were installed there."""
    about = folder / f"{PLUGIN.stem}-{__version__}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(PLUGIN, folder / PLUGIN.name)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN.stem}\nVersion: {__version__}\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN.stem} = {PLUGIN.stem}:register\n")
    return folder


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
