from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from palestra.environments import BaseTextEnv, EnvironmentFailure, EnvironmentTimeout, EnvSession
from palestra.environments.session import Deferred
from palestra.environments.step_results import VERDICT_BYTES
from palestra.environments.threads import CallThreads

PROMPT = [{"role": "user", "content": "hello"}]
OVER = {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


@pytest.fixture
def pool():
    threads = CallThreads(4)
    yield threads
    threads.shutdown(wait=False, cancel_futures=True)


class Scripted(BaseTextEnv):
    """Answers what it was given; an exception is raised."""

    max_turns = 3

    def __init__(self, *, init=(PROMPT, {}), step=OVER, close=None, metrics=None, verdict=None):
        super().__init__()
        self.answers = {"init": init, "step": step, "close": close, "metrics": metrics or {}, "verdict": verdict}
        self.closed = 0

    def answer(self, name):
        found = self.answers[name]
        if isinstance(found, BaseException):
            raise found
        return found() if callable(found) else found

    def init(self, prompt):
        return self.answer("init")

    def step(self, action):
        return self.answer("step")

    def close(self):
        self.closed += 1
        self.answer("close")

    def get_metrics(self):
        return self.answer("metrics")


class AsyncScripted(Scripted):
    async def init_async(self, prompt):
        return self.answer("init")

    async def step_async(self, action):
        found = self.answer("step")
        return await found if asyncio.iscoroutine(found) else found

    async def close_async(self):
        self.closed += 10


def play(env, pool, timeout_s=5.0):
    async def episode():
        session = EnvSession(env, pool, timeout_s)
        try:
            await session.init(PROMPT)
            return await session.step("hi")
        finally:
            await session.close()

    return asyncio.run(episode())


def test_an_episode_from_init_to_close(pool):
    class Echo(BaseTextEnv):
        max_turns = 2
        thread = None

        def step(self, action):
            self.turns += 1
            Echo.thread = threading.current_thread()
            message = {"role": "user", "content": action.upper()}
            return {"observations": [message], "reward": 0, "done": self.turns == 2, "metadata": {"turn": self.turns}}

        def get_metrics(self):
            return {"turns": self.turns, "ok": True, "who": "me", "bad": math.nan}

    async def episode():
        session = EnvSession(Echo(), pool, 5.0, 2)
        assert session.max_turns == 2
        assert await session.init(PROMPT) == PROMPT
        first = await session.step("a")
        assert (first.observations, first.reward, first.done) == ([{"role": "user", "content": "A"}], 0.0, False)
        assert isinstance(first.reward, float)
        assert (await session.step("b")).done
        assert await session.metrics() == {"turns": 2.0, "ok": 1.0}
        with pytest.raises(EnvironmentFailure, match="the episode is over"):
            await session.step("c")
        await session.close()
        await session.close()

    asyncio.run(episode())
    assert Echo.thread is not threading.main_thread()


def test_async_twins_are_awaited_in_the_callers_own_task(pool):
    seen = contextvars.ContextVar("seen", default=0)
    tasks = []

    class Twins(AsyncScripted):
        async def init_async(self, prompt):
            seen.set(7)
            tasks.append(asyncio.current_task())
            return prompt, {}

        async def step_async(self, action):
            tasks.append(asyncio.current_task())
            return {**OVER, "reward": seen.get()}

    env = Twins(init=RuntimeError("the sync one"), step=RuntimeError("the sync one"))
    assert play(env, pool).reward == 7.0
    assert tasks[0] is tasks[1]
    assert env.closed == 10


def test_a_step_that_is_itself_a_coroutine_is_awaited_too(pool):
    class Plain:
        async def init(self, prompt):
            return prompt, {}

        @functools.wraps(BaseTextEnv.step)
        def step(self, action):
            return self._later()

        async def _later(self):
            return OVER

    assert play(Plain(), pool).reward == 1.0


@pytest.mark.parametrize("env_class", [Scripted, AsyncScripted])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("no luck"),
        StopIteration(),
        SystemExit(1),
        AssertionError(),
        TimeoutError("own"),
        asyncio.CancelledError(),
    ],
)
def test_whatever_an_environment_raises_is_one_kind_of_failure(pool, env_class, error):
    with pytest.raises(EnvironmentFailure) as caught:
        play(env_class(step=error), pool)
    assert not isinstance(caught.value, EnvironmentTimeout)
    assert env_class.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(EnvironmentFailure):
        play(env_class(init=error), pool)


