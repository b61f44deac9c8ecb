from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments.threads import CallThreads
from tests.properties import examples
from tests.waiting import until


def test_no_more_calls_at_once_than_threads():
    threads = CallThreads(2)
    release, running, most = threading.Event(), [], []

    def call():
        running.append(1)
        most.append(len(running))
        release.wait(5)
        running.pop()

    futures = [threads.submit(call) for _ in range(6)]
    until(lambda: len(running) == 2)
    release.set()
    for future in futures:
        future.result(5)
    assert max(most) == 2
    threads.shutdown()


def test_errors_and_results_arrive_as_of_any_executor():
    threads = CallThreads(1)
    assert threads.submit(divmod, 7, 2).result(5) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(5)
    with pytest.raises(SystemExit):
        threads.submit(exit, 3).result(5)
    assert threads.submit(int, "5").result(5) == 5  # the thread lived on
    assert list(threads.map(abs, [-1, -2])) == [1, 2]
    threads.shutdown()


def test_a_call_given_up_does_not_take_its_thread_from_the_others():
    threads = CallThreads(1, name="mine")
    release = threading.Event()
    hung = threads.submit(release.wait)
    until(hung.running)
    queued = threads.submit(int, "1")
    assert not hung.cancel()
    assert queued.result(5) == 1
    assert not hung.cancel()  # the second time changes nothing
    release.set()
    assert hung.result(5)
    assert threads.submit(int, "2").result(5) == 2
    threads.shutdown()
    until(lambda: not any(one.name == "mine" for one in threading.enumerate()))


def test_queued_calls_are_cancelled_on_closing_and_new_ones_refused():
    threads = CallThreads(1)
    release = threading.Event()
    first = threads.submit(release.wait)
    until(first.running)
    second = threads.submit(int, "1")
    threads.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(int, "1")
    release.set()
    assert first.result(5)


@given(st.lists(st.sampled_from(["run", "hang", "cancel"]), max_size=25), st.integers(1, 3))
@examples(25)
def test_every_call_ends_whatever_is_given_up(kinds, size):
    threads = CallThreads(size)
    release = threading.Event()
    calls = [(kind, threads.submit(release.wait if kind == "hang" else int)) for kind in kinds]
    for kind, call in calls:
        if kind == "cancel":
            call.cancel()
        elif kind == "hang":
            until(lambda call=call: call.running() or call.done())
            call.cancel()
    for kind, call in calls:
        if kind == "run":
            assert call.result(5) == 0
    release.set()
    threads.shutdown()
