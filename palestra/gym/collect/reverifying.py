"""Grades stored rollouts again by the verifiers of a running gym, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path

import orjson
from msgspec import Struct

from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.collect.files import JsonLinesFile, OutputFiles, read_lines
from palestra.gym.collect.pairing import RowWithResult, indexed, paired
from palestra.gym.collect.playing import as_finished
from palestra.gym.collect.rows import Key, agent_of, key_of
from palestra.gym.errors import CollectError, answer_failure
from palestra.gym.records import ServerKind
from palestra.gym.servers.resources import JUDGE_WORDS
from palestra.net.http_client import CallFailed, HttpClient
from palestra.types.gym import AGENT_REF, FAILURE_CLASS, FAILURE_REASON, FAILURE_TERMINAL, ROLLOUT_INDEX, TASK_INDEX
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.util.json_types import JsonMapping, JsonObject

UNSUPPORTED = "unsupported"
ATTEMPTS = 3
LIMIT_S = 1_800.0
_MARKS = (FAILURE_CLASS, FAILURE_REASON, FAILURE_TERMINAL, JUDGE_WORDS)


class ReverifyRequest(Struct, frozen=True, kw_only=True):
    """What to grade again."""

    inputs: Path
    rollouts: Path
    output: Path
    concurrency: int = 64
    limit: int | None = None
    force: bool = False
    """Also by servers that say they cannot; the name of the output then begins with `unsafe_`."""
    judge_failed_only: bool = False
    """Keep the results, and grade those rollouts of the failures file whose judge failed."""
    append: bool = False
    """With `judge_failed_only`: append to an output that already has the results."""
    resume: bool = False
    overwrite: bool = False

    @property
    def files(self) -> OutputFiles:
        return OutputFiles(self.output.with_name(f"unsafe_{self.output.name}") if self.force else self.output)


class ReverifyStatus(Struct):
    total: int
    done: int = 0
    failed: int = 0
    kept: int = 0
    """Number of results that were copied unchanged."""
    changed: int = 0
    """Number of results with another reward than before."""


class Grader:
    """Calls the resources server of each row's agent."""

    def __init__(self, client: HttpClient, directory: ServerDirectory, gym: JsonMapping) -> None:
        self._client = client
        self._urls = directory.urls
        self._servers = {name: found for name, block in gym.items() if (found := _resources_of(block))}
        only = [name for name, kind in directory.kinds.items() if kind == ServerKind.RESOURCES]
        self._only = only[0] if len(only) == 1 else None

    def server_of(self, row: JsonMapping) -> str:
        """Returns the server of the row's agent; if the gym does not have the agent, the only server there is. Raises
        CollectError."""
        name = self._servers.get(agent_of(row) or "") or self._only
        if name is None or name not in self._urls:
            raise CollectError(f"the gym has no resources server for agent {agent_of(row)!r}; start it with that agent")
        return name

    async def check(self, rows: Iterable[JsonMapping]) -> None:
        """Raises CollectError if a server says that its verdict needs more than the rollout."""
        for name in sorted({self.server_of(row) for row in rows}):
            reply = await self._client.get(f"{self._urls[name]}/reverify_mode", timeout_s=LIMIT_S)
            if reply.status == 200 and reply.json() == UNSUPPORTED:
                raise CollectError(
                    f"{name} does not support grading of stored rollouts; --any-verifier does it at your own risk"
                )

    async def grade(self, pair: RowWithResult) -> JsonObject:
        """Returns the new result, or a failure. It raises only when it is cancelled."""
        result = {name: value for name, value in pair.result.items() if name not in _MARKS}
        body = orjson.dumps({**result, **pair.row, "response": pair.result.get("response")})
        name = self.server_of(pair.row)
        failure = RowFailure.of(FailureClass.VERIFIER_ERROR, f"{name} got no request")
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(attempt)
            try:
                reply = await self._client.post(f"{self._urls[name]}/verify", body, timeout_s=LIMIT_S)
                if reply.status == 200:
                    return {**result, **reply.json(), **_labels(pair.row)}
                failure = answer_failure(name, "/verify", reply.status, reply.body)
                if failure.is_final:
                    break
            except TimeoutError:
                failure = RowFailure.of(FailureClass.TIMEOUT, f"{name} returned no verdict within {LIMIT_S:g} s")
            except CallFailed as error:
                failure = RowFailure.of(FailureClass.SERVER_DIED, f"{name}: {error}")
            except ValueError as error:
                failure = RowFailure.of(FailureClass.BAD_ANSWER, f"{name} returned no JSON: {error}")
        return {**pair.result, **failure.fields(), **_labels(pair.row)}


