"""Sandboxes to attack: one of every backend that can run here, shared by the tests that leave it as it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from palestra.sandbox import ExecResult, Sandbox, SandboxLimits, SandboxSpec, backend, sandbox
from palestra.sandbox.spec import MIB
from tests.sandbox import images

Result = TypeVar("Result")

WALLED = ["local", pytest.param("docker", marks=pytest.mark.slow), pytest.param("podman", marks=pytest.mark.slow)]
"""The backends that promise a wall; those that need an image are for the long run."""
SMALL = SandboxLimits(memory_bytes=256 * MIB, disk_bytes=32 * MIB, processes=48, exec_s=30.0)


class LoopThread:
    """An event loop that goes on while tests wait for something."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sandbox tests", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Box:
    """A started sandbox, for tests that do not await."""

    def __init__(self, name: str, inner: Sandbox, loop: LoopThread) -> None:
        self.name, self.inner, self._loop = name, inner, loop

    def sh(self, command: str, **options: Any) -> ExecResult:
        return self._loop.run(self.inner.exec(command, **options))

    def python(self, program: str, **options: Any) -> ExecResult:
        return self._loop.run(self.inner.exec(["/usr/bin/python3", "-I", "-S", "-c", program], **options))

    def read(self, path: str) -> bytes:
        return self._loop.run(self.inner.read(path))

    def write(self, path: str, data: bytes) -> None:
        self._loop.run(self.inner.write(path, data))

    def stop(self) -> None:
        self._loop.run(self.inner.stop())


def spec_for(name: str, **settings: Any) -> SandboxSpec:
    image = None if name == "local" else {"image": images.NAME}
    return SandboxSpec(**{"limits": SMALL, **(image or {}), **settings})


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    found = LoopThread()
    yield found
    found.close()


@pytest.fixture(scope="session", params=WALLED)
def walled(request: pytest.FixtureRequest) -> str:
    """The name of a backend that can run here."""
    name = request.param
    problem = backend(name).problem() or (images.problem(name) if name != "local" else None)
    if problem:
        pytest.skip(problem)
    return name


@pytest.fixture(scope="session")
def box(walled: str, loop: LoopThread) -> Iterator[Box]:
    """A sandbox that tests share: an attack on it must leave it usable."""
    found = Box(walled, sandbox(walled, spec_for(walled)), loop)
    loop.run(found.inner.__aenter__())
    yield found
    found.stop()


@pytest.fixture
def new_box(walled: str, loop: LoopThread) -> Iterator[Callable[..., Box]]:
    """Makes sandboxes that are the test's own."""
    made: list[Box] = []

    def make(**settings: Any) -> Box:
        made.append(Box(walled, sandbox(walled, spec_for(walled, **settings)), loop))
        loop.run(made[-1].inner.__aenter__())
        return made[-1]

    yield make
    for one in made:
        one.stop()
