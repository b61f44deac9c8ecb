"""A coding task as it was read from its folder, whatever the folder's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from palestra.sandbox.spec import GIB
from palestra.util.json_types import JsonMapping

PROTECTED = ("conftest.py", "pytest.ini", "sitecustomize.py", "usercustomize.py", "*.pth")
"""Names of files that change what a test run does without being named in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """What the agent, and after it the verifier, may use."""

    agent_s: float = 900.0
    verifier_s: float = 600.0
    cpus: float = 1.0
    memory_bytes: int = 2 * GIB
    disk_bytes: int = GIB


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A file of the task's folder, and where it goes."""

    source: Path
    path: str
    """Absolute, in the sandbox."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command that makes a part of the environment."""

    command: str
    cwd: str


class VerifierFormat(StrEnum):
    """How a verifier says what it found."""

    REWARD_FILE = "reward-file"
    """Harbor's: `/logs/verifier/reward.txt` or `reward.json`."""
    PYTEST_SUMMARY = "pytest-summary"
    """Terminal-Bench's: the lines after pytest's `short test summary info`."""


class RewardPart(BaseModel):
    """One part of a reward: a `[[palestra.reward]]` table of `task.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    """Name of the metric."""
    kind: Literal["tests", "cases", "command", "diff"]
    """`tests`: the test script. `cases`: `tests/cases.txt`. `command`: a command that should succeed, such as a build
    or a linter. `diff`: how many lines were changed. Where it is the name, it can be left out."""
    weight: float = 1.0
    """The reward is the sum of the parts' values, each times its weight."""
    command: str = ""
    """The command of a part of kind `command`; 1 if it ends with status 0, else 0."""
    score: Literal["all", "share"] = "all"
    """Value of the cases: 1 if `all` pass, else 0; or the `share` that does."""
    lines: int = Field(default=50, ge=1)
    """Changed lines up to which a part of kind `diff` is 1; it falls to 0 at twice as many, and is 0 for none."""
    requires: str | None = None
    """Name of another part; unless that one is 1, this one is 0."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_kind(cls, given: object) -> object:
        return {"kind": given.get("name"), **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _has_command(self) -> RewardPart:
        if (self.kind == "command") != bool(self.command):
            raise ValueError("`command` is what a part of kind 'command' has, and no other")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingTask:
    """A task for an agent in a sandbox."""

    id: str
    """The name of its folder."""
    folder: Path
    instruction: str
    workdir: str = "/app"
    """Folder in which the agent works, and of which the verifier gets a copy."""
    steps: tuple[TaskFile | RunStep, ...] = ()
    """What makes the environment, in order."""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: TaskLimits = field(default_factory=TaskLimits)
    image: str | None = None
    """An image that was built for it, for docker and podman."""
    dockerfile: Path | None = None
    build_context: Path | None = None
    needs_image: str | None = None
    """Why this task cannot be played without its image; None: it can."""
    tests: Path | None = None
    """The folder of the tests; it is `/tests` for the verifier."""
    test_script: str | None = None
    """Name of the script in it."""
    verifier_format: VerifierFormat = VerifierFormat.REWARD_FILE
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    has_installers: bool = False
    """The test script installs what it needs: stand-ins for the installers find out whether it is there."""
    needs_network: str | None = None
    """Why the verifier cannot run in a sandbox, which has no network; None: nothing is known."""
    solution: Path | None = None
    """The script that solves the task."""
    parts: tuple[RewardPart, ...] = ()
    protect: tuple[str, ...] = PROTECTED
    """Patterns for names of files that the verifier sees as the environment had them."""
    metadata: JsonMapping = field(default_factory=dict)

    @property
    def level(self) -> str:
        """The task's level or difficulty, in the words of its author; empty if it has none."""
        found = (self.metadata.get(key) for key in ("level", "difficulty"))
        return next((str(one) for one in found if one not in (None, "")), "")

    @property
    def tags(self) -> list[str]:
        found = self.metadata.get("tags")
        return [str(one) for one in found] if isinstance(found, list) else []

    @property
    def files(self) -> list[TaskFile]:
        """The environment's files, without what commands make."""
        return [one for one in self.steps if isinstance(one, TaskFile)]
