"""What happens between a client and its server: connections break, servers are away, proxies talk nonsense."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from palestra.episodes import ClientClosed, EpisodeApiError, EpisodeClient, ServerSilent
from palestra.episodes.client import api
from palestra.episodes.client.loop_thread import SHARED
from palestra.episodes.client.retries import RetryBudget, RetryingCalls, WaitReason
from palestra.types.episode_wire import Runs
from palestra.util.backoff import LONGEST_ASKED_S
from palestra.util.programs import missing
from tests.episodes.client.faults import Answer, Drop, FaultServer, Garbage, Hang

RUNS = Answer(200, {"runs": []})
NOTHING = Answer(200, {"leases": [], "retry_after_s": 0})


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "fault",
    [
        Drop(),
        Garbage(),
        Garbage(b""),
        Answer(200, {"runs": [1, 2, 3]}, is_half=True),
        Answer(503, {"detail": "episodes are being read again"}, retry_after="0.01"),
        Answer(429, {"detail": "too many"}, retry_after="0"),
        Answer(502, b"<html>bad gateway</html>"),
        Answer(504, b"", retry_after="not a number"),
    ],
    ids=lambda fault: f"{type(fault).__name__}-{getattr(fault, 'status', '')}",
)
def test_a_call_is_repeated_until_it_is_answered(fault):
    with FaultServer(fault, fault, RUNS) as server, EpisodeClient(server.url, "tml-x") as client:
        assert client.runs() == []
        assert [seen.headers["x-api-key"] for seen in server.requests] == ["tml-x"] * 3


def test_a_claim_whose_answer_is_lost_is_the_same_claim_again():
    with FaultServer(Drop(), Drop(), NOTHING) as server, EpisodeClient(server.url) as client:
        assert client.claim(wait_s=0) == []
        assert client.claim(wait_s=0) == []
        ids = [seen.body["claim_id"] for seen in server.requests]
        assert len(ids) == 4
        assert ids[0] == ids[1] == ids[2] != ids[3]


def test_a_server_that_stays_away_is_given_up():
    with FaultServer(Answer(503, {"detail": "no room"})) as server, EpisodeClient(server.url, retry_s=0.5) as client:
        with pytest.raises(ServerSilent, match=rf"{server.url} does not answer, tried for \d s: 503 no room"):
            client.runs()
        assert len(server.requests) > 1


def test_nobody_there_is_told_at_once_where_asked_for():
    with FaultServer(RUNS) as server:
        url = server.url
    with (
        EpisodeClient(url, retry_s=0) as client,
        pytest.raises(ServerSilent, match=f"{url} does not answer: .*refused"),
    ):
        client.runs()


FIRST_ANSWERS = """
import sys, threading, msgspec
from palestra.types.episode_wire import Claimed

sys.setswitchinterval(1e-6)
lease = dict(episode_id="e", attempt=1, run="r", group_id="g", index=0, kind="train", seed=1, tags={}, version=0)
lease |= dict(expires_at=1.0, lease_s=1.0, deadline=None, base_url="", api_key="", model="")
lease |= dict(task=dict(id="t", environment="e", prompt=[]))
body, begin = msgspec.json.encode({"leases": [lease], "retry_after_s": 0.0}), threading.Barrier(16)

def read():
    begin.wait()
    assert msgspec.json.decode(body, type=Claimed).leases[0].episode_id == "e"

threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_that_get_their_first_answers_at_once_live_on():
    """msgspec 0.22 kills the process where records are learned by two threads at once: `make_ready`."""
    subprocess.run([sys.executable, "-c", FIRST_ANSWERS], check=True)


def test_a_server_that_says_nothing_is_asked_again():
    with FaultServer(Hang(), RUNS) as server:
        calls = RetryingCalls(server.url, None, 5)
        assert SHARED.wait(calls.do(api.ApiCall("GET", "/runs", Runs, timeout_s=0.05))).runs == []


