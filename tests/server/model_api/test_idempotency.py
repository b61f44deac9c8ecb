"""A call that is sent again is not sampled again; equal calls are."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import KEY
from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.standstill import standstill

TOKENS = 24
QUEUE = 'palestra_queue_depth{base_model="ephebe",kind="sample"} '


def body(text: str, max_tokens: int = TOKENS) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "seed": None}


def post(ephebe: Ephebe, given: dict[str, Any], client: httpx.Client | None = None, **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = (client or ephebe.http()).post("/v1/chat/completions", json=given, headers=named, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def send_and_leave(ephebe: Ephebe, given: dict[str, Any], after_s: float, **headers: str) -> None:
    """As a client that loses its patience."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(httpx.ReadTimeout):
        ephebe.http().post("/v1/chat/completions", json=given, headers=named, timeout=after_s)


def turns_like(ephebe: Ephebe, text: str) -> int:
    lines = ephebe.http().get("/v1/traces?format=jsonl&limit=1000").text.splitlines()
    return sum(turn["metadata"] == {"test": text} for line in lines for turn in json.loads(line)["turns"])


def test_a_retry_gets_the_answer_of_the_call_that_was_given_up(ephebe: Ephebe) -> None:
    given = body("Give me up") | {"metadata": {"test": "given up"}}
    with ThreadPoolExecutor(2) as threads:
        with standstill(ephebe):
            leaving = threads.submit(send_and_leave, ephebe, given, 2.0, x_stainless_retry_count="0")
            ephebe.until(lambda: f"{QUEUE}1.0" in ephebe.metrics())
            leaving.result()
            again = threads.submit(post, ephebe, given, x_stainless_retry_count="1")
            time.sleep(0.5)  # it comes while the call is under way
        assert again.result()["usage"]["completion_tokens"] == TOKENS
    assert turns_like(ephebe, "given up") == 1


def test_a_call_that_was_given_up_before_it_began_is_not_sampled(ephebe: Ephebe) -> None:
    """As on a machine so busy that both wait in the server's socket when it gets there."""
    given = body("Too late") | {"metadata": {"test": "too late"}}
    server = ephebe.process
    assert server is not None
    with ThreadPoolExecutor(1) as threads:
        server.send_signal(signal.SIGSTOP)
        try:
            send_and_leave(ephebe, given, 0.3, x_stainless_retry_count="0")
            again = threads.submit(post, ephebe, given, x_stainless_retry_count="1")
            time.sleep(0.2)
        finally:
            server.send_signal(signal.SIGCONT)
        assert again.result()["usage"]["completion_tokens"] == TOKENS
    assert turns_like(ephebe, "too late") == 1


def test_equal_calls_at_once_are_all_sampled(ephebe: Ephebe) -> None:
    given = body("Equal", 8)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: post(ephebe, given, x_stainless_retry_count="0"), range(16)))
    assert len({answer["id"] for answer in answers}) == 16


def test_a_retry_does_not_take_the_answer_of_a_call_that_is_waited_for(ephebe: Ephebe) -> None:
    given = body("Waited for")
    with ThreadPoolExecutor(2) as threads:
        with standstill(ephebe):
            waiting = threads.submit(post, ephebe, given, x_stainless_retry_count="0")
            ephebe.until(lambda: f"{QUEUE}1.0" in ephebe.metrics())
            other = threads.submit(post, ephebe, given, x_stainless_retry_count="1")
            ephebe.until(lambda: f"{QUEUE}2.0" in ephebe.metrics())
        assert waiting.result()["id"] != other.result()["id"]


def test_the_same_idempotency_key_is_the_same_call(ephebe: Ephebe) -> None:
    given = body("Keyed")
    with ThreadPoolExecutor(3) as threads:
        with standstill(ephebe):
            first = threads.submit(post, ephebe, given, idempotency_key="a")
            ephebe.until(lambda: f"{QUEUE}1.0" in ephebe.metrics())
            same = threads.submit(post, ephebe, given, idempotency_key="a")
            time.sleep(0.5)  # it comes while the call is under way
            other = threads.submit(post, ephebe, given | {"max_tokens": 4}, idempotency_key="a")
            ephebe.until(lambda: f"{QUEUE}2.0" in ephebe.metrics())
        assert first.result() == same.result()
        assert other.result()["id"] != same.result()["id"]


def test_an_answer_that_was_read_is_not_kept(ephebe: Ephebe) -> None:
    """On one connection: the server has seen the end of an answer before it sees the next request."""
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=ephebe.url, headers=headers, verify=False, trust_env=False) as client:
        answers = [post(ephebe, body("Read", 4), client, idempotency_key="a") for _ in range(3)]
    assert len({answer["id"] for answer in answers}) == 3


def test_a_client_that_never_comes_back_stops_the_sampling(ephebe: Ephebe) -> None:
    worker = ephebe.worker_pid
    with ThreadPoolExecutor(1) as threads, standstill(ephebe):
        leaving = threads.submit(send_and_leave, ephebe, body("Gone"), 1.0, x_stainless_retry_count="0")
        ephebe.until(lambda: f"{QUEUE}1.0" in ephebe.metrics())
        leaving.result()
        ephebe.until(lambda: f"{QUEUE}0.0" in ephebe.metrics(), timeout_s=20)
    assert ephebe.worker_pid == worker


@pytest.mark.slow
def test_an_answer_that_was_not_read_to_its_end_is_given_again(ephebe: Ephebe) -> None:
    """The client goes while the answer is on its way: it asked for more than fits into the buffers of a socket."""
    given = body("Not read", 200) | {"n": 16, "logprobs": True, "top_logprobs": 20, "metadata": {"test": "not read"}}
    payload = json.dumps(given, separators=(",", ":")).encode()  # as httpx writes it
    host, port = ephebe.url.removeprefix("http://").split(":")
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer tml-test\r\n"
        f"content-type: application/json\r\nx-stainless-retry-count: 0\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(request.encode() + payload)
        assert client.recv(512).startswith(b"HTTP/1.1 200")
    time.sleep(0.5)  # as the SDK does
    again = post(ephebe, given, x_stainless_retry_count="1")
    assert again["usage"]["completion_tokens"] == 16 * 200
    assert turns_like(ephebe, "not read") == 1
