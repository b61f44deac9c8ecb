"""Anything at all is answered: no 5xx, no dead server, whatever schemathesis and hypothesis come up with."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.raw import Raw, datum, real, text, wire

MakeServer = Callable[..., Any]

EXCLUDED = "/files/|apikey|/v1/forward"  # by signature, the end of a key, protobuf (below)
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def _settings(examples: int) -> settings:
    slow: Any = list(HealthCheck)
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow, database=None)


@pytest.fixture(scope="module")
def fuzzed(make_module_server: MakeServer) -> Any:
    """Polls are not held: nobody waits for what will never be."""
    return make_module_server("episodes.max_wait_s=0.05", poll_hold_s=0.05, gap_wait_s=0.05)


def alive(server: Any) -> None:
    api = Raw(server)
    assert api.get("healthz").json() == {"status": "ok"}
    api.model().works()
    assert api.result(api.sample(api.base_sampler()))["sequences"]
    assert "Traceback" not in server.log.read_text()
    assert server.process.poll() is None
    assert "event=ready" in server.worker_log.read_text()
    assert server.worker_log.read_text().count("event=ready") == 1, "the engine died"


# The JSON routes, from their OpenAPI


def fuzz_routes(server: Any, examples: int, modes: Callable[[int], Sequence[GenerationMode]]) -> None:
    """So many examples for each route, in each mode that is there for its number."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json").exclude(path_regex=EXCLUDED)
    wrong, tried = [], 0
    for number, found in enumerate(document.get_all_operations()):
        operation = found.ok()
        for mode in modes(number):
            try:
                _fuzz_route(operation, mode, examples)
            except Unsatisfiable:  # nothing can be wrong about a route without arguments
                continue
            except Exception as e:
                wrong.append(f"{operation.label}: {e}")
            tried += 1
    assert not wrong, "\n".join(wrong)[:5000]
    assert tried > 10, f"only {tried} were tried"


def _fuzz_route(operation: Any, mode: GenerationMode, examples: int) -> None:
    @_settings(examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(headers={"X-API-Key": "tml-fuzz"}, checks=CHECKS, timeout=30)

    check()


def test_every_route_answers_as_its_openapi_says(fuzzed: Any) -> None:
    """For some of them something sound, for some something unsound: what the test below does for all."""
    fuzz_routes(fuzzed, examples=1, modes=lambda number: {0: MODES[:1], 8: MODES[1:]}.get(number % 16, ()))
    alive(fuzzed)


@pytest.mark.slow
def test_every_route_answers_as_its_openapi_says_for_long(fuzzed: Any) -> None:
    fuzz_routes(fuzzed, examples=100, modes=lambda _: MODES)
    alive(fuzzed)


# Passes: bytes that were a request once


def mutated(data: st.DataObject, body: bytes) -> bytes:
    """A few places cut out, overwritten or stuffed."""
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        length = data.draw(st.integers(0, 12))
        body = body[:at] + data.draw(st.binary(max_size=12)) + body[at + length :]
    return body


numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 600))
dtypes: st.SearchStrategy[Any] = st.sampled_from([1, 2, 2, 2, 3, 4])


@st.composite
def tensors(draw: st.DrawFn) -> wire.Tensor:
    values = draw(st.lists(numbers, max_size=12))
    shape = draw(st.one_of(st.just([len(values)]), st.lists(numbers, max_size=3)))
    if draw(st.booleans()):
        dense = struct.pack(f"<{len(values)}q", *values)
        return wire.Tensor(dense=dense, dtype=draw(dtypes), shape=shape)
    crow, col = (struct.pack(f"<{len(v)}q", *v) for v in (draw(st.lists(numbers, max_size=5)), values))
    csr = wire.SparseCsr(values=bytes(8 * len(values)), crow_indices=crow, col_indices=col)
    return wire.Tensor(sparse_csr=csr, dtype=draw(dtypes), shape=shape)


@st.composite
def odd_data(draw: st.DrawFn) -> wire.Datum:
    """Sound but for some of its parts."""
    length = draw(st.integers(1, 12))
    names = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "clip_low_threshold", "x"])
    inputs: dict[str, Any] = draw(
        st.dictionaries(names, st.one_of(tensors(), st.just(real(*[1.0] * length))), max_size=3)
    )
    return datum(length=length, **inputs)


LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "custom", "", "stable_reinforce"]


