"""Real vLLM servers, and `palestra serve` in front of them.

    def test_x(pair): ...             one with two vLLM servers at given addresses; shared, never killed
    def test_y(own): ...              one that started its vLLM itself, which may be killed

vLLM is the CPU build in `.venv-vllm` (`make vllm`), or what the Python named by PALESTRA_VLLM_PYTHON has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from palestra.config.bundled import bundled_model
from palestra.server.vllm.process import install_plugin
from tests.ports import free_port
from tests.server.conftest import KEY
from tests.server.model_api.conftest import MODEL, Ephebe

PYTHON = Path(os.environ.get("PALESTRA_VLLM_PYTHON") or Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python")
START_S = 400.0
RANK = 16
COMPILED = "compiled"
"""In the state folder: whatever torch has compiled."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "4", "--generation-config", "vllm")
FLAGS += ("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FLAGS += ("--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details", "--dtype", "float32")
FLAGS += ("--structured-outputs-config", '{"backend": "guidance"}')


class Served(Ephebe):
    """With vLLM as its sampler."""

    def __init__(self, folder: Path, **vllm: Any):
        model = bundled_model(MODEL)
        assert model is not None
        settings = {f"models.0.vllm.{name}": value for name, value in (vllm | {"max_lora_rank": RANK}).items()}
        super().__init__(folder, model, "models.0.sampler=vllm", "models.0.threads=1", **settings)


class Vllm:
    """A server as somebody else might start it."""

    def __init__(self, folder: Path, python: str, sources: list[int]):
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"vllm-{port}.log"
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bundled_model(MODEL))]
        command += ["--served-model-name", "theirs", "--host", "127.0.0.1", "--port", str(port), *FLAGS]
        plugin = {"PYTHONPATH": str(install_plugin(folder / "plugin"))}
        plugin |= {"PALESTRA_URL": ",".join(f"http://127.0.0.1:{source}" for source in sources), "PALESTRA_KEY": KEY}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT | plugin, start_new_session=True
            )
        self.http = httpx.Client(base_url=self.url, timeout=30, verify=False, trust_env=False)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            said = self.log.read_text(errors="replace")[-4000:]
            assert self._process.poll() is None, f"vLLM ended:\n{said}"
            assert time.monotonic() < deadline, f"vLLM was not ready:\n{said}"
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def count(self, name: str) -> float:
        """A metric of its own, over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    @property
    def adapters(self) -> list[str]:
        return [m["id"] for m in self.http.get("/v1/models").json()["data"] if m["parent"] is not None]

    def end(self) -> None:
        self.http.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


@pytest.fixture(scope="session")
def ports() -> tuple[int, ...]:
    """Of the servers in front of `vllms`, which have to know them."""
    return free_port(), free_port(), free_port()


@pytest.fixture(scope="session")
def vllm_python() -> str:
    if not PYTHON.exists():
        pytest.skip(f"needs vLLM at {PYTHON}: make vllm, or PALESTRA_VLLM_PYTHON")
    return str(PYTHON)


@pytest.fixture(scope="session")
def vllms(
    tmp_path_factory: pytest.TempPathFactory, vllm_python: str, ports: tuple[int, ...]
) -> Iterator[tuple[Vllm, Vllm]]:
    folder = tmp_path_factory.mktemp("vllm")
    two = Vllm(folder, vllm_python, [*ports]), Vllm(folder, vllm_python, [*ports])
    try:
        for one in two:
            one.wait_ready()
        yield two
    finally:
        for one in two:
            one.end()


@pytest.fixture(scope="session")
def pair(
    tmp_path_factory: pytest.TempPathFactory, vllms: tuple[Vllm, Vllm], ports: tuple[int, ...]
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pair")
    with Served(folder, urls=[one.url for one in vllms], max_adapters=4) as server:
        server.port = ports[0]
        server.launch()
        server.wait_ready(START_S)
        yield server


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Iterator[Served]:
    """As docs/distributed.md starts it."""
    with Served(tmp_path_factory.mktemp("own"), python=vllm_python) as server:
        server.environment["TORCHINDUCTOR_CACHE_DIR"] = str(server.state / COMPILED)
        server.launch()
        server.wait_ready(START_S)
        yield server
        assert server.stop() == 0  # and it leaves nothing behind
