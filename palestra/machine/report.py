"""What works on this machine, with the reason and the command that helps where something does not."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.machine.facts import Extra, Machine, Torch, look_at_extras, look_at_machine, look_at_torch
from palestra.sandbox import backend
from palestra.util.amounts import bytes_text
from palestra.util.programs import PROGRAMS


@dataclass(slots=True)
class DoctorVerdict:
    what: str
    works: bool
    why: str
    """The reason why it does not work, with the command that helps if there is one; empty if there is nothing to
    add."""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What was found on this machine, and what follows from it."""

    machine: Machine
    torch: Torch | str | None
    """The error as text if torch does not load; None: it is not installed."""
    extras: list[Extra]
    programs: dict[str, str | None]
    """Paths by name; None: a program is missing."""
    verdicts: list[DoctorVerdict]


def examine() -> MachineReport:
    """Looks at the machine, without changing anything. Raises importlib.metadata.PackageNotFoundError where palestra
    runs without being installed."""
    extras = look_at_extras()
    machine, torch = look_at_machine(), look_at_torch()
    programs = {name: one.find() for name, one in PROGRAMS.items()}
    verdicts = judge(torch, extras, has_nvidia_driver=programs["nvidia-smi"] is not None)
    problem = backend("local").problem()
    verdicts.append(DoctorVerdict("agents and verifiers in sandboxes", problem is None, problem or ""))
    return MachineReport(machine, torch, extras, programs, verdicts)


def judge(torch: Torch | str | None, extras: list[Extra], has_nvidia_driver: bool) -> list[DoctorVerdict]:
    engine = next(extra for extra in extras if extra.name == "engine")
    trouble = ""
    if isinstance(torch, str):
        trouble = f"torch is installed but does not load: {torch}"
    elif torch is None or not engine.is_complete:
        trouble = engine.install_command
    return [
        DoctorVerdict("sampling and training on CPU", not trouble, trouble),
        DoctorVerdict("sampling and training on GPU", *_judge_gpu(torch, trouble, has_nvidia_driver)),
    ]


def _judge_gpu(torch: Torch | str | None, trouble: str, has_nvidia_driver: bool) -> tuple[bool, str]:
    if trouble or not isinstance(torch, Torch):
        return False, trouble
    if torch.gpus:
        return True, f"{gpus_text(torch)}; {_kernels_text(torch)}"
    if not has_nvidia_driver:
        return False, "no NVIDIA GPU here"
    if torch.build == "cpu":
        return False, "there is an NVIDIA driver, but this torch is a CPU build: install a CUDA build of torch"
    return False, f"there is an NVIDIA driver, but torch ({torch.build}) sees no GPU: compare with nvidia-smi"


def gpus_text(torch: Torch) -> str:
    return "; ".join(f"{gpu.name}, {bytes_text(gpu.memory_bytes)}, capability {gpu.capability}" for gpu in torch.gpus)


def _kernels_text(torch: Torch) -> str:
    if torch.triton is None:
        return "without Triton, plain torch code is used: correct, several times slower; type: pip install triton"
    if not torch.can_keep_kernels:
        where = f"{torch.kernel_cache} is not writable"
        return f"Triton {torch.triton}, but {where}: kernels are compiled at each start; set TRITON_CACHE_DIR"
    return f"Triton {torch.triton}; compiled kernels are kept in {torch.kernel_cache}"
