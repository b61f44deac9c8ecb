"""Many samples of one client in flight: one poll waits for all, and each is answered once, or reported as lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from tinker import types

from palestra.server.core.samples.polling import AT_ONCE, BLOCK
from tests.server.raw import NAME, Raw, ok
from tests.server.test_limits import standstill

IN_FLIGHT = 300


def waiting_samples(server: Any) -> int:
    lines = [line for line in server.metrics().splitlines() if line.startswith("palestra_queue_depth{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if 'kind="sample"' in line)


def answered(server: Any, status: int) -> int:
    """How often the result of a single call was asked for, and answered with this status."""
    name = f'palestra_requests_total{{route="/api/v1/retrieve_future",status="{status}"}} '
    return int(sum(float(line.removeprefix(name)) for line in server.metrics().splitlines() if line.startswith(name)))


def poll(api: Raw, sampler: str, cursor: int, **fields: Any) -> dict[str, Any]:
    return ok(api.post("retrieve_futures", target={"sampling_session_id": sampler}, prev_cursor=cursor, **fields))


def test_hundreds_of_samples_in_flight_are_each_read_once(server: Any) -> None:
    read, not_yet = (answered(server, status) for status in (200, 408))
    with server.client() as client:
        sampler = client.create_sampling_client(base_model=NAME)

        def sample(seed: int) -> Any:
            return sampler.sample(
                types.ModelInput.from_ints([5, 6, seed + 1]), 1, types.SamplingParams(max_tokens=2, seed=seed)
            )

        with standstill(server):
            futures = [sample(seed % 50) for seed in range(IN_FLIGHT)]
            server.until(lambda: waiting_samples(server) == IN_FLIGHT)
            assert not any(future.done() for future in futures)
            assert client.get_server_capabilities().supported_models
        sequences = [future.result(timeout=100).sequences[0] for future in futures]
        assert len({sequence.sequence_id for sequence in sequences}) == IN_FLIGHT
        for seed in range(50):
            assert len({tuple(sequence.tokens) for sequence in sequences[seed::50]}) == 1
    assert (answered(server, 200) - read, answered(server, 408) - not_yet) == (IN_FLIGHT, 0)


def test_completions_come_in_parts_and_none_is_left_out(server: Any) -> None:
    api, count = Raw(server), AT_ONCE + 20
    sampler = api.base_sampler()
    sent = {ok(api.sample(sampler, number, max_tokens=1))["request_id"] for number in range(count)}
    cursor, found = 0, []
    while len(found) < count:
        answer = poll(api, sampler, cursor)
        assert 0 < len(answer["completions"]) <= AT_ONCE
        found += [one["request_id"] for one in answer["completions"]]
        cursor = answer["cursor"]
    assert set(found) == sent
    assert len(found) == count
    assert poll(api, sampler, cursor, timeout=0) == {"completions": [], "cursor": cursor}


def test_a_result_is_there_until_its_client_says_that_it_has_arrived(server: Any) -> None:
    api = Raw(server)
    sampler = api.base_sampler()
    request_id = ok(api.sample(sampler, 0, max_tokens=1))["request_id"]
    answer = poll(api, sampler, 0)
    assert [one["request_id"] for one in answer["completions"]] == [request_id]
    assert api.result(request_id) == api.result(request_id)
    poll(api, sampler, answer["cursor"], timeout=0, retrieved_request_ids=[request_id])
    assert api.retrieve(request_id).status_code == 410


def test_a_server_that_stops_does_not_wait_for_polls(make_server: Callable[..., Any]) -> None:
    """Clients whose polls are answered when it stops ask again on the same connection."""
    server = make_server()
    api = Raw(server)
    sampler = api.base_sampler()
    cursors = [0]

    def poll_on() -> None:
        with contextlib.suppress(httpx.TransportError):
            while True:
                cursors.append(poll(api, sampler, cursors[-1])["cursor"])

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll_on)
        api.result(api.sample(sampler, 0, max_tokens=1))
        server.until(lambda: len(cursors) > 1)
        assert server.stop() == 0
        polling.result()
    assert "Traceback" not in server.said()


def test_a_restarted_server_says_which_samples_it_has_lost(make_server: Callable[..., Any]) -> None:
    server = make_server()
    api = Raw(server)
    sampler, late = api.base_sampler(), 5 * BLOCK  # not in the first block, so it is written down, and 1 again after it
    with standstill(server):
        lost = [ok(api.sample(sampler, number))["request_id"] for number in (late, 1)]
        cursor = poll(api, sampler, 0, timeout=0)["cursor"]
        server.kill()
    server.start()
    states: dict[str, str] = {}

    def poll_until_told(*request_ids: str) -> list[str]:
        nonlocal cursor
        while not states.keys() >= set(request_ids):
            answer = poll(api, sampler, cursor)
            cursor = answer["cursor"]
            states.update({one["request_id"]: one["state"] for one in answer["completions"]})
        return [states[request_id] for request_id in request_ids]

    assert poll_until_told(*lost) == ["failed", "failed"]
    assert {api.retrieve(request_id).status_code for request_id in lost} == {410}
    again = ok(api.sample(sampler, late + 2 * BLOCK))["request_id"]
    assert poll_until_told(again) == ["finished"]
    assert api.result(again)["sequences"]