@st.composite
def odd_passes(draw: st.DrawFn) -> wire.ForwardBackwardRequest:
    names = st.sampled_from(["clip_low_threshold", "clip_high_threshold", "beta", "loss_id", "x"])
    values = st.one_of(
        st.builds(wire.LossConfigValue, number=st.floats()), st.builds(wire.LossConfigValue, text=st.text(max_size=5))
    )
    return wire.ForwardBackwardRequest(
        data=draw(st.lists(odd_data(), max_size=3)),
        loss_fn=draw(st.sampled_from(LOSSES)),
        loss_fn_config_v2=draw(st.dictionaries(names, values, max_size=2)),
        forward_only=draw(st.booleans()),
    )


def assert_none_fell(api: Raw, accepted: list[str]) -> None:
    """Whatever was accepted has an answer, and none of them says that the server broke."""
    fell = [result for result in map(api.result, accepted) if result.get("category") == "server"]
    assert not fell, fell[:3]
    assert accepted


def fuzz_passes(server: Any, examples: int) -> None:
    api = Raw(server)
    model = api.model()
    accepted: list[str] = []

    @_settings(examples)
    @given(request=odd_passes(), data=st.data())
    def check(request: wire.ForwardBackwardRequest, data: st.DataObject) -> None:
        address = wire.ForwardBackwardRequest(model_id=model.model_id, seq_id=next(model.numbers))
        body = request.SerializeToString()
        if data.draw(st.booleans()):
            body = mutated(data, body)
        answer = model.send_bytes(address.SerializeToString() + body)
        assert answer.status_code in {200, 400, 404}, f"{answer.status_code} {answer.text}"
        if answer.status_code == 200:
            accepted.append(answer.json()["request_id"])

    check()
    assert_none_fell(api, accepted)


def test_whatever_bytes_are_a_pass_they_are_answered(fuzzed: Any) -> None:
    fuzz_passes(fuzzed, 50)
    alive(fuzzed)


@pytest.mark.slow
def test_whatever_bytes_are_a_pass_they_are_answered_for_long(fuzzed: Any) -> None:
    fuzz_passes(fuzzed, 10_000)
    alive(fuzzed)


# Samples


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
tokens = st.lists(st.integers(-2, 520), max_size=20)
sound_or_not = {
    "prompt": st.builds(lambda t: text(*t), tokens) | json_values,
    "num_samples": st.integers(-1, 5) | json_values,
    "prompt_logprobs": st.booleans() | json_values,
    "topk_prompt_logprobs": st.integers(-1, 600) | json_values,
    "topk_sample_logprobs": st.integers(-1, 600) | json_values,
    "prompt_alt_tokens_k": st.integers(-1, 600) | json_values,
    "prompt_logprobs_last_n": st.integers(-1, 30) | json_values,
    "target_prompt_logprobs": json_values
    | st.builds(
        lambda d, shape: {"data": d, "dtype": "int64", "shape": shape}, tokens, st.lists(st.integers(0, 20), max_size=2)
    ),
    "sampling_params": json_values
    | st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 6)},
        optional={
            "temperature": st.floats(),
            "top_p": st.floats(),
            "top_k": st.integers(-2, 600),
            "seed": st.integers(),
            "stop": json_values | st.lists(st.text(max_size=3), max_size=3) | tokens,
        },
    ),
}


@st.composite
def odd_samples(draw: st.DrawFn) -> dict[str, Any]:
    """One or two parts that may be anything, in a request that is fine."""
    names = draw(st.sets(st.sampled_from(sorted(sound_or_not)), max_size=2))
    changed = {name: draw(sound_or_not[name]) for name in sorted(names)}
    return {"prompt": text(5, 6, 7), "sampling_params": {"max_tokens": 2}, **changed}


def fuzz_samples(server: Any, examples: int) -> None:
    api = Raw(server)
    sampler, count, accepted = api.base_sampler(), itertools.count(), []

    @_settings(examples)
    @given(odd_samples())
    def check(body: dict[str, Any]) -> None:
        response = json.dumps({"sampling_session_id": sampler, "seq_id": next(count), **body})
        answer = api.http.post("/api/v1/asample", content=response.encode())
        assert answer.status_code in {200, 400}, f"{answer.status_code} {answer.text}"
        if answer.status_code == 200:
            accepted.append(answer.json()["request_id"])

    check()
    assert_none_fell(api, accepted)


def test_whatever_a_sample_asks_for_it_is_answered(fuzzed: Any) -> None:
    fuzz_samples(fuzzed, 30)
    alive(fuzzed)


@pytest.mark.slow
def test_whatever_a_sample_asks_for_it_is_answered_for_long(fuzzed: Any) -> None:
    fuzz_samples(fuzzed, 5_000)
    alive(fuzzed)
