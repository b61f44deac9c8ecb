"""Task folders in Harbor's format, with our own table `[palestra]` in `task.toml`.

```text
instruction.md   task.toml   environment/[Dockerfile, …]   tests/[test.sh, cases.txt, …]   solution/solve.sh
```
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from palestra.coding.dockerfile import DockerBuild, folder_files, read_dockerfile
from palestra.coding.errors import TaskError, wrong_setting
from palestra.coding.network import installers
from palestra.coding.task import PROTECTED, CodingTask, RewardPart, TaskLimits
from palestra.sandbox.spec import GIB, MIB
from palestra.util.json_types import JsonObject

SETTINGS = "task.toml"
WORKDIR = "/app"
CASES, TEST_SCRIPT, SOLUTION = "cases.txt", "test.sh", "solve.sh"
UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


def _mib(size: object) -> object:
    """Older files have sizes such as `4G`."""
    found = re.fullmatch(r"([\d.]+)\s*([KMG])B?", str(size).strip().upper())
    return float(found[1]) * UNITS[found[2]] if found else size


Mib = Annotated[float, BeforeValidator(_mib), Field(gt=0)]


class _Settings(BaseModel):
    """Harbor's own tables: what newer versions add may be there."""

    model_config = ConfigDict(extra="ignore")


class _Phase(_Settings):
    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = {}


class _Environment(_Settings):
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: Mib | None = None
    memory: Mib | None = None
    storage_mb: Mib | None = None
    storage: Mib | None = None
    gpus: int | None = None
    env: dict[str, str] = {}
    workdir: str | None = None


class _Palestra(BaseModel):
    """Our table."""

    model_config = ConfigDict(extra="forbid")

    local: bool = False
    protect: tuple[str, ...] = PROTECTED
    reward: tuple[RewardPart, ...] = ()


class _TaskToml(_Settings):
    metadata: JsonObject = {}
    agent: _Phase = _Phase()
    verifier: _Phase = _Phase()
    environment: _Environment = _Environment()
    palestra: _Palestra = _Palestra()
    steps: list[JsonObject] = []


def read(folder: Path) -> CodingTask:
    """Reads the task. Raises TaskError."""
    file = folder / SETTINGS
    settings = _settings(file)
    environment, tests, script = folder / "environment", folder / "tests", folder / "tests" / TEST_SCRIPT
    build = _build(folder, settings)
    is_by_cases = (tests / CASES).is_file()
    if not is_by_cases and not script.is_file():
        raise TaskError(f"{tests} has neither {TEST_SCRIPT} nor {CASES}: a task needs a verifier")
    needs_image = build.needs_image or (settings.environment.docker_image and "its environment is a prebuilt image")
    dockerfile = environment / "Dockerfile"
    has_installers, needs_network = (False, None) if is_by_cases else installers(script)
    return CodingTask(
        id=folder.name,
        folder=folder,
        instruction=_instruction(folder / "instruction.md"),
        workdir=settings.environment.workdir or build.workdir,
        steps=tuple(build.steps),
        env={**build.env, **settings.environment.env},
        limits=_limits(settings),
        image=settings.environment.docker_image,
        dockerfile=dockerfile if dockerfile.is_file() else None,
        build_context=environment,
        needs_image=None if settings.palestra.local else needs_image,
        tests=tests,
        test_script=None if is_by_cases else TEST_SCRIPT,
        verifier_env=settings.verifier.env,
        has_installers=has_installers,
        needs_network=None if settings.palestra.local else needs_network,
        solution=_file(folder / "solution" / SOLUTION),
        parts=_parts(file, settings, is_by_cases),
        protect=settings.palestra.protect,
        metadata=settings.metadata,
    )


def _settings(file: Path) -> _TaskToml:
    try:
        settings = _TaskToml.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file} is not TOML: {error}") from error
    except ValidationError as error:
        raise wrong_setting(file, error) from error
    if settings.steps:
        raise TaskError(
            f"{file} has [[steps]]: tasks of several steps cannot be played yet; split it into tasks of one"
        )
    if settings.environment.os.lower() != "linux":
        raise TaskError(f"{file}: environment.os is {settings.environment.os!r}: sandboxes are Linux only")
    if settings.environment.gpus:
        raise TaskError(f"{file}: environment.gpus: sandboxes have no GPU; set it to 0 if the task works without")
    return settings


def _build(folder: Path, settings: _TaskToml) -> DockerBuild:
    """Returns the Dockerfile's steps; without one, the files of `environment/` are copied into the working folder."""
    environment = folder / "environment"
    if (environment / "docker-compose.yaml").is_file():
        raise TaskError(f"{environment}/docker-compose.yaml: tasks with several containers cannot be played")
    if (environment / "Dockerfile").is_file():
        build = read_dockerfile(environment / "Dockerfile", environment)
        if build.workdir == "/" and not settings.environment.workdir:
            raise TaskError(f"{environment}/Dockerfile has no WORKDIR: add one, or environment.workdir to {SETTINGS}")
        return build
    workdir = settings.environment.workdir or WORKDIR
    return DockerBuild(workdir, [*folder_files(environment, workdir)] if environment.is_dir() else [])


def _instruction(file: Path) -> str:
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    if not text:
        raise TaskError(f"{file} is missing or empty: it should say what the agent is to do")
    return text


def _limits(settings: _TaskToml) -> TaskLimits:
    place, usual = settings.environment, TaskLimits()
    memory, disk = place.memory_mb or place.memory, place.storage_mb or place.storage
    return TaskLimits(
        agent_s=settings.agent.timeout_sec or usual.agent_s,
        verifier_s=settings.verifier.timeout_sec or usual.verifier_s,
        cpus=place.cpus or usual.cpus,
        memory_bytes=int(memory * MIB) if memory else usual.memory_bytes,
        disk_bytes=max(int(disk * MIB), MIB) if disk else GIB,
    )


def _parts(file: Path, settings: _TaskToml, is_by_cases: bool) -> tuple[RewardPart, ...]:
    kind = "cases" if is_by_cases else "tests"
    parts = settings.palestra.reward or (RewardPart(name="tests", kind=kind),)
    names = [one.name for one in parts]
    for part in parts:
        if names.count(part.name) > 1 or (part.requires is not None and part.requires not in names):
            raise TaskError(f"{file}: palestra.reward: {part.name!r} is there twice, or requires what is not there")
        if part.kind in ("cases", "tests") and part.kind != kind:
            raise TaskError(f"{file}: palestra.reward: {part.name!r} is of kind {part.kind!r}, but tests/ has {kind}")
    return parts


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None
