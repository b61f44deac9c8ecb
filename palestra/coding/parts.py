"""The parts of a reward: hidden tests, cases, commands such as builds and linters, and the size of the change."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from palestra.coding.cases import read_cases, run_cases
from palestra.coding.errors import TaskError, VerifierError
from palestra.coding.harbor import CASES
from palestra.coding.stand_ins import BEFORE, missing_packages, put_stand_ins
from palestra.coding.task import RewardPart, VerifierFormat
from palestra.coding.work import LOGS, TESTS, AgentWork, changes
from palestra.sandbox import ExecResult, Sandbox, SandboxEnded, SandboxError

REWARD = f"{LOGS}/verifier"
LOG_BYTES = 64 * 1024
REWARD_BYTES = 64 * 1024
SUMMARY = re.compile(r"=+ *short test summary info *=+")
RESULT = re.compile(r"^(PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)\b", re.MULTILINE)
FINE = {"PASSED", "SKIPPED", "XFAIL"}


@dataclass(frozen=True, slots=True)
class PartValue:
    """What a part came to."""

    value: float
    log: str = ""
    named: Mapping[str, float] = field(default_factory=dict)
    """Further values, by the names that a test script gave them."""


async def by_tests(part: RewardPart, work: AgentWork) -> PartValue:
    """Runs the test script and takes the reward that it says. A script that takes too long, or whose sandbox ends
    because of what it runs, is worth 0; one that ends without a reward has failed itself."""
    task = work.task
    async with work.copy(env=task.verifier_env, has_tests=True) as sandbox:
        script = f"{TESTS}/{task.test_script}"
        prepared = await sandbox.exec(f"mkdir -p {REWARD} && chmod 755 {script} && head -c 2 {script}")
        if prepared.status:
            raise TaskError(f"{script} cannot be run: {prepared.stderr.decode(errors='replace')[:200]}")
        command = [script] if prepared.stdout == b"#!" else ["/bin/bash", script]
        if task.has_installers:
            await put_stand_ins(sandbox)
            command = ["/bin/sh", "-c", BEFORE, "sh", *command]
        try:
            done = await sandbox.exec(command, limit_s=task.limits.verifier_s)
        except SandboxEnded as error:
            return PartValue(0.0, f"the verifier's sandbox was ended while the tests ran: {error}")
        log = _log(done)
        if done.is_late:
            return PartValue(0.0, f"{log}\nthe tests took longer than {task.limits.verifier_s:g} s")
        if task.has_installers and (missing := await missing_packages(sandbox)):
            raise VerifierError(
                f"the tests of {task.id} need what python3 in the sandbox does not have: {missing}", log
            )
        if task.verifier_format == VerifierFormat.PYTEST_SUMMARY:
            return PartValue(_from_summary(done, task.id), log)
        return await _from_files(sandbox, done, task.id)


async def _from_files(sandbox: Sandbox, done: ExecResult, task_id: str) -> PartValue:
    """Reads `reward.json` or `reward.txt`. Of several named rewards, `reward` counts, or their mean."""
    log = _log(done)
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await sandbox.read(f"{REWARD}/{name}", max_bytes=REWARD_BYTES)).decode(errors="replace")
        except SandboxError:
            continue
        found = _numbers(name, text)
        if not found:
            raise VerifierError(f"{name} of {task_id} should have numbers, has {text.strip()[:100]!r}", log)
        value = found.get("reward", sum(found.values()) / len(found))
        return PartValue(value, log, found if len(found) > 1 else {})
    raise VerifierError(f"the tests of {task_id} ended with status {done.status} and wrote no reward to {REWARD}", log)


def _numbers(name: str, text: str) -> dict[str, float]:
    """Returns rewards by name; none if something is not a number."""
    try:
        found = json.loads(text) if name.endswith(".json") else {"reward": float(text)}
        found = {str(key): float(value) for key, value in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
    return found if all(math.isfinite(one) for one in found.values()) else {}


def _from_summary(done: ExecResult, task_id: str) -> float:
    """1 if no test of pytest's summary failed, else 0."""
    summary = SUMMARY.split(done.text, maxsplit=1)
    results = RESULT.findall(summary[1]) if len(summary) > 1 else []
    if not results:
        raise VerifierError(
            f"the tests of {task_id} ended with status {done.status} without pytest's summary", _log(done)
        )
    return float(all(one in FINE for one in results))


async def by_cases(part: RewardPart, work: AgentWork) -> PartValue:
    """Runs the commands of the transcript and compares what they print."""
    assert work.task.tests is not None
    cases = read_cases(work.task.tests / CASES)
    async with work.copy(env=work.task.verifier_env) as sandbox:
        try:
            results = await run_cases(cases, sandbox, work.task.limits.verifier_s)
        except SandboxEnded as error:
            return PartValue(0.0, f"the verifier's sandbox was ended while the cases ran: {error}")
    passed = sum(one.is_passed for one in results)
    failed = [
        f"$ {one.case.command}\n{one.printed}\n(expected)\n{one.case.expected}" for one in results if not one.is_passed
    ]
    log = "\n".join([f"{passed} of {len(results)} cases passed", *failed])[-LOG_BYTES:]
    share = passed / len(results)
    return PartValue(float(share == 1) if part.score == "all" else share, log)


async def by_command(part: RewardPart, work: AgentWork) -> PartValue:
    """1 if the command succeeds. Python does not import from the working folder, where the agent may have put a module
    of the linter's name."""
    async with work.copy(env={**work.task.verifier_env, "PYTHONSAFEPATH": "1"}, has_tests=True) as sandbox:
        try:
            done = await sandbox.exec(part.command, limit_s=work.task.limits.verifier_s)
        except SandboxEnded as error:
            return PartValue(0.0, f"the verifier's sandbox was ended by `{part.command}`: {error}")
    if done.status in (126, 127):
        raise VerifierError(f"`{part.command}` cannot be run: the sandbox has no such program", _log(done))
    return PartValue(float(done.status == 0), f"$ {part.command}\n{_log(done)}\n[{done.status}]")


async def by_diff(part: RewardPart, work: AgentWork) -> PartValue:
    """1 for a change of few lines, less for more, 0 for none."""
    patch = await changes(work)
    lines = sum(1 for one in patch.splitlines() if re.match(r"[+-](?!\+\+ |-- )", one))
    value = 0.0 if not patch else min(1.0, max(0.0, 2.0 - lines / part.lines))
    return PartValue(value, f"{lines} changed lines")


def _log(done: ExecResult) -> str:
    text = done.text + done.stderr.decode(errors="replace")
    return text if len(text) <= LOG_BYTES else f"…{text[-LOG_BYTES:]}"


KINDS: dict[str, Callable[[RewardPart, AgentWork], Awaitable[PartValue]]] = {
    "tests": by_tests,
    "cases": by_cases,
    "command": by_command,
    "diff": by_diff,
}