async def reverify(
    request: ReverifyRequest, grader: Grader, on_progress: Callable[[ReverifyStatus], None] = lambda _: None
) -> ReverifyStatus:
    """Grades. Raises CollectError; what was written until then stays, for `resume`."""
    files = request.files
    pairs = _pairs(request)[: request.limit]
    if not request.force:
        await grader.check(pair.row for pair in pairs)
    if files.results.resolve() == request.rollouts.resolve() and not request.append:
        raise CollectError("--output is the file of the rollouts; choose another, or use --judge-failed-only --append")
    with JsonLinesFile(files.results) as results, JsonLinesFile(files.failures) as failures:
        done = _begun(files, results, failures, request)
        left = [pair for pair in pairs if key_of(pair.row) not in done]
        standing = ReverifyStatus(total=len(pairs), done=len(pairs) - len(left))
        if request.judge_failed_only:
            standing.kept = _keep(request, results, done)

        async def graded_pair(pair: RowWithResult) -> tuple[RowWithResult, JsonObject]:
            return pair, await grader.grade(pair)

        async with aclosing(as_finished(graded_pair, left, request.concurrency)) as all_graded:
            async for pair, graded in all_graded:
                _note(standing, pair, graded, results, failures)
                on_progress(standing)
    return standing


def _note(
    standing: ReverifyStatus, pair: RowWithResult, graded: JsonObject, results: JsonLinesFile, failures: JsonLinesFile
) -> None:
    if graded.get(FAILURE_CLASS):
        failures.append(graded)
        standing.failed += 1
        return
    results.append(graded)
    standing.done += 1
    standing.changed += graded.get("reward") != pair.result.get("reward")


def _pairs(request: ReverifyRequest) -> list[RowWithResult]:
    if not request.judge_failed_only:
        return paired(request.inputs, request.rollouts, partial=True)
    rows, good = indexed(request.inputs), indexed(request.rollouts)
    failed = {
        key_of(one): one
        for one in read_lines(OutputFiles(request.rollouts).failures)
        if one.get(FAILURE_CLASS) == FailureClass.JUDGE_FAILED and TASK_INDEX in one and ROLLOUT_INDEX in one
    }
    return [RowWithResult(rows[key], failed[key]) for key in sorted(failed) if key in rows and key not in good]


def _begun(files: OutputFiles, results: JsonLinesFile, failures: JsonLinesFile, request: ReverifyRequest) -> set[Key]:
    """Returns what is in the output already."""
    if not results.is_empty and not (request.resume or request.append):
        if not request.overwrite:
            raise CollectError(f"{files.results} exists; continue it with --resume, or replace it with --overwrite")
        files.start_over(results, failures)
    return set(indexed(files.results))


def _keep(request: ReverifyRequest, results: JsonLinesFile, done: set[Key]) -> int:
    """Copies the good results unchanged to a new output first."""
    kept = [one for key, one in indexed(request.rollouts).items() if key not in done]
    for one in kept:
        results.append(one)
    return len(kept)


def _labels(row: JsonMapping) -> JsonObject:
    return {name: row[name] for name in (TASK_INDEX, ROLLOUT_INDEX, AGENT_REF)}


def _resources_of(block: object) -> str | None:
    """Returns the resources server that an agent's block refers to."""
    agents = block.get(ServerKind.AGENT) if isinstance(block, Mapping) else None
    settings = next(iter(agents.values()), None) if isinstance(agents, Mapping) else None
    reference = settings.get("resources_server") if isinstance(settings, Mapping) else None
    return reference.get("name") if isinstance(reference, Mapping) else None
