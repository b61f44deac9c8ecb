"""Task folders in Terminal-Bench's first format, before Harbor.

```text
task.yaml   Dockerfile   docker-compose.yaml   run-tests.sh   tests/   solution.sh
```
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.coding.dockerfile import read_dockerfile
from palestra.coding.errors import TaskError, wrong_setting
from palestra.coding.network import installers
from palestra.coding.task import CodingTask, RewardPart, TaskLimits, VerifierFormat

SETTINGS = "task.yaml"
TEST_SCRIPT = "run-tests.sh"
HIDDEN = {SETTINGS, TEST_SCRIPT, "tests", "solution.sh", "solution.yaml"}
"""Files beside the Dockerfile that an agent must not see, even if it copies everything."""


class _TaskYaml(BaseModel):
    model_config = ConfigDict(extra="allow")

    instruction: str = Field(min_length=1)
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = Field(default=360.0, gt=0)
    max_test_timeout_sec: float = Field(default=60.0, gt=0)


def read(folder: Path) -> CodingTask:
    """Reads the task. Raises TaskError."""
    settings = _settings(folder / SETTINGS)
    _check_services(folder / "docker-compose.yaml")
    dockerfile, script = folder / "Dockerfile", folder / TEST_SCRIPT
    if not dockerfile.is_file():
        raise TaskError(f"{dockerfile} is missing: a task needs an environment")
    if not script.is_file():
        raise TaskError(f"{script} is missing: a task needs a verifier")
    build = read_dockerfile(dockerfile, folder, HIDDEN)
    has_installers, needs_network = installers(script)
    solution = folder / "solution.sh"
    return CodingTask(
        id=folder.name,
        folder=folder,
        instruction=settings.instruction.strip(),
        workdir=build.workdir if build.workdir != "/" else "/app",  # that of its base images
        steps=tuple(build.steps),
        env=build.env,
        limits=TaskLimits(agent_s=settings.max_agent_timeout_sec, verifier_s=settings.max_test_timeout_sec),
        dockerfile=dockerfile,
        build_context=folder,
        needs_image=build.needs_image,
        tests=folder / "tests",
        test_script=TEST_SCRIPT,
        verifier_format=VerifierFormat.PYTEST_SUMMARY,
        verifier_env={"TEST_DIR": "/tests"},
        has_installers=has_installers,
        needs_network=needs_network,
        solution=solution if solution.is_file() else None,
        parts=(RewardPart(name="tests", kind="tests"),),
        metadata=settings.model_extra or {},
    )


def _settings(file: Path) -> _TaskYaml:
    try:
        settings = _TaskYaml.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise TaskError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise wrong_setting(file, error) from error
    if settings.parser_name != "pytest":
        raise TaskError(f"{file}: parser_name is {settings.parser_name!r}; only pytest's summary can be read")
    return settings


def _check_services(file: Path) -> None:
    if not file.is_file():
        return
    found = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    services = list(found.get("services") or {}) if isinstance(found, dict) else []
    if len(services) > 1:
        raise TaskError(
            f"{file} has the services {', '.join(services)}: tasks with several containers cannot be played"
        )