def test_what_is_refused_is_not_asked_again():
    refusal = Answer(404, {"detail": "no run 'x': PUT /episodes/v1/runs/x makes it"})
    with FaultServer(refusal) as server, EpisodeClient(server.url) as client:
        with pytest.raises(EpisodeApiError, match=r"no run 'x': PUT .* \(HTTP 404\)") as raised:
            client.run_info("x")
        assert raised.value.status == 404
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(404, {"detail": "Not Found"}), "has no such route; is it a Palestra server"),
        (Answer(404, b"<html>nginx</html>"), "has no such route; is it a Palestra server"),
        (Answer(200, b"<html>welcome</html>"), "is http://127.0.0.1:[0-9]+ a Palestra server"),
        (Answer(200, b"\xff\xfe"), "is http://127.0.0.1:[0-9]+ a Palestra server"),
        (Answer(200, {"runs": "none"}), "the answer cannot be read"),
        (Answer(308, b"", location="https://elsewhere/"), "redirects to https://elsewhere/; use that URL"),
        (Answer(500, {"detail": "a bug"}), r"a bug \(HTTP 500\)"),
        (Answer(422, {"detail": [{"loc": ["query", "limit"]}]}), "limit"),
        (Answer(401, {"error": {"message": "this key is not valid"}}), "this key is not valid"),
    ],
)
def test_an_error_says_what_to_do(answer, said):
    with FaultServer(answer) as server, EpisodeClient(server.url) as client:
        with pytest.raises(EpisodeApiError, match=said):
            client.runs()
        assert len(server.requests) == 1


def test_connections_are_used_again():
    with FaultServer(RUNS) as server, EpisodeClient(server.url) as client:
        for _ in range(5):
            client.runs()
        assert server.connections == 1
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: client.runs(), range(20)))
        assert server.connections <= 4


def test_kept_connections_that_the_server_has_closed_cost_no_wait():
    begun = threading.Barrier(3)

    def together(_: object) -> Answer:
        begun.wait(20)
        return Answer(200, {"runs": []}, is_last=True)

    with FaultServer(together, together, together, RUNS) as server, EpisodeClient(server.url, retry_s=0) as client:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda _: client.runs(), range(3)))
        assert server.connections == 3
        assert client.runs() == []  # three dead ones are kept; without patience it gets through


def test_a_server_that_is_away_is_told_once_each_time(caplog):
    away = Answer(503, {"detail": "no room"}, retry_after="0")
    with FaultServer(away, away, RUNS, away, RUNS) as server, EpisodeClient(server.url) as client:
        client.runs()
        client.runs()
    said = f"{server.url}: 503 no room; trying again, for up to 300 s"
    ours = [record.message for record in caplog.records if record.name.startswith("palestra")]
    assert ours == [said, said]


def test_waiting_grows_is_spread_and_does_what_the_server_asks():
    patience = RetryBudget(RetryingCalls("http://x"), 1e9)
    delays = [patience.next_delay(WaitReason("down")) for _ in range(12)]
    assert 0.1 <= delays[0] <= 0.15
    assert delays[5] > delays[2] > delays[0]
    assert max(delays) <= 4.5
    assert 30 <= patience.next_delay(WaitReason("busy", 30.0)) <= 45


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [
        ("3", 3, 3),
        ("-1", 0, 0),
        ("nan", 0, 0),
        ("1e9", LONGEST_ASKED_S, LONGEST_ASKED_S),
        ("soon", 0, 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        ("Wed, 21 Oct 2150 07:28:00 GMT", LONGEST_ASKED_S, LONGEST_ASKED_S),
    ],
)
def test_retry_after_in_every_form(told, least, most):
    with FaultServer(Answer(503, b"", retry_after=told)) as server:
        got = SHARED.wait(RetryingCalls(server.url)._try(api.get_runs()))
        assert isinstance(got, WaitReason)
        assert least <= got.retry_after_s <= most


def test_a_closed_client_says_so_and_wakes_those_who_wait():
    with FaultServer(Answer(503, b"", retry_after="30")) as server:
        client = EpisodeClient(server.url)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.runs)
            server.wait_for("/runs")
            client.close()
            with pytest.raises(ClientClosed):
                waiting.result(10)
        with pytest.raises(ClientClosed):
            client.runs()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "is not the URL of a server"),
        ("ftp://host", "is not the URL of a server"),
        ("http://host:port", "is not a URL"),
        ("http://", "is not the URL of a server"),
        ("http://user:secret@host", "keys go into key="),
        ("http://host/?run=1", "keys go into key="),
    ],
)
def test_a_url_that_is_none(url, said):
    with pytest.raises(ValueError, match=said) as raised:
        EpisodeClient(url)
    assert "secret" not in str(raised.value)


