"""Peak memory of training, each side in a process of its own: `python train_memory.py '{"side": "ours", …}'`.

Counted: all that comes after the imports (weights, adapter, gradients, optimizer, activations), at its highest during
two steps. On a GPU: what torch allocated there.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

STEPS = 2  # the second has the optimizer's state from the start


@dataclass(frozen=True, slots=True)
class MemoryJob:
    side: Literal["ours", "peft"]
    folder: str
    lengths: tuple[int, ...]
    dtype: str
    device: str
    batch: int = 1
    masked: bool = True
    checkpointing: bool = False


def peak_mib(job: MemoryJob) -> float:
    """Runs the job in a fresh interpreter."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, __file__, json.dumps(asdict(job))]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_mib"]


def main() -> None:
    job = MemoryJob(**json.loads(sys.argv[1]))
    job = MemoryJob(**{**asdict(job), "lengths": tuple(job.lengths)})
    build = _import_side(job)
    before = _resident_mib()
    step = build()
    _restart_peak(job.device)
    for _ in range(STEPS):
        step()
    print(json.dumps({"peak_mib": _peak_mib(before, job.device)}))


def _import_side(job: MemoryJob) -> Callable[[], Callable[[], float]]:
    """Everything is imported here, so that it does not count; what is returned loads the model."""
    from peers.workloads import TrainWork

    work = TrainWork(job.lengths)
    if job.side == "ours":
        from peers.ours import Ours

        from palestra.model import load_model

        def ours() -> Callable[[], float]:
            side = Ours(load_model(Path(job.folder), dtype=job.dtype, device=job.device))
            return side.stepper(work, side.adapters(1)[0], checkpointing=job.checkpointing)

        return ours

    import transformers.models.qwen3.modeling_qwen3  # else imported while loading  # noqa: F401
    from peers.peft_training import PeftSetup, PeftTrainer

    setup = PeftSetup(job.batch, job.masked)
    return lambda: PeftTrainer(Path(job.folder), dtype=job.dtype, device=job.device).stepper(work, setup)


def _restart_peak(device: str) -> None:
    """What loading needed for a moment is not what training needs."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _peak_mib(before: float, device: str) -> float:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return (_status_mib("VmHWM") or _rusage_mib()) - before


def _resident_mib() -> float:
    return _status_mib("VmRSS") or _rusage_mib()


def _status_mib(field: str) -> float | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass
    return None


def _rusage_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


if __name__ == "__main__":
    main()
