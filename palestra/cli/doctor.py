"""`palestra doctor`: what works here, and the command that makes the rest work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError

import rich_click as click

from palestra.cli.output import fail, print_json
from palestra.machine.facts import Extra, Machine, Torch
from palestra.machine.report import MachineReport, examine, gpus_text
from palestra.util.amounts import bytes_text
from palestra.util.programs import PROGRAMS


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(as_json: bool) -> None:
    """Show what works on this machine and what to install for the rest."""
    try:
        found = examine()
    except PackageNotFoundError as error:
        raise fail("palestra runs from its source folder but is not installed; type: pip install -e .") from error
    if as_json:
        print_json(_report_json(found))
        return
    _print_machine(found.machine, found.torch)
    _print_extras(found.extras)
    _print_programs(found.programs)
    for verdict in found.verdicts:
        note = f"  ({verdict.why})" if verdict.why else ""
        click.echo(
            f"{verdict.what}: {click.style('yes', 'green') if verdict.works else click.style('no', 'red')}{note}"
        )


def _report_json(found: MachineReport) -> dict[str, object]:
    return {
        "machine": asdict(found.machine),
        "torch": asdict(found.torch) if isinstance(found.torch, Torch) else None,
        "torch_error": found.torch if isinstance(found.torch, str) else None,
        "extras": {extra.name: _extra_json(extra) for extra in found.extras},
        "tools": found.programs,
        "missing": [
            {"name": name, "used_for": PROGRAMS[name].used_for, "install": PROGRAMS[name].install}
            for name, path in found.programs.items()
            if path is None
        ],
        "verdict": [asdict(verdict) for verdict in found.verdicts],
    }


def _extra_json(extra: Extra) -> dict[str, object]:
    return {
        "complete": extra.is_complete,
        "packages": [asdict(package) for package in extra.packages],
        "install": None if extra.is_complete else extra.install_command,
    }


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
        rows["accelerator"] = gpus_text(torch) or ("Apple GPU (MPS)" if torch.mps else "none")
    else:
        rows["torch"] = "not installed" if torch is None else f"does not load: {torch}"
    for name, text in rows.items():
        click.echo(f"{name:<12} {text}")


def _print_programs(found: Mapping[str, str | None]) -> None:
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
            click.echo(f"  {'':<10} {extra.install_command}")
