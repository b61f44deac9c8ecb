"""NeMo Gym's sandboxes, held by Palestra's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.gym.nemo_gym_compat import COMPAT
from tests.sandbox.needs import needs_local

pytestmark = needs_local


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(COMPAT))
        yield


def test_a_sandbox_by_the_names_of_nemo_gym(tmp_path: Path) -> None:
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec, SandboxStatus

    spec = SandboxSpec(env={"A": "1"}, files={"in/note": "hello"}, resources={"cpu": 1, "memory_mib": 256})

    async def played() -> None:
        async with AsyncSandbox({"palestra": {}}, spec) as box:
            await box.start()
            done = await box.exec("cat in/note; echo $A; ls /root; exit 3")
            assert (done.stdout, done.return_code, done.error_type) == ("hello1\n", 3, None)
            assert (await box.exec("sleep 9", timeout_s=0.2)).error_type == "timeout"
            await box.download("in/note", tmp_path / "note")
            assert (tmp_path / "note").read_text() == "hello"
            assert await box.status() == SandboxStatus.RUNNING
        assert await box.status() == SandboxStatus.STOPPED

    asyncio.run(played())


def test_a_sandbox_ends_after_its_time() -> None:
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

    async def played() -> None:
        async with AsyncSandbox({"palestra": {"backend": "local"}}, SandboxSpec(ttl_s=0.1)) as box:
            await box.start()
            await asyncio.sleep(0.5)
            assert (await box.exec("true")).error_type == "sandbox"

    asyncio.run(played())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ports": (80,)}, "has no ports"),
        ({"entrypoint": ["x"]}, "has no entrypoint"),
        ({"resources": {"gpu": 1}}, "no GPU"),
        ({"image": "docker.io/library/debian"}, "is no folder"),
    ],
)
def test_what_it_has_not_is_refused(asked: dict[str, Any], words: str) -> None:
    from nemo_gym.sandbox import AsyncSandbox, SandboxCreateError, SandboxSpec

    with pytest.raises(SandboxCreateError, match=words):
        asyncio.run(AsyncSandbox({"palestra": {}}, SandboxSpec(**asked)).start())
