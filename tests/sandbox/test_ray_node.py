"""The backend ray, on a cluster of one node on this machine (make test-ray)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.sandbox import EndpointProxy, SandboxEnded, SandboxError, SandboxSpec, backend, sandbox
from tests.sandbox.conftest import SMALL
from tests.sandbox.test_endpoint_proxy import ASK, endpoint  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    if problem := backend("local").problem():
        pytest.skip(problem)
    assert "not connected" in (backend("ray").problem() or "")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_a_sandbox_on_a_node(cluster: Any, endpoint: str, tmp_path: Path) -> None:  # noqa: F811
    proxy = EndpointProxy(endpoint)

    async def work() -> None:
        spec = SandboxSpec(
            limits=SMALL, endpoint_proxy=proxy, env={"URL": proxy.inside_url, "KEY": "k"}, files={"a": b"one"}
        )
        async with sandbox("ray", spec) as box:
            assert (await box.exec("cat a; id -un; exit 3")).status == 3
            assert (await box.exec(["/usr/bin/python3", "-c", ASK])).text == "/v1/models Bearer k\n"
            assert (await box.exec("sleep 100", limit_s=0.3)).is_late
            parts: list[tuple[int, bytes]] = []

            async def on_output(number: int, data: bytes) -> None:
                parts.append((number, data))
                if data == b"first":
                    await box.write("heard", b"")  # the command waits for it

            waiting = "printf first; until [ -e heard ]; do sleep 0.05; done; printf second >&2; exit 5"
            assert (await box.exec(waiting, on_output=on_output)).status == 5
            assert parts == [(1, b"first"), (2, b"second")]
            with pytest.raises(SandboxError, match="cannot be read"):
                await box.read("none")
            await box.snapshot(tmp_path / "state")
        with pytest.raises(SandboxEnded, match="stopped"):
            await box.exec("true")
        async with sandbox("ray", SandboxSpec(limits=SMALL, snapshot=tmp_path / "state")) as box:
            assert await box.read("a") == b"one"

    asyncio.run(work())


def test_a_lost_actor_is_a_sandbox_that_ended(cluster: Any) -> None:
    async def work() -> None:
        async with sandbox("ray", SandboxSpec(limits=SMALL)) as box:
            cluster.kill(box._actor)  # pyright: ignore[reportAttributeAccessIssue]
            with pytest.raises(SandboxEnded, match="lost"):
                await box.exec("true")

    asyncio.run(work())
