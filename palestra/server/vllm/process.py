"""A vLLM server of our own: started, its end noticed, stopped with all its children.

Owns: the process, its port, its log. Never touches: what is requested of it; restarting it, which its watcher does.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from pathlib import Path

from palestra.config.serve import ModelConfig
from palestra.server.vllm.probe import TARGETS
from palestra.types.engine import ModelCard
from palestra.util import processes
from palestra.util.log_files import last_lines, last_output, open_log

LAUNCHER = Path(__file__).with_name("launcher.py")
STOP_S = 15.0
ERROR_BYTES = 1 << 16
SHOWN_LINES = 3
# vLLM's own summary of a failure names nothing; the cause comes before it.
CAUSE = re.compile(r"(?:\w*(?:Error|Exception)|error): (?!Engine core init|.*root cause)(.+)")


class VllmProcess:
    def __init__(self, model: ModelConfig, number: int, log_file: Path):
        self._model, self._number, self.log_file = model, number, log_file
        self.api_key = secrets.token_hex(16)
        """Keeps others on this machine from using its port."""
        self.url = ""
        self._said_before = 0
        """Bytes of the log that earlier processes wrote."""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, card: ModelCard) -> None:
        """Starts it and returns at once: loading takes a while."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with open_log(self.log_file) as out:
            self._said_before = out.seek(0, os.SEEK_END)
            self._process = await processes.spawn(
                *(str(self._model.vllm.python), LAUNCHER, str(os.getpid()), *self._arguments(card, port)),
                stdout=out,
                stderr=out,
                env=self._environment(),
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

    def _environment(self) -> dict[str, str]:
        ours = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": self.api_key, "VLLM_NO_USAGE_STATS": "1"}
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
        said = self.log_file.stat().st_size - self._said_before
        lines = last_lines(self.log_file, min(said, ERROR_BYTES))
        causes = [found[1] for line in lines if (found := CAUSE.search(line))]
        return causes[-1].strip() if causes else last_output(self.log_file)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
