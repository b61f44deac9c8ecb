"""Verdicts over HTTP: the platform's own tasks by their key, verifiers that come with a task in a process of their own.

A verifier that cannot be run, or returns no score, is a failed execution: the SDK makes that an unknown score, not 0.
A verifier whose assertion fails has judged: its result is 0.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import os
import pickle
import re
import secrets
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypedDict

import msgspec

from palestra.environments.platform.api import wire
from palestra.environments.platform.api.auth import PlatformRefusal
from palestra.environments.platform.api.control import ControlRequest
from palestra.environments.platform.api.http import read_as
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.tasks import make_task
from palestra.environments.platform.verdicts import verify
from palestra.environments.platform.verifiers import VerifierLimits, run_verifier

MAX_SOURCES = 256  # verifiers that came in bundles
MAX_SOURCE_BYTES = 1 << 20
MAX_ARGUMENTS, PART_BYTES = 16 << 20, 64  # a long conversation; what each of its parts counts in addition to its text
MAX_WALL_S = 120.0
BUNDLED = "verifier.py"


class CannotVerify(Exception):
    """Why something cannot be verified, for the caller."""


class ExecuteRequest(msgspec.Struct, kw_only=True):
    key: str | None = None
    sha256: str | None = None
    bundle: str | None = None
    args: str | None = None
    args_array: list[Any] | None = None
    function_name: str | None = None
    timeout: float | None = None


class FunctionRequest(msgspec.Struct, kw_only=True):
    function_code: str
    function_name: str | None = None
    text_solution: str | None = None
    conversation: list[Any] | None = None
    timeout: float | None = None


class VerifierInput(msgspec.Struct, kw_only=True):
    """The arguments of a verifier, in addition to the instance."""

    final_answer: str | None = None
    conversation: list[Any] | None = None


class VerifierFailure(TypedDict):
    type: str
    message: str
    traceback: str


class VerifierAnswer(TypedDict):
    """What came of running a verifier."""

    success: bool
    result: object
    stdout: str
    error: VerifierFailure | None


class VerifierService:
    def __init__(self, pool: InstancePool, source_of: Callable[[PlatformTask], str]) -> None:
        self.pool, self._source_of = pool, source_of
        self._sources: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Sources by the team that sent them in a bundle, and the hash it gave: a team cannot replace the source of
        another."""
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)
        """Limits the number of processes at a time."""

    def check(self, request: ControlRequest) -> object:
        return {"success": (request.team, request.one("sha256") or "") in self._sources}

    def source(self, request: ControlRequest) -> object:
        key = request.name.removeprefix(wire.VERIFIER_PREFIX)
        task = _task(key)
        if task is None:
            raise PlatformRefusal(400, f"there is no verifier {request.name[:100]!r}")
        return wire.verifier(key, self._source_of(task))

    async def execute(self, body: ControlRequest) -> object:
        request = read_as(body.body, ExecuteRequest, "this is not a request to run a verifier")
        self.pool.record(instance_id := _instance_id(request), body.team)
        began = time.perf_counter()
        is_known = (body.team, request.sha256 or "") in self._sources
        try:
            answer = await self._execute(request, instance_id, body.team)
        except CannotVerify as e:
            answer = _failed("VerifierError", str(e))
        spent = {"execution_time_ms": round((time.perf_counter() - began) * 1000), "bundle_cache_hit": is_known}
        return {**answer, **spent, "key": request.key, "execution_id": secrets.token_hex(8)}

    async def execute_function(self, instance_id: str, body: bytes) -> object:
        """Runs a verifier at an instance's runner."""
        request = read_as(body, FunctionRequest, "this is not a verifier")
        try:
            _check_first(request.function_code, request.function_name)
            given = VerifierInput(final_answer=request.text_solution, conversation=request.conversation)
            answer = await self._foreign(instance_id, request.function_code, given, request.timeout)
        except CannotVerify as e:
            answer = _failed("VerifierError", str(e))
        error = answer["error"]["message"] if answer["error"] else None
        found = {name: answer[name] for name in ("success", "result", "stdout")}
        return {**found, "error": error, "message": error or "verified"}

    async def _execute(self, request: ExecuteRequest, instance_id: str, team: str) -> VerifierAnswer:
        given = _given(request.args)
        source = self._source(request, team)
        own = await asyncio.to_thread(_task, request.key or "")
        if own is not None and self._is_ours(own, source, request.sha256):
            return self._own(own, instance_id, given)
        if source is None:
            raise CannotVerify("bundle not found; send it with the request")
        _check_first(source, request.function_name)
        return await self._foreign(instance_id, source, given, request.timeout)

    def _source(self, request: ExecuteRequest, team: str) -> str | None:
        if request.bundle is None:
            return self._sources.get((team, request.sha256 or ""))
        source = _unpacked(request.bundle)
        if request.sha256:
            self._sources[team, request.sha256] = source
            if len(self._sources) > MAX_SOURCES:
                self._sources.popitem(last=False)
        return source

    def _is_ours(self, task: PlatformTask, source: str | None, sha256: str | None) -> bool:
        ours = self._source_of(task)
        return sha256 == wire.sha_of(ours) if source is None else source.strip() == ours.strip()

    def _own(self, task: PlatformTask, instance_id: str, given: VerifierInput) -> VerifierAnswer:
        with self.pool.use(instance_id) as instance:
            if (instance.app.key, instance.seed.key) != (task.app.key, task.seed.key):
                raise CannotVerify(
                    f"{task.key} is a task of {task.app.key} with data {task.seed.key}, but the instance is "
                    f"{instance.app.key} with {instance.seed.key}"
                )
            verdict = verify(task, instance, given.final_answer)
        lines = [*verdict.failed, *(f"App {name}: {int(is_right)}" for name, is_right in verdict.apps.items())]
        printed = "".join(f"{line}\n" for line in lines)
        printed += _accumulator("ERROR", verdict.missed) + _accumulator("SUCCESS", verdict.met)
        return {"success": verdict.score is not None, "result": verdict.score, "stdout": printed, "error": None}

    async def _foreign(
        self, instance_id: str, source: str, given: VerifierInput, timeout_s: float | None
    ) -> VerifierAnswer:
        with self.pool.use(instance_id) as instance:
            seed, current = instance.seed.data, instance.snapshot()
        if timeout_s is not None and not timeout_s > 0:
            raise CannotVerify(f"the timeout must be a positive number, not {timeout_s:g}")
        limits = VerifierLimits(wall_s=min(timeout_s or VerifierLimits().wall_s, MAX_WALL_S))
        async with self._slots:
            ran = await run_verifier(source, seed, current, given.final_answer, given.conversation, limits)
        kind = "AssertionError" if ran.success else "VerifierError"
        error: VerifierFailure | None = {"type": kind, "message": ran.error, "traceback": ""} if ran.error else None
        return {"success": ran.success, "result": ran.result, "stdout": ran.stdout, "error": error}