def test_an_exception_of_a_megabyte_that_cannot_be_shown_is_shortened(pool):
    with pytest.raises(EnvironmentFailure) as caught:
        play(Scripted(step=ValueError("x\n" * 1_000_000)), pool)
    assert len(str(caught.value)) < 1000

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    with pytest.raises(EnvironmentFailure, match="Mute"):
        play(Scripted(step=Mute()), pool)


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, -math.inf, "1.0", [1.0], {}, 10**400, np.array([1.0, 2.0]), 1j, np.float32("nan")]
)
def test_a_reward_that_is_no_finite_number_is_a_failure(pool, reward):
    with pytest.raises(EnvironmentFailure, match="not a finite number"):
        play(Scripted(step={**OVER, "reward": reward}), pool)


@pytest.mark.parametrize(
    ("reward", "as_float"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(2.0), 2.0), (Decimal("0.25"), 0.25)],
)
def test_any_kind_of_number_is_a_reward(pool, reward, as_float):
    found = play(Scripted(step={**OVER, "reward": reward}), pool).reward
    assert found == as_float
    assert type(found) is float


def test_none_is_a_reward_nobody_could_give(pool):
    assert play(Scripted(step={**OVER, "reward": None}), pool).reward is None


@pytest.mark.parametrize(
    "step",
    [
        None,
        "done",
        (1.0, True),
        {},
        {"observations": [], "done": True},
        {"observations": [], "reward": 1.0},
        {**OVER, "done": "false"},
        {**OVER, "done": None},
        {**OVER, "done": np.array([True, False])},
        {**OVER, "observations": "text"},
        {**OVER, "observations": {"role": "user", "content": "x"}},
        {**OVER, "observations": ["text"]},
        {**OVER, "observations": [{"role": "user"}]},
        {**OVER, "observations": [{"role": 1, "content": "x"}]},
        {**OVER, "observations": 5},
        {**OVER, "metadata": [1]},
    ],
)
def test_a_step_of_the_wrong_shape_is_a_failure(pool, step):
    with pytest.raises(EnvironmentFailure, match="step"):
        play(Scripted(step=step), pool)


@pytest.mark.parametrize("init", [None, PROMPT, ([], {}), ("hello", {}), (PROMPT, {}, 1), ([{"content": "x"}], {})])
def test_an_init_of_the_wrong_shape_is_a_failure(pool, init):
    with pytest.raises(EnvironmentFailure, match="init"):
        play(Scripted(init=init), pool)


def test_numpy_and_missing_parts_pass_and_a_rewritten_action_is_kept(pool):
    step = {"reward": 1.0, "done": np.bool_(True), "metadata": None, "postprocessed_action": "hi!"}
    found = play(Scripted(step=step), pool)
    assert found.done is True
    assert found.observations == []
    assert found.metadata == {"postprocessed_action": "hi!"}


def _endless():
    inner = []
    inner.append(inner)
    return inner


def _breaks():
    yield PROMPT[0]
    raise OSError("gone")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([{"role": "user", "content": Path("x")}], r"'content' is neither text, a list of parts nor None: PosixPath"),
        ([{"role": "user", "content": b"raw"}], "'content' is neither"),
        ([{"role": "user", "content": 5}], "'content' is neither"),
        ([{"role": "user", "content": ["part"]}], "'content' is neither"),
        ([{"role": "user", "content": "ok", "info": object()}], "'info' is not plain JSON data: <object"),
        (
            [{"role": "user", "content": [{"type": "image", "image": b"x"}]}],
            r"'content\[0\].image' is not plain JSON data",
        ),
        ([{"role": "user", "content": "ok", 5: 1}], "a key that is not text: 5"),
        ([{"role": "user", "content": "ok", "info": {None: 1}}], "a key in 'info' that is not text: None"),
        ([{"role": "user", "content": "ok", "info": _endless()}], "cannot be read: RecursionError"),
        (_breaks(), "cannot be read: OSError: gone"),
    ],
)
def test_a_message_that_json_cannot_say_is_a_failure(pool, found, said):
    with pytest.raises(EnvironmentFailure, match=f"step returned .*{said}"):
        play(Scripted(step={**OVER, "observations": found}), pool)


