"""`palestra serve --tls-cert`: clients that know the authority talk to it, others do not; and the service manager is
told when it is ready."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
import tinker
from tinker import types

from tests.net.attacks import many_headers
from tests.server.certificates import Certificates, make_certificates

END_S = 100.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """What systemd listens at for the messages of a service."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path_factory.mktemp("manager") / "notify"))
        listener.setblocking(False)
        yield listener


@pytest.fixture(scope="module")
def tls_server(make_module_server: Callable[..., Any], certificates: Certificates, manager: socket.socket) -> Any:
    flags = ("--tls-cert", str(certificates.cert), "--tls-key", str(certificates.key))
    server = make_module_server(start=False, flags=flags)
    server.environment["NOTIFY_SOCKET"] = manager.getsockname()
    server.start()
    return server


def test_clients_that_know_the_authority_train_and_sample(tls_server, certificates, monkeypatch):
    assert tls_server.url.startswith("https://127.0.0.1:")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    with tinker.ServiceClient(base_url=tls_server.url, api_key=tls_server.key) as service:
        model = service.create_lora_training_client(base_model=tls_server.name, rank=4)
        tokens = types.ModelInput.from_ints([1, 2, 3])
        data = [types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3})]
        model.forward_backward(data, "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = model.save_weights_and_get_sampling_client()
        (sequence,) = sampler.sample(tokens, 1, types.SamplingParams(max_tokens=4)).result().sequences
    assert sequence.tokens
    with openai.OpenAI(base_url=f"{tls_server.url}/v1", api_key=tls_server.key) as client:
        assert next(iter(client.models.list())).id == tls_server.name


def test_others_are_not_connected(tls_server, certificates):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{tls_server.url}/healthz")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{tls_server.port}/healthz")


def test_its_own_processes_reach_it_without_the_authority(tls_server):
    listening = [line for line in psutil.Process(tls_server.pid).net_connections("tcp") if line.status == "LISTEN"]
    (own,) = [line.laddr for line in listening if line.laddr.port != tls_server.port]
    assert own.ip == "127.0.0.1"
    assert httpx.get(f"http://127.0.0.1:{own.port}/healthz").status_code == 200


def test_heads_are_bounded_as_without_tls(tls_server, certificates):
    context = ssl.create_default_context(cafile=str(certificates.authority))
    with (
        socket.create_connection(("127.0.0.1", tls_server.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall(b"".join(many_headers(900)))
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 431 ")
    assert tls_server.http().get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("cert", "reason"),
    [("absent.pem", "No such file or directory"), ("key.pem", "they are not a PEM certificate and its key")],
)
def test_files_that_are_no_certificate_are_one_plain_line(make_server, certificates, cert, reason):
    path = certificates.key.with_name(cert)
    server = make_server(start=False, flags=("--tls-cert", str(path), "--tls-key", str(certificates.key)))
    server.launch()
    assert server.process.wait(END_S) == 1
    assert server.said() == f"error: cannot serve TLS with {path} and {certificates.key}: {reason}\n"


def test_a_key_with_a_password_is_refused_without_asking_for_it(make_server, certificates, tmp_path):
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", certificates.key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    server = make_server(start=False, flags=("--tls-cert", str(certificates.cert), "--tls-key", str(locked)))
    server.launch()
    assert server.process.wait(END_S) == 1
    assert "they are not a PEM certificate and its key" in server.said()


def test_the_service_manager_is_told_of_the_start_and_of_the_stop(tls_server, manager):
    """The last test: it stops the server."""
    assert manager.recv(4096) == b"READY=1"
    assert tls_server.stop() == 0
    assert manager.recv(4096) == b"STOPPING=1"
