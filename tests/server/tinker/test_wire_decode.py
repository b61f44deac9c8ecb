"""What the SDK sends becomes our records; what nobody should send becomes a WireError."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto

from palestra.server.core.training.routing_records import ProvenanceSpan
from palestra.server.core.wire_errors import TooLarge, WireError
from palestra.server.http.body import decompress
from palestra.server.tinker import decode
from palestra.server.tinker import wire_pb2 as wire
from palestra.types import Datum, ImageChunk, TensorData, TextChunk
from tests.properties import examples

MODEL = "373e:train:0"
FLOATS = TensorData(data=np.array([0.5, -1.0, 2.0], "<f4").tobytes(), dtype="float32", shape=(3,))


def sdk_request(data: list[sdk.Datum], loss: str = "cross_entropy", config: dict | None = None, seq_id: int = 4):
    given = sdk.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    return sdk.ForwardBackwardRequest(forward_backward_input=given, model_id=MODEL, seq_id=seq_id)


def sdk_bytes(*data: sdk.Datum, **kwargs) -> bytes:
    return forward_backward_request_to_proto(sdk_request(list(data), **kwargs)).SerializeToString()


def sdk_datum(tokens: list[int], **inputs) -> sdk.Datum:
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def ppo_datum() -> sdk.Datum:
    return sdk_datum([1, 2, 3], target_tokens=[2, 3, 4], logprobs=[-0.1, -0.2, -0.3], advantages=[0.5, -1.0, 2.0])


def dense(tensor: TensorData) -> np.ndarray:
    dtype = {"float32": "<f4", "int64": "<i8"}[tensor.dtype]
    values = np.frombuffer(tensor.data, dtype)
    if tensor.crow_indices is None or tensor.col_indices is None:
        return values.reshape(tensor.shape)
    crow, col = (np.frombuffer(b, "<i8") for b in (tensor.crow_indices, tensor.col_indices))
    full = np.zeros(tensor.shape, dtype)
    full[np.repeat(np.arange(tensor.shape[0]), np.diff(crow)), col] = values
    return full


# Passes in protobuf


def test_a_pass_of_the_sdk() -> None:
    body = sdk_bytes(ppo_datum(), loss="ppo", config={"clip_low_threshold": 0.8, "mode": "strict"})
    call = decode.pass_from_protobuf(body)
    assert (call.model_id, call.seq_id) == (MODEL, 4)
    assert call.operation.loss == "ppo"
    assert call.operation.config == {"clip_low_threshold": 0.8, "mode": "strict"}
    assert not call.operation.forward_only
    (datum,) = call.operation.data
    assert datum.chunks == (TextChunk((1, 2, 3)),)
    assert datum.loss_inputs["advantages"] == FLOATS
    assert dense(datum.loss_inputs["target_tokens"]).tolist() == [2, 3, 4]


def test_forward_only_and_chunks_in_order() -> None:
    message = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy", forward_only=True)
    chunks = message.data.add().model_input
    for tokens in ([7, -8], [], [2**31 - 1]):
        chunks.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    operation = decode.pass_from_protobuf(message.SerializeToString()).operation
    assert operation.forward_only
    assert operation.data == [
        Datum(chunks=(TextChunk((7, -8)), TextChunk(()), TextChunk((2**31 - 1,))), loss_inputs={})
    ]


def test_sparse_rows_stay_sparse() -> None:
    targets = torch.zeros((6, 20), dtype=torch.int64)
    weights = torch.zeros((6, 20))
    targets[2, 3], weights[2, 3], weights[5, 19] = 17, 0.5, -2.0
    body = sdk_bytes(sdk_datum(list(range(6)), target_tokens=targets, weights=weights))
    inputs = decode.pass_from_protobuf(body).operation.data[0].loss_inputs
    assert inputs["weights"].crow_indices is not None
    assert np.array_equal(dense(inputs["weights"]), weights.numpy())
    assert np.array_equal(dense(inputs["target_tokens"]), targets.numpy())


def test_wide_dense_targets() -> None:
    targets = np.arange(12, dtype=np.int64).reshape(3, 4)
    body = sdk_bytes(sdk_datum([1, 2, 3], target_tokens=targets))
    tensor = decode.pass_from_protobuf(body).operation.data[0].loss_inputs["target_tokens"]
    assert tensor.shape == (3, 4)
    assert np.array_equal(dense(tensor), targets)


def spanned(*spans: sdk.PromptProvenanceSpan | sdk.SampledProvenanceSpan) -> sdk.Datum:
    plain = ppo_datum()
    return sdk.Datum(plain.model_input, plain.loss_fn_inputs, list(spans), list(spans))


def test_provenance_spans_stand_beside_the_data() -> None:
    prompt = sdk.PromptProvenanceSpan(sequence_id="s", offset=4, length=1)
    sampled = sdk.SampledProvenanceSpan(sequence_id="t", length=2)
    request = decode.pass_from_protobuf(sdk_bytes(spanned(prompt, sampled), ppo_datum()))
    assert request.spans == [
        [ProvenanceSpan("s", 4, 1, is_sampled=False), ProvenanceSpan("t", 0, 2, is_sampled=True)],
        [],
    ]
    assert request.operation == decode.pass_from_protobuf(sdk_bytes(ppo_datum(), ppo_datum())).operation


def test_provenance_spans_must_cover_the_tokens() -> None:
    short = spanned(sdk.PromptProvenanceSpan(sequence_id="s", length=2))
    with pytest.raises(WireError, match="cover 2 positions, but model_input has 3 tokens"):
        decode.pass_from_protobuf(sdk_bytes(short))


def one_tensor(**fields) -> bytes:
    message = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
    datum.loss_fn_inputs["weights"].CopyFrom(wire.Tensor(**fields))
    return message.SerializeToString()


def test_narrow_dtypes_are_widened_and_no_shape_is_one_dimension() -> None:
    def tensor(**fields) -> TensorData:
        return decode.pass_from_protobuf(one_tensor(**fields)).operation.data[0].loss_inputs["weights"]

    assert tensor(dense=FLOATS.data, dtype=wire.DTYPE_FLOAT32) == FLOATS
    upper_halves = b"".join(FLOATS.data[i + 2 : i + 4] for i in range(0, 12, 4))
    assert tensor(dense=upper_halves, dtype=wire.DTYPE_BFLOAT16) == FLOATS
    ints = tensor(dense=np.array([1, -2], "<i4").tobytes(), dtype=wire.DTYPE_INT32, shape=[2, 1])
    assert ints.dtype == "int64"
    assert dense(ints).tolist() == [[1], [-2]]


EIGHT = b"\0" * 8


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dense": b"\0" * 8}, "dtype 0 is unknown"),
        ({"dense": b"\0" * 8, "dtype": 99}, "dtype 99 is unknown"),
        ({"dense": b"\0" * 7, "dtype": 1}, "not a multiple"),
        ({"dense": b"\0" * 8, "dtype": 1, "shape": [3]}, "do not fill"),
        ({"dense": b"\0" * 8, "dtype": 1, "shape": [-1, -2]}, "not possible"),
        ({"dense": b"", "dtype": 1, "shape": [0] * 9}, "not possible"),
        ({"sparse_csr": wire.SparseCsr(values=EIGHT), "dtype": 2, "shape": [1, 1]}, "sparse"),
        ({"sparse_csr": wire.SparseCsr(values=EIGHT, crow_indices=EIGHT * 2, col_indices=EIGHT), "dtype": 2}, "sparse"),
    ],
)
def test_tensors_that_make_no_sense(fields: dict, said: str) -> None:
    with pytest.raises(WireError, match=rf"data\[0\]: 'weights': .*{said}"):
        decode.pass_from_protobuf(one_tensor(**fields))


def test_pictures_are_named_until_they_are_decoded() -> None:
    images = [sdk.ImageChunk(data=b"png", format="png", expected_tokens=n) for n in (3, 3, 4)]
    chunks = [sdk.EncodedTextChunk(tokens=[1, 2]), *images]
    request = decode.pass_from_protobuf(
        sdk_bytes(sdk.Datum(model_input=sdk.ModelInput(chunks=chunks), loss_fn_inputs={}))
    )
    text, *found = request.operation.data[0].chunks
    assert text == TextChunk((1, 2))
    names = [chunk.digest for chunk in found if isinstance(chunk, ImageChunk)]
    assert names[0] == names[1] != names[2]
    assert [request.files[name].expected_rows for name in names] == [3, 3, 4]
    assert {encoded.file for encoded in request.files.values()} == {b"png"}


def test_other_chunks_are_refused_by_name() -> None:
    sound = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=1)
    sound.data.add().model_input.add().dmel.dmel = b"x"
    with pytest.raises(WireError, match=r"data\[0\]: input chunk of type 'dmel'"):
        decode.pass_from_protobuf(sound.SerializeToString())
    message = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=1)
    message.data.add().model_input.add()
    with pytest.raises(WireError, match="'unknown'"):
        decode.pass_from_protobuf(message.SerializeToString())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff\xff", "not a ForwardBackwardRequest"),
        (b"", "seq_id is 0"),
        (wire.ForwardBackwardRequest(model_id="a/b", seq_id=1, data=[wire.Datum()]).SerializeToString(), "'a/b'"),
        (wire.ForwardBackwardRequest(model_id=MODEL, seq_id=1).SerializeToString(), "data is empty"),
        (
            wire.ForwardBackwardRequest(
                model_id=MODEL, seq_id=1, loss_fn_config={"x": float("nan")}
            ).SerializeToString(),
            "'x' is nan",
        ),
        (
            wire.ForwardBackwardRequest(
                model_id=MODEL, seq_id=1, loss_fn_config_v2={"x": wire.LossConfigValue()}
            ).SerializeToString(),
            "'x' has no value",
        ),
    ],
)
def test_requests_that_make_no_sense(body: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode.pass_from_protobuf(body)


# Passes in JSON: SDK 0.24


def json_tensor(values: np.ndarray, **more) -> dict:
    dtype = "int64" if values.dtype.kind == "i" else "float32"
    return {"data": values.flatten().tolist(), "dtype": dtype, "shape": list(values.shape), **more}


def json_pass(**datum) -> dict:
    inputs = {"target_tokens": json_tensor(np.array([2, 3, 4])), "weights": json_tensor(np.array([0.5, -1.0, 2.0]))}
    chunks = [{"tokens": [1, 2, 3], "type": "encoded_text"}]
    return {
        "data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs, **datum}],
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 1},
    }


def json_body(field: str, given: dict) -> bytes:
    return json.dumps({"model_id": MODEL, "seq_id": 4, field: given}).encode()


def test_json_passes_are_the_same_records() -> None:
    body = sdk_bytes(
        sdk_datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.5, -1.0, 2.0]),
        loss="ppo",
        config={"clip_low_threshold": 1.0},
    )
    expected = decode.pass_from_protobuf(body)
    assert decode.forward_backward_from_json(json_body("forward_backward_input", json_pass())) == expected
    forward = decode.forward_from_json(json_body("forward_input", json_pass()))
    assert forward.operation.forward_only
    assert forward.operation.data == expected.operation.data


def test_sparse_json() -> None:
    sparse = {"data": [5], "dtype": "int64", "shape": [2, 9], "sparse_crow_indices": [0, 0, 1]}
    inputs = {"target_tokens": {**sparse, "sparse_col_indices": [8]}}
    body = json_body("forward_input", json_pass(loss_fn_inputs=inputs))
    tensor = decode.forward_from_json(body).operation.data[0].loss_inputs["target_tokens"]
    assert dense(tensor)[1, 8] == 5
    with pytest.raises(WireError, match="need both"):
        decode.forward_from_json(json_body("forward_input", json_pass(loss_fn_inputs={"target_tokens": sparse})))


def test_whole_numbers_may_stand_for_floats_but_not_the_other_way() -> None:
    def weights(data: list, dtype: str) -> TensorData:
        given = json_pass(loss_fn_inputs={"weights": {"data": data, "dtype": dtype}})
        return decode.forward_from_json(json_body("forward_input", given)).operation.data[0].loss_inputs["weights"]

    assert dense(weights([1, 2], "float32")).tolist() == [1.0, 2.0]
    assert dense(weights([1, 2.5], "float32")).tolist() == [1.0, 2.5]
    assert dense(weights([float("-inf")], "float32")).tolist() == [float("-inf")]
    for odd in ([1.5], ["1"], [True], [2**63], [None]):
        with pytest.raises(WireError):
            weights(odd, "int64")
    with pytest.raises(WireError, match="does not fit"):
        weights([1e300], "float32")


# Samples


def sdk_sample(prompt: sdk.ModelInput | None = None, params: sdk.SamplingParams | None = None, **fields) -> bytes:
    request = sdk.SampleRequest(
        prompt=prompt or sdk.ModelInput.from_ints([1, 2, 3, 4]),
        sampling_params=params or sdk.SamplingParams(),
        **{"sampling_session_id": "373e:sample:0", "seq_id": 5, **fields},
    )
    return json.dumps(request.model_dump(exclude_none=True, mode="json")).encode()


def test_a_sample_of_the_sdk() -> None:
    params = sdk.SamplingParams(max_tokens=12, seed=1, temperature=0.7, top_k=20, top_p=0.9)
    targets = {"data": [5, -1, 7], "dtype": "int64", "shape": [3, 1]}
    body = sdk_sample(
        params=params,
        seq_id=3_000_000_000_000_000_001,
        num_samples=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=4,
        prompt_logprobs_last_n=2,
    )
    call = decode.sample_from_json(body)
    assert (call.sampling_session_id, call.seq_id) == ("373e:sample:0", 3_000_000_000_000_000_001)
    request = call.request
    assert request.prompt == (1, 2, 3, 4)
    assert (request.num_samples, request.topk_prompt_logprobs, request.topk_logprobs) == (2, 2, 3)
    assert (request.prompt_logprobs, request.prompt_logprobs_last_n, request.prompt_alt_tokens_k) == (True, 2, 4)
    assert request.target_prompt_logprobs is not None
    assert dense(request.target_prompt_logprobs).tolist() == [[5], [-1], [7]]
    drawn = request.params
    assert (drawn.max_tokens, drawn.seed, drawn.temperature, drawn.top_k, drawn.top_p) == (12, 1, 0.7, 20, 0.9)


@pytest.mark.parametrize(
    ("stop", "token_ids", "strings"),
    [
        (None, None, ()),
        ([], (), ()),
        ("\n\n", None, ("\n\n",)),
        (["a", "b"], None, ("a", "b")),
        ([7, 8], (7, 8), ()),
    ],
)
def test_stop_in_all_its_forms(stop, token_ids, strings) -> None:
    params = decode.sample_from_json(sdk_sample(params=sdk.SamplingParams(stop=stop))).request.params
    assert (params.stop_token_ids, params.stop_strings) == (token_ids, strings)


def test_prompt_chunks_are_joined_around_pictures() -> None:
    text = sdk.EncodedTextChunk(tokens=[1, 2])
    assert decode.sample_from_json(sdk_sample(sdk.ModelInput(chunks=[text, text]))).request.prompt == (1, 2, 1, 2)
    image = sdk.ImageChunk(data=b"png", format="png")
    pointer = sdk.ImageAssetPointerChunk(format="png", location="data:,x", expected_tokens=7)
    call = decode.sample_from_json(sdk_sample(sdk.ModelInput(chunks=[text, image, text, pointer])))
    assert [one.start for one in call.request.images] == [2, 4]
    assert [(one.file, one.url, one.expected_rows) for one in call.files.values()] == [
        (b"png", "", None),
        (b"", "data:,x", 7),
    ]
    with pytest.raises(WireError, match="type 'dmel' is not supported"):
        decode.sample_from_json(sdk_sample(sdk.ModelInput(chunks=[sdk.DmelChunk(dmel=b"x")])))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_id": None}, "seq_id is missing"),
        ({"sampling_session_id": None}, "sampling_session_id is missing"),
        ({"seq_id": 2**63}, "seq_id"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": "2"}, "num_samples: Input should be a valid integer, found '2'"),
        ({"prompt": {"chunks": [{"type": "encoded_text"}]}}, "tokens is missing"),
        ({"prompt": {"chunks": [{"tokens": [2**31]}]}}, "tokens"),
        ({"sampling_params": {"stop": ["a", 1]}}, "stop"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
    ],
)
def test_samples_that_make_no_sense(change: dict, said: str) -> None:
    body = json.loads(sdk_sample()) | change
    with pytest.raises(WireError, match=said) as caught:
        decode.sample_from_json(json.dumps(body).encode())
    assert "\n" not in str(caught.value)


# Compression


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        (None, bytes),
        ("identity", bytes),
        ("zstd", zstandard.ZstdCompressor().compress),
        ("ZSTD", zstandard.ZstdCompressor(write_content_size=False).compress),
        ("gzip", gzip.compress),
    ],
)
def test_bodies_are_unpacked_up_to_a_bound(encoding, pack) -> None:
    body = b"palestra" * 1000
    assert decompress(pack(body), encoding, 8000) == body
    assert decompress(pack(b""), encoding, 8000) == b""
    with pytest.raises(WireError) as caught:
        decompress(pack(body), encoding, 7999)
    assert isinstance(caught.value, TooLarge) or encoding == "ZSTD"


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_broken_compression_is_refused(encoding: str) -> None:
    whole = {"zstd": zstandard.ZstdCompressor().compress, "gzip": gzip.compress}[encoding](b"palestra" * 100)
    for body in (b"", b"junk", whole[:-3], whole + b"more"):
        with pytest.raises(WireError):
            decompress(body, encoding, 1 << 20)


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(WireError, match="'br' is not supported"):
        decompress(b"x", "br", 10)


# Whatever arrives

WHOLE_PASS = sdk_bytes(ppo_datum(), ppo_datum(), loss="ppo", config={"clip_low_threshold": 0.8, "mode": "x"})
WHOLE_SAMPLE = sdk_sample(params=sdk.SamplingParams(stop=["a"]), target_prompt_logprobs={"data": [1], "dtype": "int64"})
WHOLE_JSON_PASS = json_body("forward_input", json_pass())


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    body = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(body[: draw(st.integers(len(body) // 2, len(body)))] if draw(st.booleans()) else body)


def read(decoder: Callable[[bytes], object], body: bytes) -> None:
    said = "fine"
    try:
        decoder(body)
    except WireError as e:
        said = str(e)
    assert said
    assert "\n" not in said


@examples(150)
@given(st.binary(max_size=64) | mutated(WHOLE_PASS))
def test_any_protobuf_is_read_or_refused(body: bytes) -> None:
    read(decode.pass_from_protobuf, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def altered(draw: st.DrawFn, whole: bytes) -> bytes:
    """One value somewhere replaced by another."""
    root = {"": json.loads(whole)}
    spot, key = root, ""
    while isinstance(spot[key], dict | list) and spot[key] and draw(st.integers(0, 4)):
        spot = spot[key]
        key = draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
    spot[key] = draw(JSON)
    return json.dumps(root[""]).encode()


@examples(150)
@given(st.binary(max_size=64) | mutated(WHOLE_SAMPLE) | altered(WHOLE_SAMPLE))
def test_any_sample_is_read_or_refused(body: bytes) -> None:
    read(decode.sample_from_json, body)


@examples(150)
@given(st.binary(max_size=64) | mutated(WHOLE_JSON_PASS) | altered(WHOLE_JSON_PASS))
def test_any_json_pass_is_read_or_refused(body: bytes) -> None:
    read(decode.forward_from_json, body)


@examples(100)
@given(st.sampled_from(["zstd", "gzip"]), st.data())
def test_any_compressed_body_is_read_or_refused(encoding: str, data: st.DataObject) -> None:
    whole = zstandard.ZstdCompressor().compress(WHOLE_PASS) if encoding == "zstd" else gzip.compress(WHOLE_PASS)
    body = data.draw(st.binary(max_size=64) | mutated(whole))
    read(lambda b: decompress(b, encoding, 1 << 16), body)


def test_a_bomb_is_refused_early() -> None:
    zeros = bytes(1 << 26)
    for encoding, body in (
        ("zstd", zstandard.ZstdCompressor().compress(zeros)),
        ("gzip", zlib.compress(zeros, wbits=31)),
    ):
        with pytest.raises(TooLarge):
            decompress(body, encoding, 1 << 20)