def test_messages_become_plain_data(pool):
    class Text(str):
        __slots__ = ()

    calls = ({"id": Text("a"), "weight": np.float64(0.5), "index": 1, "ok": True},)
    parts = [{"type": "text", "text": "hi"}]
    found = [{"role": Text("tool"), "content": parts}, {"role": "user", "content": None, "tool_calls": calls}]
    first, second = play(Scripted(step={**OVER, "observations": found}), pool).observations
    parts[0]["text"] = "changed"
    assert first == {"role": "tool", "content": [{"type": "text", "text": "hi"}]}
    assert second["tool_calls"] == [{"id": "a", "weight": 0.5, "index": 1, "ok": True}]
    assert [type(value) for value in second["tool_calls"][0].values()] == [str, float, int, bool]


@pytest.mark.parametrize("is_async", [False, True])
def test_metrics_that_hang_or_exit_are_none_and_said_once(pool, caplog, is_async):
    release = threading.Event()

    class Mute(Scripted):
        pass

    class MuteAsync(Scripted):
        async def get_metrics_async(self):
            if isinstance(self.answers["metrics"], BaseException):
                raise self.answers["metrics"]
            await asyncio.Event().wait()

    async def episode(found):
        session = EnvSession((MuteAsync if is_async else Mute)(metrics=found), pool, 0.05)
        await session.init(PROMPT)
        await session.step("hi")
        return await session.metrics()

    for found in (release.wait, SystemExit(3), ValueError("no")):
        assert asyncio.run(episode(found)) == {}
    assert len(caplog.messages) == 1
    assert "get_metrics took longer than 0.05 s" in caplog.text
    release.set()


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ({"score": 1, "rows": ({"id": 3},)}, {"score": 1, "rows": [{"id": 3}]}),
        ({"text": "x" * VERDICT_BYTES}, "bytes and is not kept"),
        ("nothing", "get_verdict should return a mapping"),
        (ValueError("no"), "no"),
        ({"what": object()}, "cannot be read"),
    ],
)
def test_a_verdict_is_plain_json_of_a_bounded_size_and_costs_no_rollout(pool, found, kept):
    class Judged(Scripted):
        def get_verdict(self):
            return self.answer("verdict")

    async def episode(env):
        session = EnvSession(env, pool, 5.0)
        await session.init(PROMPT)
        return await session.verdict()

    verdict = asyncio.run(episode(Judged(verdict=found)))
    if isinstance(kept, str):
        assert kept in verdict["error"]
    else:
        assert verdict == kept
    assert asyncio.run(episode(Scripted())) == {}


def test_an_environment_cannot_change_the_prompt_of_the_others(pool):
    class Adds(BaseTextEnv):
        def init(self, prompt):
            prompt[0]["content"].append({"type": "text", "text": "X"})
            return prompt, {}

    prompt = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for _ in range(2):
        begun = asyncio.run(EnvSession(Adds(), pool, 5.0).init(prompt))
        assert len(begun[0]["content"]) == 2
    assert prompt == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with pytest.raises(EnvironmentFailure, match="prompt cannot be copied"):
        asyncio.run(EnvSession(Adds(), pool, 5.0).init([{"role": "user", "content": threading.Lock()}]))


def test_messages_are_copies(pool):
    history = [dict(PROMPT[0])]

    async def episode():
        session = EnvSession(Scripted(init=(history, {})), pool, 5.0)
        begun = await session.init(PROMPT)
        history[0]["content"] = "changed"
        history.append({})
        assert begun == PROMPT

    asyncio.run(episode())


def test_a_call_that_hangs_in_a_thread_is_given_up_and_close_still_comes(pool):
    release = threading.Event()
    env = Scripted(step=release.wait)
    started = time.monotonic()
    with pytest.raises(EnvironmentTimeout, match=r"Scripted.step took longer than 0.05 s .rollout.env_timeout_s"):
        play(env, pool, timeout_s=0.05)
    assert time.monotonic() - started < 3
    assert env.closed == 1
    release.set()


