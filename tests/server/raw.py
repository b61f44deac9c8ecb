"""A Tinker client by hand: it can send what the SDK never would, and shows the status it gets."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from typing import Any

import httpx
import numpy as np

from palestra.server.tinker import wire_pb2 as wire
from tests.waiting import PATIENCE_S, until

NAME = "Qwen/Qwen3-8B"
PROTOBUF = {"content-type": "application/x-protobuf"}
RETRIED = {408, 409, 425, 429, *range(500, 600)}
"""What the SDK sends again: never right for a permanent error."""


class Raw:
    def __init__(self, server: Any, key: str | None = "tml-test"):
        self.http: httpx.Client = server.http(key=key)

    def post(self, call: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{call}", json=body)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"/api/v1/{path}")

    def session(self) -> str:
        return ok(self.post("create_session", tags=[], sdk_version="0.36.0"))["session_id"]

    def create(self, session_id: str, number: int = 0, *, base_model: str = NAME, **lora: Any) -> httpx.Response:
        config = {"rank": 4, "seed": 7, **lora}
        return self.post(
            "create_model", session_id=session_id, model_seq_id=number, base_model=base_model, lora_config=config
        )

    def model(self, session_id: str | None = None, number: int = 0, **lora: Any) -> Model:
        created = ok(self.create(session_id or self.session(), number, **lora))
        assert "error" not in self.result(created), created
        return Model(self, created["model_id"])

    def base_sampler(self, session_id: str | None = None, number: int = 0) -> str:
        said = self.post(
            "create_sampling_session",
            session_id=session_id or self.session(),
            sampling_session_seq_id=number,
            base_model=NAME,
        )
        return ok(said)["sampling_session_id"]

    def sample(self, sampler_id: str, seq_id: int = 0, *, max_tokens: int = 2, **body: Any) -> httpx.Response:
        response = {"prompt": text(5, 6, 7), "sampling_params": {"max_tokens": max_tokens}, **body}
        return self.post("asample", sampling_session_id=sampler_id, seq_id=seq_id, **response)

    def retrieve(self, request_id: str) -> httpx.Response:
        return self.post("retrieve_future", request_id=request_id, allow_metadata_only=False)

    def result(self, submitted: httpx.Response | dict[str, Any] | str) -> dict[str, Any]:
        """Of a future, once it is there."""
        if isinstance(submitted, httpx.Response):
            submitted = ok(submitted)
        request_id = submitted if isinstance(submitted, str) else submitted["request_id"]
        deadline = time.monotonic() + PATIENCE_S
        while (answer := self.retrieve(request_id)).status_code == 408:
            assert time.monotonic() < deadline, f"{request_id} is not done after {PATIENCE_S:g} s"
        return ok(answer)


class Model:
    """A model and its counter."""

    def __init__(self, api: Raw, model_id: str):
        self.api, self.model_id, self.session_id = api, model_id, model_id.partition(":")[0]
        self.numbers = itertools.count(1)

    def send(self, call: str, /, *, seq_id: int | None = None, **body: Any) -> httpx.Response:
        number = next(self.numbers) if seq_id is None else seq_id
        return self.api.post(call, model_id=self.model_id, seq_id=number, **body)

    def send_pass(self, *data: wire.Datum, seq_id: int | None = None, loss: str = "cross_entropy", **fields: Any):
        number = next(self.numbers) if seq_id is None else seq_id
        message = wire.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=number, data=data or (datum(),), loss_fn=loss, **fields
        )
        return self.send_bytes(message.SerializeToString())

    def send_bytes(self, body: bytes, **headers: str) -> httpx.Response:
        return self.api.http.post("/api/v1/forward_backward", content=body, headers=PROTOBUF | headers)

    def step(self, lr: float = 1e-3, *, seq_id: int | None = None, **adam: float) -> httpx.Response:
        return self.send("optim_step", seq_id=seq_id, adam_params={"learning_rate": lr, **adam})

    def save(self, name: str, **options: Any) -> str:
        return self.api.result(self.send("save_weights", path=name, **options))["path"]

    def keep(self, number: int, **options: Any) -> httpx.Response:
        return self.send("save_weights_for_sampler", sampling_session_seq_id=number, **options)

    def loss(self, submitted: httpx.Response) -> float:
        return self.api.result(submitted)["metrics"]["loss:sum"]

    def works(self) -> None:
        """Still there, and still learning."""
        assert np.isfinite(self.loss(self.send_pass()))
        assert "metrics" in self.api.result(self.step())


class Bystander:
    """Another tenant that trains, a step for each `go_on`, the same short run again and again: its losses must never
    change."""

    STEPS = 4

    def __init__(self, api: Raw):
        self.api = api
        self.runs = 0
        self.odd: list[str] = []
        self._is_ended = False
        self._steps = threading.Semaphore(self.STEPS)
        self.expected = self._run()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """However few tests there were, it comes to the end of one run."""
        self._steps.release(self.STEPS)
        until(lambda: self.runs or self.odd)
        self._is_ended = True
        self._steps.release()
        self._thread.join()
        self.check()

    def go_on(self) -> None:
        """One more step, beside whatever follows."""
        self._steps.release()

    def check(self) -> None:
        assert not self.odd, self.odd

    def _work(self) -> None:
        try:
            while not self._is_ended:
                losses = self._run()
                if len(losses) == self.STEPS:
                    self.runs += 1
                if not np.allclose(losses, self.expected[: len(losses)], rtol=1e-4):
                    self.odd.append(f"{losses}, not {self.expected}")
        except Exception as e:  # shown by `check`, not lost in the thread
            self.odd.append(repr(e))

    def _run(self) -> list[float]:
        session = self.api.session()
        model = self.api.model(session)
        losses = []
        for step in range(self.STEPS):
            self._steps.acquire()
            if self._is_ended:
                break
            submitted = model.send_pass(datum(seed=step), datum(seed=step + 100, length=20))
            stepped = model.step(1e-2)
            losses.append(model.loss(submitted))
            self.api.result(stepped)
        self.api.post(f"sessions/{session}/finish", reason={"type": "success"})
        return losses


# What goes over the wire


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, f"{response.request.url.path}: {response.status_code} {response.text[:500]}"
    return response.json()


def refused(response: httpx.Response, status: int = 400, *, said: str = "") -> str:
    """A permanent error with a text for the user; returns the text."""
    assert response.status_code == status, f"{response.status_code} {response.text[:500]}"
    assert status not in RETRIED
    detail = response.json()["detail"]
    assert isinstance(detail, str)
    assert 0 < len(detail) < 1000, detail
    assert said in detail, detail
    return detail


def text(*tokens: int) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def datum(seed: int = 0, length: int = 9, **changes: wire.Tensor) -> wire.Datum:
    """Cross-entropy on random tokens."""
    tokens = np.random.default_rng(seed).integers(5, 300, length + 1).tolist()
    inputs = {"target_tokens": whole(*tokens[1:]), "weights": real(*[1.0] * length), **changes}
    return datum_of(tokens[:-1], inputs)


def datum_of(tokens: list[int], inputs: dict[str, wire.Tensor]) -> wire.Datum:
    chunk = wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=struct.pack(f"<{len(tokens)}i", *tokens)))
    return wire.Datum(model_input=[chunk], loss_fn_inputs=inputs)


def whole(*values: int, shape: tuple[int, ...] | None = None) -> wire.Tensor:
    data = struct.pack(f"<{len(values)}q", *values)
    return wire.Tensor(dense=data, dtype=wire.DTYPE_INT64, shape=shape or [len(values)])


def real(*values: float, shape: tuple[int, ...] | None = None) -> wire.Tensor:
    data = struct.pack(f"<{len(values)}f", *values)
    return wire.Tensor(dense=data, dtype=wire.DTYPE_FLOAT32, shape=shape or [len(values)])
