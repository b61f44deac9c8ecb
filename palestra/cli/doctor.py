"""`palestra doctor`: what works here, and the command that makes the rest work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError

import rich_click as click

from palestra.cli.machine import (
    Extra,
    Machine,
    Torch,
    look_at_extras,
    look_at_machine,
    look_at_torch,
)
from palestra.cli.output import bytes_text, fail, print_json
from palestra.sandbox import backend
from palestra.util.programs import PROGRAMS


@dataclass(slots=True)
class DoctorVerdict:
    what: str
    works: bool
    why: str
    """The reason why it does not work, with the command that helps if there is one; empty if there is nothing to
    add."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(as_json: bool) -> None:
    """Show what works on this machine and what to install for the rest."""
    try:
        extras = look_at_extras()
    except PackageNotFoundError as error:
        raise fail("palestra runs from its source folder but is not installed; type: pip install -e .") from error
    machine, torch = look_at_machine(), look_at_torch()
    tools = {name: one.find() for name, one in PROGRAMS.items()}
    verdicts = judge(torch, extras, has_nvidia_driver=tools["nvidia-smi"] is not None)
    problem = backend("local").problem()
    verdicts.append(DoctorVerdict("agents and verifiers in sandboxes", problem is None, problem or ""))
    if as_json:
        print_json(
            {
                "machine": asdict(machine),
                "torch": asdict(torch) if isinstance(torch, Torch) else None,
                "torch_error": torch if isinstance(torch, str) else None,
                "extras": {extra.name: _extra_json(extra) for extra in extras},
                "tools": tools,
                "missing": [
                    {"name": name, "used_for": one.used_for, "install": one.install}
                    for name, one in PROGRAMS.items()
                    if tools[name] is None
                ],
                "verdict": [asdict(verdict) for verdict in verdicts],
            }
        )
        return
    _print_machine(machine, torch)
    _print_extras(extras)
    _print_programs(tools)
    for verdict in verdicts:
        note = f"  ({verdict.why})" if verdict.why else ""
        click.echo(
            f"{verdict.what}: {click.style('yes', 'green') if verdict.works else click.style('no', 'red')}{note}"
        )


def judge(torch: Torch | str | None, extras: list[Extra], has_nvidia_driver: bool) -> list[DoctorVerdict]:
    engine = next(extra for extra in extras if extra.name == "engine")
    trouble = ""
    if isinstance(torch, str):
        trouble = f"torch is installed but does not load: {torch}"
    elif torch is None or not engine.is_complete:
        trouble = install_command(engine)
    return [
        DoctorVerdict("sampling and training on CPU", not trouble, trouble),
        DoctorVerdict("sampling and training on GPU", *_judge_gpu(torch, trouble, has_nvidia_driver)),
    ]


def _judge_gpu(torch: Torch | str | None, trouble: str, has_nvidia_driver: bool) -> tuple[bool, str]:
    if trouble or not isinstance(torch, Torch):
        return False, trouble
    if torch.gpus:
        return True, f"{_gpus_text(torch)}; {_kernels_text(torch)}"
    if not has_nvidia_driver:
        return False, "no NVIDIA GPU here"
    if torch.build == "cpu":
        return False, "there is an NVIDIA driver, but this torch is a CPU build: install a CUDA build of torch"
    return False, f"there is an NVIDIA driver, but torch ({torch.build}) sees no GPU: compare with nvidia-smi"


def install_command(extra: Extra) -> str:
    return f"pip install 'palestra[{extra.name}]'"


def _extra_json(extra: Extra) -> dict[str, object]:
    return {
        "complete": extra.is_complete,
        "packages": [asdict(package) for package in extra.packages],
        "install": None if extra.is_complete else install_command(extra),
    }


def _gpus_text(torch: Torch) -> str:
    return "; ".join(f"{gpu.name}, {bytes_text(gpu.memory_bytes)}, capability {gpu.capability}" for gpu in torch.gpus)


def _kernels_text(torch: Torch) -> str:
    if torch.triton is None:
        return "without Triton, plain torch code is used: correct, several times slower; type: pip install triton"
    if not torch.can_keep_kernels:
        where = f"{torch.kernel_cache} is not writable"
        return f"Triton {torch.triton}, but {where}: kernels are compiled at each start; set TRITON_CACHE_DIR"
    return f"Triton {torch.triton}; compiled kernels are kept in {torch.kernel_cache}"


def _print_machine(machine: Machine, torch: Torch | str | None) -> None:
    rows = {
        "palestra": f"{machine.palestra} on Python {machine.python}",
        "platform": machine.platform,
        "processor": f"{machine.cpu}, {machine.cores} cores ({' '.join(machine.cpu_features) or 'no extensions'})",
        "memory": f"{bytes_text(machine.memory_bytes)}, {bytes_text(machine.memory_available_bytes)} available",
        "disk": f"{bytes_text(machine.disk_free_bytes)} free here",
    }
    if isinstance(torch, Torch):
        rows["torch"] = f"{torch.version}, {torch.build} build, {torch.threads} threads, {torch.cpu_kernels} kernels"
        rows["accelerator"] = _gpus_text(torch) or ("Apple GPU (MPS)" if torch.mps else "none")
    else:
        rows["torch"] = "not installed" if torch is None else f"does not load: {torch}"
    for name, text in rows.items():
        click.echo(f"{name:<12} {text}")


def _print_programs(found: dict[str, str | None]) -> None:
    click.echo("\nPrograms")
    for name, path in found.items():
        one = PROGRAMS[name]
        click.echo(f"  {name:<10} {path or f'missing, for {one.used_for}: {one.install}'}")
    click.echo("")


def _print_extras(extras: list[Extra]) -> None:
    click.echo("\nExtras")
    for extra in extras:
        there = [f"{package.name} {package.installed}" for package in extra.packages if package.is_fine]
        lacking = [
            package.name + (f" {package.installed} ({package.wanted} needed)" if package.installed else "")
            for package in extra.packages
            if not package.is_fine
        ]
        click.echo(f"  {extra.name:<10} {'complete' if not lacking else 'missing: ' + ', '.join(lacking)}")
        if there:
            click.echo(f"  {'':<10} has: {', '.join(there)}")
        if lacking:
            click.echo(f"  {'':<10} {install_command(extra)}")
