"""Copies of an episode: each goes on by itself, in a world of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from palestra.environments.fleet.backends.embedded import live_instances
from palestra.environments.session import EnvSession
from palestra.environments.snapshots import NotCopyable
from tests.environments.fleet.conftest import an_env, call, put_call


def a_session(pool: ThreadPoolExecutor, **extras: object) -> EnvSession:
    return EnvSession(an_env(max_turns=6, **extras), pool, timeout_s=20)


def test_a_copy_of_an_episode_goes_on_in_a_world_of_its_own():
    async def go() -> None:
        with ThreadPoolExecutor(1) as pool:
            first, right, wrong = (a_session(pool) for _ in range(3))
            await first.init([])
            await first.step("hm")
            state = await first.snapshot()
            assert state.data is not None
            assert (await first.step(call("put", value=-1) + "<done>")).reward == 0.0
            for copy in (right, wrong):
                await copy.restore(state)
            assert live_instances() == 3
            assert (await wrong.step("<done>")).reward == 0.0
            assert (await right.step(put_call() + "<done>")).reward == 1.0
            assert (await right.metrics())["turns"] == 2
            assert (await right.metrics())["parse_error"] == 1.0
            for session in (first, right, wrong):
                await session.close()

    asyncio.run(go())


def test_what_the_context_tools_know_is_copied_too():
    config = {"enable_context_tools": True}

    async def go() -> None:
        first, other = (an_env(config=config, max_turns=9) for _ in range(2))
        await first.init_async([])
        for said in ("alpha", "beta", call("manage_context", keep_recent_turns=1)):
            await first.step_async(said)
        await other.restore_async(await first.snapshot_async())
        assert other.chat_history == first.chat_history
        assert other.chat_history is not first.chat_history
        asked = call("search_history", pattern="alpha")
        said = [(await env.step_async(asked))["observations"] for env in (first, other)]
        assert said[0] == said[1]
        assert "alpha" in said[0][0]["content"]
        for env in (first, other):
            await env.close_async()

    asyncio.run(go())


def test_the_last_turn_of_a_copy_is_that_of_the_whole_episode():
    async def go() -> None:
        first, other = an_env(max_turns=3), an_env(max_turns=3)
        await first.init_async([])
        await first.step_async("one")
        await first.step_async(put_call())
        await other.restore_async(await first.snapshot_async())
        last = await other.step_async("three")
        assert (last["done"], last["reward"], last["metadata"]["done_reason"]) == (True, 1.0, "max_turns")
        for env in (first, other):
            await env.close_async()

    asyncio.run(go())


def test_instances_of_other_kinds_cannot_be_copied_and_it_is_said():
    async def go() -> None:
        with ThreadPoolExecutor(1) as pool:
            env = an_env()
            session = EnvSession(env, pool, timeout_s=20)
            await session.init([])
            below = env.openenv_task_env
            assert below is not None
            own, below._backend = below._backend, NotEmbedded()  # pyright: ignore[reportAttributeAccessIssue]
            with pytest.raises(NotCopyable, match="instances of NotEmbedded cannot be copied"):
                await session.snapshot()
            below._backend = own
            assert (await session.step(put_call() + "<done>")).reward == 1.0
            await session.close()

    asyncio.run(go())


class NotEmbedded:
    """A backend without snapshots."""
