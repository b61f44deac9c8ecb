"""A server behind nginx with `deploy/nginx.conf`: what its clients have without a proxy, they have through it."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import tinker
from tinker import types

from palestra.config.bundled import EPHEBE
from tests.ports import free_port
from tests.server.certificates import make_certificates
from tests.server.episodes.conftest import group, player, say
from tests.server.nginx import nginx

pytestmark = pytest.mark.e2e
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
TOKENS = types.ModelInput.from_ints([1, 2, 3])
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Proxied:
    server: Any
    url: str
    key: str

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"X-API-Key": self.key}, timeout=60.0)

    def pending(self, kind: str) -> float:
        """Calls of this kind that have no result."""
        lines = self.server.http(key=self.key).get("/metrics").text.splitlines()
        (found,) = [line for line in lines if line.startswith("palestra_queue_depth") and f'kind="{kind}"' in line]
        return float(found.split()[-1])


@pytest.fixture(scope="module")
def proxied(make_module_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    certificates, url = make_certificates(folder), f"https://localhost:{port}"
    server = make_module_server(model=EPHEBE, flags=("--public-url", url), log_level="debug", poll_hold_s=600)
    config = CONFIG.read_text()
    for ours, theirs in {
        "127.0.0.1:8000": f"127.0.0.1:{server.port}",
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/palestra/tls/cert.pem": str(certificates.cert),
        "/etc/palestra/tls/key.pem": str(certificates.key),
    }.items():
        assert config.count(ours) == 1
        config = config.replace(ours, theirs)
    key = server.said().partition("admin key (shown this once): ")[2].split()[0]
    with nginx(folder, config, port), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificates.authority))
        yield Proxied(server, url, key)


def test_a_key_is_needed_though_the_server_itself_listens_on_loopback(proxied):
    for url in (proxied.url, proxied.server.url):
        assert httpx.get(f"{url}/api/v1/sessions").status_code == 401
    with proxied.http() as client:
        assert client.get("/readyz").json() == {"ready": True, "waiting_for": [], "reasons": []}
        assert client.get("/api/v1/sessions").status_code == 200


def test_the_sdk_trains_and_samples_across_a_restart(proxied):
    with tinker.ServiceClient(base_url=proxied.url, api_key=proxied.key) as service:
        model = service.create_lora_training_client(base_model=proxied.server.name, rank=4)
        data = [types.Datum(model_input=TOKENS, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3})]
        model.forward_backward(data, "cross_entropy").result()
        proxied.server.kill()
        step = model.optim_step(types.AdamParams(learning_rate=1e-3))  # nginx answers 502 meanwhile
        proxied.server.start()
        step.result()
        sampler = model.save_weights_and_get_sampling_client()
        (sequence,) = sampler.sample(TOKENS, 1, types.SamplingParams(max_tokens=4)).result().sequences
        assert sequence.tokens


def test_a_poll_waits_for_as_long_as_the_server_holds_it(proxied):
    with tinker.ServiceClient(base_url=proxied.url, api_key=proxied.key) as service:
        model = service.create_lora_training_client(base_model=proxied.server.name, rank=4)
        worker = proxied.server.worker_pid
        os.kill(worker, signal.SIGSTOP)
        try:
            step = model.optim_step(types.AdamParams(learning_rate=1e-3))
            proxied.server.until(lambda: proxied.pending("train") == 1)
        finally:
            os.kill(worker, signal.SIGCONT)
        step.result()


def test_a_stream_arrives_while_it_is_made(proxied):
    with openai.OpenAI(base_url=f"{proxied.url}/v1", api_key=proxied.key) as client:
        stream = client.completions.create(
            model=proxied.server.name, prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        os.kill(worker := proxied.server.worker_pid, signal.SIGSTOP)
        try:
            assert proxied.pending("sample") == 1
        finally:
            os.kill(worker, signal.SIGCONT)
        stream.close()


def test_a_large_body_reaches_the_server_and_a_larger_one_is_refused(proxied):
    with proxied.http() as client:
        answer = client.post("/api/v1/forward_backward", content=b"x" * (64 * MB))
        assert (answer.status_code, "detail" in answer.json()) == (400, True)
    url = urlsplit(proxied.url)
    with closing(HTTPSConnection(url.hostname, url.port, context=ssl.create_default_context())) as line:
        line.putrequest("POST", "/api/v1/forward_backward")
        line.putheader("content-length", str(257 * MB))
        line.endheaders()
        assert line.getresponse().status == 413


def test_the_log_has_the_address_of_the_client_and_believes_only_the_proxy(proxied):
    lie = {"X-Forwarded-For": "203.0.113.9"}
    for address, url in {"127.0.0.2": proxied.url, "127.0.0.3": proxied.server.url}.items():
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), headers=lie) as client:
            assert client.get(f"{url}/api/v1/nothing").status_code == 404
    proxied.server.until(lambda: "client=127.0.0.3" in proxied.server.said())
    assert "client=127.0.0.2" in proxied.server.said()
    assert "203.0.113.9" not in proxied.server.said()


def test_addresses_that_are_handed_out_lead_through_the_proxy(proxied):
    with proxied.http() as client:
        client.put("/episodes/v1/runs/first", json={"model": None, "settings": None})
        client.post("/episodes/v1/runs/first/groups", json={"groups": [group()]})
        claim = {"client_id": "player", "claim_id": "first", "run": "first"}
        (lease,) = client.post("/episodes/v1/claim", json=claim).json()["leases"]
    assert lease["base_url"] == f"{proxied.url}/v1"
    with player(lease) as model:
        assert say(model, [{"role": "user", "content": "What is 1 + 1?"}]).choices