def test_a_coroutine_that_hangs_is_cancelled(pool):
    cancelled = []

    async def hang():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    env = AsyncScripted(step=hang)
    with pytest.raises(EnvironmentTimeout):
        play(env, pool, timeout_s=0.05)
    assert cancelled
    assert env.closed == 10


def test_close_never_raises_though_everything_hangs(pool):
    release = threading.Event()

    async def episode():
        session = EnvSession(Scripted(step=release.wait, close=release.wait, metrics=ValueError()), pool, 0.05)
        await session.init(PROMPT)
        with pytest.raises(EnvironmentTimeout):
            await session.step("hi")
        with pytest.raises(EnvironmentFailure, match="failed before"):
            await session.step("hi")
        assert await session.metrics() == {}
        await session.close()
        raising = EnvSession(Scripted(close=ValueError("no")), pool, 5.0)
        await raising.close()
        await EnvSession(object(), pool, 5.0).close()
        await EnvSession(Deferred(Scripted, "never made"), pool, 5.0).close()

    asyncio.run(episode())
    release.set()


def test_after_the_pool_is_closed_calls_fail_and_close_does_not():
    threads = CallThreads(1)
    threads.shutdown()

    async def episode():
        session = EnvSession(Scripted(), threads, 5.0)
        with pytest.raises(EnvironmentFailure, match="closed"):
            await session.init(PROMPT)
        await session.close()

    asyncio.run(episode())


def test_waiting_for_a_thread_does_not_count_as_the_environments_time():
    threads = CallThreads(1)

    async def episodes():
        sessions = [EnvSession(Scripted(step=lambda: time.sleep(0.06) or OVER), threads, 0.4) for _ in range(10)]
        await asyncio.gather(*(session.init(PROMPT) for session in sessions))
        return await asyncio.gather(*(session.step("hi") for session in sessions))

    assert [one.reward for one in asyncio.run(episodes())] == [1.0] * 10
    threads.shutdown()


def test_a_cancelled_player_stays_cancelled_and_can_close(pool):
    release = threading.Event()
    env = Scripted(step=release.wait)

    async def episode():
        session = EnvSession(env, pool, 30.0)
        await session.init(PROMPT)
        stepping = asyncio.create_task(session.step("hi"))
        await asyncio.sleep(0.02)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        await session.close()

    asyncio.run(episode())
    assert env.closed == 1
    release.set()


def test_a_deferred_environment_is_made_by_init(pool):
    threads = []

    def make():
        threads.append(threading.current_thread())
        return Scripted()

    def refuse():
        raise FileNotFoundError("no database at /tmp/x")

    async def episode():
        session = EnvSession(Deferred(make, "scripted"), pool, 5.0)
        await session.init(PROMPT)
        assert session.max_turns == 3
        await EnvSession(Deferred(make, "scripted", is_async=True), pool, 5.0).init(PROMPT)
        for is_async in (False, True):
            failing = EnvSession(Deferred(refuse, "sql", is_async=is_async), pool, 5.0)
            with pytest.raises(EnvironmentFailure, match="making sql raised FileNotFoundError: no database at /tmp/x"):
                await failing.init(PROMPT)
            await failing.close()
            assert await failing.metrics() == {}

    asyncio.run(episode())
    assert [one is threading.main_thread() for one in threads] == [False, True]


def test_what_is_no_environment_says_so(pool):
    with pytest.raises(EnvironmentFailure, match="object has neither init nor init_async"):
        play(object(), pool)


HANGING_RUN = """
import asyncio, threading
from palestra.environments import BaseTextEnv, EnvSession, EnvironmentTimeout
from palestra.environments.threads import CallThreads

class Hangs(BaseTextEnv):
    def step(self, action):
        threading.Event().wait()

async def main():
    session = EnvSession(Hangs(), CallThreads(2), 0.05)
    await session.init([{"role": "user", "content": "x"}])
    try:
        await session.step("x")
    except EnvironmentTimeout:
        print("timed out")
    await session.close()

asyncio.run(main())
print("over")
"""


def test_a_hung_environment_does_not_keep_the_process_from_ending():
    ended = subprocess.run([sys.executable, "-c", HANGING_RUN], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "timed out\nover\n"
    assert ended.stderr == ""
