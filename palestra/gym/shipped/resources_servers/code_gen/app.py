"""Python programs, judged by what they print or return for hidden inputs."""

from __future__ import annotations

import ast
import json
import re
import time

from msgspec import Struct

from palestra.gym.errors import BadCall
from palestra.gym.grading.programs import Program, ProgramOutcome, sandbox_named
from palestra.gym.metrics import highest_k, pass_metrics, subset_metrics
from palestra.gym.records import ServerInstance
from palestra.gym.servers.base import Peers
from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings, ReverifyMode
from palestra.gym.servers.responses import output_text
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


class CodeSettings(ResourcesSettings, frozen=True, kw_only=True):
    num_processes: int | None = None
    """Number of programs at a time.  [one a core]"""
    unit_test_timeout_secs: float = 10.0
    memory_mib: int = 1024
    sandbox: str | None = None
    """A sandbox backend such as `local` or `docker`, with one sandbox for each program, or `module:Class` of a
    ProgramSandbox of your own.  [a child process that may only compute]"""
    trust_programs: bool = False
    """Run programs even if the kernel has no filter to restrict them."""
    debug: bool = False
    """Store errors in the row."""


class UnitTests(Struct, frozen=True):
    inputs: list[str]
    outputs: list[str]
    fn_name: str | None = None


class CodeGenMetadata(Struct, frozen=True):
    unit_tests: UnitTests
    difficulty: str | None = None


class CodeGen(ResourcesServer[CodeSettings]):
    reverify_mode = ReverifyMode.STATELESS

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self._sandbox = sandbox_named(self.settings.sandbox, self.settings.num_processes)

    async def verify(self, response: JsonObject, verifier_metadata: CodeGenMetadata) -> JsonMapping:
        tests = verifier_metadata.unit_tests
        if len(tests.inputs) != len(tests.outputs):
            raise BadCall(422, f"unit_tests have {len(tests.inputs)} inputs and {len(tests.outputs)} outputs")
        code = program_in(output_text(response))
        extra: JsonObject = {"extracted_model_code": code, "difficulty": verifier_metadata.difficulty}
        if code is None:
            return {"reward": 0.0, "result": [], **extra}
        program = Program(
            source=code,
            inputs=tests.inputs,
            function=tests.fn_name,
            test_s=self.settings.unit_test_timeout_secs,
            memory_bytes=self.settings.memory_mib * 2**20,
            are_trusted=self.settings.trust_programs,
        )
        start = time.monotonic()
        outcomes = await self._sandbox.run(program)
        extra["unit_tests_time_taken"] = time.monotonic() - start
        passed = [is_right(one, output, tests.fn_name) for one, output in zip(outcomes, tests.outputs, strict=True)]
        if self.settings.debug:
            extra["errors"] = [one.error for one in outcomes]
        return {"reward": float(bool(passed) and all(passed)), "result": passed, **extra}

    def compute_metrics(self, tasks: list[list[JsonMapping]]) -> JsonPayload:
        by_level = subset_metrics(tasks, "difficulty", answer_key="extracted_model_code")
        return {**pass_metrics(tasks, answer_key="extracted_model_code"), **by_level}

    def key_metrics(self, metrics: JsonObject) -> JsonPayload:
        kinds = ("pass@1[avg-of-{k}]", "pass@{k}")
        return {name: value for kind in kinds for name, value in highest_k(metrics, kind, ["accuracy"]).items()}


def program_in(text: str) -> str | None:
    """Returns the last fenced block; if there is none, the whole text if it is a program."""
    fenced = _FENCE.findall(text)
    if fenced:
        return fenced[-1].strip() or None
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text.strip() or None


def is_right(outcome: ProgramOutcome, expected: str, function: str | None) -> bool:
    if outcome.error is not None:
        return False
    if function is None:
        return (
            _lines(outcome.printed) == _lines(expected) or _numbers(outcome.printed) == _numbers(expected) is not None
        )
    try:
        parsed = json.loads(expected)
    except ValueError:
        parsed = expected
    return outcome.result == parsed


def _lines(text: str) -> list[str]:
    """Splits lines; spaces at the ends of lines, and empty lines at the end, do not count."""
    return [line.strip() for line in text.strip().splitlines()]


def _numbers(text: str) -> list[int | float] | None:
    """Returns all of it as numbers; None if there is anything else. Whole numbers stay whole: as floats, 10**18 and
    10**18 + 1 would be equal."""
    try:
        return [_number(word) for word in text.split()]
    except ValueError:
        return None


def _number(word: str) -> int | float:
    try:
        return int(word)
    except ValueError:
        return round(float(word), 9)