def test_a_server_below_a_path():
    with FaultServer(RUNS) as server, EpisodeClient(f"{server.url}/below/here/") as client:
        client.runs()
        assert server.requests[0].path == "/below/here/episodes/v1/runs"


def test_a_proxy_is_used_where_the_environment_names_one(monkeypatch):
    with FaultServer(RUNS) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//ann:s%20crt@"))
        monkeypatch.setenv("no_proxy", "inside.example")
        with EpisodeClient("http://outside.example:8000") as client:
            assert client.runs() == []
        request = proxy.requests[0]
        assert request.path == "http://outside.example:8000/episodes/v1/runs"
        assert request.headers["host"] == "outside.example:8000"
        assert request.headers["proxy-authorization"] == "Basic YW5uOnMgY3J0"
        with FaultServer(RUNS) as server:
            for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
                with EpisodeClient(url) as client:
                    assert client.runs() == []
        for url, given in (("http://inside.example", None), ("http://outside.example", "")):
            with EpisodeClient(url, proxy=given, retry_s=0) as client, pytest.raises(ServerSilent, match="Errno"):
                client.runs()
        assert len(proxy.requests) == 1


def test_tls_goes_through_a_proxy_as_a_tunnel():
    with FaultServer(Answer(403, b"no")) as proxy:
        client = EpisodeClient("https://outside.example", "tml-secret", proxy=proxy.url, retry_s=0)
        with client, pytest.raises(ServerSilent, match="403"):
            client.runs()
        assert (proxy.requests[0].method, proxy.requests[0].path) == ("CONNECT", "outside.example:443")
        assert "tml-secret" not in str(proxy.requests[0].headers)


@pytest.mark.skipif(missing("openssl") is not None, reason=str(missing("openssl")))
def test_tls_is_checked(tmp_path):
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    made = [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with FaultServer(RUNS, tls=served) as server:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with EpisodeClient(server.url, tls=trusted) as client:
            assert client.runs() == []
            assert client.runs() == []
        assert server.connections == 1
        with EpisodeClient(server.url) as client, pytest.raises(ServerSilent, match=r"is not trusted: self.signed"):
            client.runs()


INFO = {"episode_id": "e", "run": "r", "group_id": "g", "index": 0, "kind": "train", "state": "queued", "attempt": 0}
TIMELINE = {
    "episode": {**INFO, "seed": 0, "priority": 0, "created_at": 0.0},
    "task": {"id": "t", "environment": "e", "prompt": []},
    "attempts": [],
}
LINE = json.dumps(TIMELINE).encode() + b"\n"
CHUNK = b"%x\r\n%s\r\n" % (len(LINE), LINE)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "fault",
    [
        Garbage(CHUNKED + CHUNK),  # without an end
        Garbage(CHUNKED + CHUNK + CHUNK[:40]),
        Garbage(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + LINE),
        Garbage(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + LINE + LINE[:10]),
    ],
)
def test_an_export_that_breaks_off_is_never_taken_for_a_whole_one(fault):
    with FaultServer(fault) as server, EpisodeClient(server.url) as client:
        with pytest.raises(ServerSilent, match="closed the connection"):
            list(client.export("r", reward_below=0.5))
        assert len(server.requests) == 1


def test_an_export_is_whole_or_refused():
    with FaultServer(Garbage(CHUNKED + CHUNK + CHUNK + b"0\r\n\r\n")) as server, EpisodeClient(server.url) as client:
        assert len(list(client.export("r", "ended", limit=2, error="", task="cups"))) == 2
        assert server.requests[0].path.endswith("?run=r&state=ended&error=&task=cups&limit=2&format=jsonl")
    no_run, no_record = Answer(404, {"detail": "no run 'r'"}), Garbage(CHUNKED + b"3\r\n{}\n\r\n0\r\n\r\n")
    for act, response in ((no_run, "no run 'r'"), (no_record, "the answer cannot be read")):
        with FaultServer(act) as server, EpisodeClient(server.url) as client:
            exported = client.export("r")
            with pytest.raises(EpisodeApiError, match=response):
                next(exported)
