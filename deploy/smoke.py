"""A short trial of an installed server: the official Tinker SDK trains, samples, and sees a restart change nothing.

    python deploy/smoke.py --url https://palestra.example --key tml-… --restart 'systemctl restart palestra'
    python deploy/smoke.py -- palestra serve --state /tmp/smoke

With --restart, a server that runs is tried, and the command restarts it. With a command after `--`, the server is
started by it, killed with SIGKILL in the middle, started again, and stopped at the end. Two models of the same seed are
trained for four steps, one of them across the restart: every number must be the same to the last bit.

It needs the package `tinker` and nothing of Palestra. Exit status 0: all is well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TypeVar

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from tinker import types

T = TypeVar("T")

STEPS_BEFORE, STEPS = 3, 4
ROWS = [[11, 42, 7, 99, 23, 5, 61, 8], [3, 14, 15, 92, 65, 35], [27, 18, 28, 18, 28, 45, 90, 45, 23]]
"""Tokens that every vocabulary has."""
LOOK_EVERY_S = 0.2
READY, CERTIFICATE = "/readyz", "SSL_CERT_FILE"


class SmokeFailed(Exception):
    """One line says what is wrong."""


class InstalledServer:
    """A server that runs already; a command restarts it."""

    def __init__(self, restart: str) -> None:
        self._restart = restart

    def start(self) -> None:
        pass

    def restart(self) -> None:
        subprocess.run(self._restart, shell=True, check=True)

    def stop(self) -> None:
        pass

    def ended_with(self) -> int | None:
        """None: the server was started elsewhere, where its end is noticed."""
        return None


class OwnServer:
    """A server that this script starts, kills and stops."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=sys.stderr)

    def restart(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.start()

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        if code := self._process.wait():
            raise SmokeFailed(f"the server was stopped by SIGTERM and ended with {code}")

    def ended_with(self) -> int | None:
        return None if self._process is None else self._process.poll()


Server = InstalledServer | OwnServer


def main() -> int:
    args = _arguments()
    server: Server = OwnServer(args.command) if args.command else InstalledServer(args.restart)
    try:
        try:
            _try_out(server, args)
        finally:
            server.stop()
    except (SmokeFailed, subprocess.CalledProcessError, tinker.TinkerError) as error:
        _say("FAILED", str(error))
        return 1
    _say("OK", "the server kept everything across its restart")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Try out an installed server with the Tinker SDK.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server [%(default)s]")
    parser.add_argument("--key", default=os.environ.get("TINKER_API_KEY", "tml-smoke"), help="its key [TINKER_API_KEY]")
    parser.add_argument("--model", help="base model to try [the first that is served]")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="how long a start may take [%(default)s]")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--restart", metavar="COMMAND", help="shell command that restarts the server")
    what.add_argument("command", nargs="*", default=[], metavar="-- COMMAND", help="command that starts a server")
    return parser.parse_args()


def _try_out(server: Server, args: argparse.Namespace) -> None:
    server.start()
    _wait_until_ready(server, args)
    with tinker.ServiceClient(base_url=args.url, api_key=args.key) as service:
        base = args.model or service.get_server_capabilities().supported_models[0].model_name
        if base is None:
            raise SmokeFailed("the server serves no model")
        model = _create(service, base)
        _say("created", f"a LoRA model of {base}")
        _train(model, STEPS_BEFORE)
        sampler = model.save_weights_and_get_sampling_client()
        sampled = _sample(sampler)
        _say("sampled", f"{len(sampled[0])} tokens: {' '.join(map(str, sampled[0][:8]))} …")

        began = time.monotonic()
        server.restart()
        _wait_until_ready(server, args)
        _say("restarted", f"ready after {time.monotonic() - began:.1f} s")

        _same("the sampler after the restart", sampled, _sample(sampler))
        twin = _create(service, base)
        _train(twin, STEPS)
        _train(model, STEPS, first=STEPS_BEFORE)
        _same("the model that was restarted", _logprobs(twin), _logprobs(model))


def _create(service: tinker.ServiceClient, base: str) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=base, rank=8, seed=7)


def _train(model: tinker.TrainingClient, steps: int, *, first: int = 0) -> None:
    for step in range(first, steps):
        done = model.forward_backward(_data(), "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        loss = done.result().metrics["loss:sum"]
        _say("trained", f"step {step + 1}, loss {loss:.6f}")


def _data() -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1]),
                "weights": types.TensorData(data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1]),
            },
        )
        for row in ROWS
    ]


def _logprobs(model: tinker.TrainingClient) -> list[Sequence[float]]:
    outputs = model.forward(_data(), "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].data for output in outputs]


def _sample(sampler: tinker.SamplingClient) -> tuple[list[int], list[float]]:
    params = types.SamplingParams(max_tokens=16, temperature=1.0, seed=5)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(ROWS[0][:4]), 1, params).result().sequences
    return sequence.tokens, sequence.logprobs or []


def _same(what: str, expected: T, got: T) -> None:
    if expected != got:
        raise SmokeFailed(f"{what} differs: {expected} before, {got} now")
    _say("same bits", what)


def _wait_until_ready(server: Server, args: argparse.Namespace) -> None:
    url, until, reason = args.url.rstrip("/") + READY, time.monotonic() + args.timeout_s, "no answer"
    while time.monotonic() < until:
        if (code := server.ended_with()) is not None:
            raise SmokeFailed(f"the server ended with {code}")
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                if json.load(answer)["ready"]:
                    return
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}: {error.read().decode(errors='replace')[:200]}"
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLError):
                raise SmokeFailed(f"{url}: {error.reason}; name the authority's file in {CERTIFICATE}") from None
            reason = str(error.reason)
        except (OSError, ValueError) as error:  # it may end amid an answer
            reason = str(error)
        time.sleep(LOOK_EVERY_S)
    raise SmokeFailed(f"{url} is not ready after {args.timeout_s:g} s: {reason}")


def _say(what: str, text: str) -> None:
    print(f"smoke: {what:<10} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
