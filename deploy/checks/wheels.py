"""Wheels: built once, and installed into an empty environment for each extra."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from checks.base import ROOT, CheckFailed, Workplace, free_port, run, smoke

EXTRAS = {
    "": ("palestra.config.serve", "palestra.runs"),
    "server": ("palestra.server.main",),
    "server,vision": ("palestra.server.main", "PIL.Image"),
    "server,otel": ("palestra.server.core.telemetry.otlp",),
    "server,postgres": ("palestra.server.main", "psycopg"),
    "view": ("palestra.view.serving",),
    "platform": ("palestra.environments.platform.api.serving",),
    "fleet": ("palestra.environments.fleet.env",),
    "gym": ("palestra.gym.supervisor.supervisor",),
    "listen": ("palestra.runs.listener",),
    "train": ("palestra.training.launch",),
    "engine": ("palestra.engine.worker", "palestra.engine.torch_backend"),
    "server,engine": ("palestra.server.main", "palestra.engine.worker"),
}
"""What each must be able to import. Not here: `ray`, `vllm` and `trackers`, which only bring large packages along."""
TORCH = {"engine", "server,engine"}


def build_wheel(work: Workplace) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder := work.fresh("dist"), ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_wheels(work: Workplace) -> str:
    wheel = build_wheel(work)
    lines = [f"{wheel.name} has {wheel.stat().st_size / 1e6:.0f} MB"]
    for extras, modules in EXTRAS.items():
        environment = _install(work, wheel, extras)
        _judge(environment, extras, modules)
        if extras == "server,engine":
            state, port = work.fresh("state"), free_port()
            command = (
                environment / "bin" / "palestra",
                "serve",
                "--port",
                port,
                "--state",
                state,
                "models.0.threads=1",
            )
            lines.append(smoke(port, "--", *map(str, command)))
    return f"{len(EXTRAS)} environments; {'; '.join(lines)}"


def _install(work: Workplace, wheel: Path, extras: str) -> Path:
    environment = work.fresh(f"venv-{extras.replace(',', '-') or 'core'}")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python, name = environment / "bin" / "python", f"{wheel}[{extras}]" if extras else str(wheel)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    if extras in TORCH:
        try:
            run(*pip, f"{_torch()}+cpu")
        except CheckFailed:
            run(*pip, _torch())
    run(*pip, name)
    return environment


def _torch() -> str:
    """The version that the images have."""
    pins = (ROOT / "deploy" / "constraints.txt").read_text().split()
    (torch,) = [pin for pin in pins if pin.startswith("torch==")]
    return torch


def _judge(environment: Path, extras: str, modules: tuple[str, ...]) -> None:
    palestra, python = environment / "bin" / "palestra", environment / "bin" / "python"
    run(palestra, "--help")
    facts = json.loads(run(palestra, "doctor", "--json"))
    for extra in filter(None, extras.split(",")):
        if not facts["extras"][extra]["complete"]:
            raise CheckFailed(
                f"with [{extras}], `palestra doctor` misses packages of {extra}: {facts['extras'][extra]}"
            )
    if (facts["torch"] is not None) != (extras in TORCH):
        raise CheckFailed(f"with [{extras}] torch is {facts['torch'] or 'not there'}")
    run(python, "-c", ";".join(f"import {module}" for module in modules))
    config = json.loads(run(palestra, "config", "show", "serve"))
    (model,) = config["models"]
    if not Path(model["path"], "model.safetensors").is_file():
        raise CheckFailed(f"the bundled model is not in the wheel: {model['path']}")