def _task(key: str) -> PlatformTask | None:
    try:
        return make_task(key)
    except PlatformError:
        return None


def _instance_id(request: ExecuteRequest) -> str:
    last = request.args_array[-1] if request.args_array else None
    if not isinstance(last, dict) or not isinstance(last.get("env"), str):
        raise PlatformRefusal(400, 'the last entry of args_array must name the instance: {"env": "…"}')
    return last["env"]


def _unpacked(bundle: str) -> str:
    try:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(bundle, validate=True))) as archive:
            if archive.getinfo(BUNDLED).file_size > MAX_SOURCE_BYTES:
                raise CannotVerify(f"{BUNDLED} has more than {MAX_SOURCE_BYTES >> 20} MiB")
            return archive.read(BUNDLED).decode()
    except (binascii.Error, zipfile.BadZipFile, KeyError, UnicodeDecodeError, NotImplementedError, OSError) as e:
        raise CannotVerify(f"the bundle is not a zip file with a {BUNDLED}: {e}") from None


def _check_first(source: str, name: str | None) -> None:
    """Checks that the verifier is the first function of the source."""
    found = re.search(r"^(?:async\s+)?def\s+(\w+)", source, re.MULTILINE)
    if found is None:
        raise CannotVerify("there is no function in the source")
    if name is not None and name != found[1]:
        raise CannotVerify(f"the first function of the source is {found[1]}; put {name} first")


class _PlainData(pickle.Unpickler):
    """Unpickles numbers, texts, lists and the like. A pickle that refers to anything else of Python is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        raise pickle.UnpicklingError(f"it holds a {module_name}.{global_name}, but only plain data is allowed")


def _given(args: str | None) -> VerifierInput:
    """Parses the arguments. Keyword arguments exist only inside the SDK's pickle."""
    if args is None:
        return VerifierInput()
    try:
        found = _PlainData(io.BytesIO(base64.b64decode(args, validate=True))).load()
        _check_size(found)
        kwargs = json.loads(json.dumps(found["kwargs"]))
        given = msgspec.convert(kwargs, VerifierInput)
        others = [*found["args"][1:-1], *(set(kwargs) - set(VerifierInput.__struct_fields__))]
    except Exception as e:  # boundary: a foreign pickle may raise anything
        raise CannotVerify(f"the arguments cannot be read: {e}") from None
    if others:
        raise CannotVerify("only final_answer and conversation can be passed to a verifier")
    return given


def _check_size(value: object) -> None:
    """Checks the size: a small pickle that contains a list twice, which contains another twice, and so on, is huge when
    it is written out."""
    room, waiting = MAX_ARGUMENTS, [value]
    while waiting:
        one = waiting.pop()
        inside = [*one.keys(), *one.values()] if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
        room -= len(one) if isinstance(one, str) else PART_BYTES * len(inside)
        if room < 0:
            raise ValueError(f"they are longer than {MAX_ARGUMENTS >> 20} MiB")
        waiting += inside


def _failed(kind: str, message: str) -> VerifierAnswer:
    error: VerifierFailure = {"type": kind, "message": message, "traceback": ""}
    return {"success": False, "result": None, "stdout": "", "error": error}


def _accumulator(name: str, lines: list[str]) -> str:
    """Formats findings as Fleet's verifiers print them, for partial rewards."""
    return f">>> {name}_ACCUMULATOR >>>\n{json.dumps(lines)}\n<<< {name}_ACCUMULATOR <<<\n"
