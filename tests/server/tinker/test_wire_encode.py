"""The SDK reads what we write."""

from __future__ import annotations

import json
import math
import time

import msgspec
import numpy as np
import pytest
from tinker import types as sdk
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from palestra.server.tinker import encode
from palestra.types import SampledSequence, SampleResult, StopReason, TensorData, TopLogprobs
from palestra.types.engine import Blame, DatumOutput, EngineFailure, PassResult, StepDone


def output(values: np.ndarray) -> DatumOutput:
    return DatumOutput(logprobs=values.astype("<f4").tobytes(), shape=values.shape)


def sequence(tokens: list[int], reason: StopReason = StopReason.STOP, **more) -> SampledSequence:
    return SampledSequence(tokens=tokens, logprobs=[-0.5 * t for t in tokens], stop_reason=reason, **more)


def read_sample(**fields):
    return deserialize_sample_response(encode.sample_protobuf(SampleResult(**{"sequences": [], **fields})))


# Passes


def test_outputs_of_every_width_come_back_in_order() -> None:
    rng = np.random.default_rng(0)
    shapes = [(3,), (5,), (0,), (2, 4), (1, 4), (3, 2), (7,)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    result = PassResult(outputs=[output(a) for a in arrays], metrics={"loss:sum": 1.5, "odd:mean": math.nan})
    read = deserialize_forward_backward_output(encode.pass_protobuf(result))
    assert read.loss_fn_output_type == "ArrayRecord"
    assert read.metrics["loss:sum"] == 1.5
    assert math.isnan(read.metrics["odd:mean"])
    assert len(read.loss_fn_outputs) == len(arrays)
    for fields, array in zip(read.loss_fn_outputs, arrays, strict=True):
        assert fields["logprobs"].shape == list(array.shape)
        assert np.array_equal(fields["logprobs"].to_numpy(), array)


def test_entropies_stand_beside_the_logprobs_where_a_pass_has_them() -> None:
    logprobs, entropies = np.zeros((3, 2), np.float32), np.array([0.5, math.nan, 2.0], np.float32)
    outputs = [
        msgspec.structs.replace(output(part), entropies=entropies[: len(part)].tobytes())
        for part in (logprobs, logprobs[:1, 0])
    ]
    result = PassResult(outputs=outputs, metrics={})
    read = deserialize_forward_backward_output(encode.pass_protobuf(result)).loss_fn_outputs
    for fields, length in zip(read, (3, 1), strict=True):
        assert fields["entropies"].shape == [length]
        assert np.array_equal(fields["entropies"].to_numpy(), entropies[:length], equal_nan=True)
    body = json.loads(encode.json_bytes(encode.pass_json(result)))
    assert body["loss_fn_outputs"][1]["entropies"] == {"data": [0.5], "dtype": "float32", "shape": [1]}
    plain = PassResult(outputs=[output(logprobs)], metrics={})
    assert "entropies" not in deserialize_forward_backward_output(encode.pass_protobuf(plain)).loss_fn_outputs[0]


def test_no_outputs() -> None:
    read = deserialize_forward_backward_output(encode.pass_protobuf(PassResult(outputs=[], metrics={"loss:sum": 0.0})))
    assert read.loss_fn_outputs == []
    assert read.metrics == {"loss:sum": 0.0}


def test_a_pass_in_json() -> None:
    array = np.array([[-0.5, -math.inf], [math.nan, -2.0]], np.float32)
    body = json.loads(
        encode.json_bytes(encode.pass_json(PassResult(outputs=[output(array)], metrics={"loss:sum": 2.0})))
    )
    tensor = body["loss_fn_outputs"][0]["logprobs"]
    assert (tensor["dtype"], tensor["shape"]) == ("float32", [2, 2])
    assert np.array_equal(np.array(tensor["data"], np.float32).reshape(2, 2), array, equal_nan=True)
    assert body["metrics"] == {"loss:sum": 2.0}


# Samples


def test_several_sequences() -> None:
    reasons = [StopReason.STOP, StopReason.LENGTH, StopReason.ABORT]
    sequences = [sequence([1, 2, 2**31 - 1][: i + 1], reason) for i, reason in enumerate(reasons)]
    read = read_sample(sequences=sequences, cached_prompt_tokens=9)
    assert [s.stop_reason for s in read.sequences] == ["stop", "length", "length"]
    assert [s.tokens for s in read.sequences] == [s.tokens for s in sequences]
    assert [s.logprobs for s in read.sequences] == [np.array(s.logprobs, np.float32).tolist() for s in sequences]
    assert read.prompt_cache_hit_tokens == 9
    assert read.prompt_logprobs is None
    assert read.topk_prompt_logprobs is None
    assert read.target_prompt_logprobs is None
    assert read.prompt_alt_tokens is None
    assert read.sequences[0].topk_logprobs is None


def test_a_sequence_without_tokens() -> None:
    read = read_sample(sequences=[sequence([])])
    assert read.sequences[0].tokens == []
    assert read.sequences[0].logprobs is None


def test_absent_prompt_logprobs_are_none() -> None:
    assert read_sample(prompt_logprobs=[None, None, -0.5, -math.inf]).prompt_logprobs == [None, None, -0.5, -math.inf]


def test_top_k_of_prompt_and_samples() -> None:
    rows = [None, TopLogprobs((5, 6), (-0.5, -1.0)), TopLogprobs((7,), (-0.25,)), TopLogprobs((0, 1), (-0.5, -2.0))]
    expected = [None, [(5, -0.5), (6, -1.0)], [(7, -0.25)], [(0, -0.5), (1, -2.0)]]
    read = read_sample(sequences=[sequence([1, 2, 3], topk_logprobs=rows[1:])], topk_prompt_logprobs=rows)
    assert read.topk_prompt_logprobs == expected
    assert read.sequences[0].topk_logprobs == expected[1:]


@pytest.mark.parametrize("rows", [[], [None], [TopLogprobs((), ())]])
def test_empty_top_k_is_none(rows: list[TopLogprobs | None]) -> None:
    assert read_sample(topk_prompt_logprobs=rows).topk_prompt_logprobs is None


def tensor(array: np.ndarray) -> TensorData:
    dtype = "int64" if array.dtype.kind == "i" else "float32"
    return TensorData(data=array.tobytes(), dtype=dtype, shape=array.shape)


def test_targets_and_drawn_alternatives() -> None:
    targets = np.array([[-0.5, 0.0], [-1.0, -2.0]], np.float32)
    drawn = np.array([[1, 2, 3], [4, 5, 6]])
    logprobs = -drawn.astype(np.float32)
    read = read_sample(
        target_prompt_logprobs=tensor(targets), prompt_alt_tokens=tensor(drawn), prompt_alt_logprobs=tensor(logprobs)
    )
    assert read.target_prompt_logprobs is not None
    assert read.prompt_alt_tokens is not None
    assert np.array_equal(read.target_prompt_logprobs.to_numpy(), targets)
    assert np.array_equal(read.prompt_alt_tokens.tokens.to_numpy(), drawn)
    assert np.array_equal(read.prompt_alt_tokens.logprobs.to_numpy(), logprobs)


def test_sparse_targets_stay_sparse() -> None:
    sparse = TensorData(
        data=np.array([-0.5], "<f4").tobytes(),
        dtype="float32",
        shape=(2, 9),
        crow_indices=np.array([0, 0, 1], "<i8").tobytes(),
        col_indices=np.array([8], "<i8").tobytes(),
    )
    read = read_sample(target_prompt_logprobs=sparse).target_prompt_logprobs
    assert read is not None
    assert (read.sparse_crow_indices, read.sparse_col_indices, read.data) == ([0, 0, 1], [8], [-0.5])


def test_a_sample_in_json() -> None:
    result = SampleResult(
        sequences=[sequence([1, 2], StopReason.ABORT)],
        prompt_logprobs=[None, -0.5],
        topk_prompt_logprobs=[None, TopLogprobs((3,), (-0.5,))],
        cached_prompt_tokens=1,
    )
    assert json.loads(encode.json_bytes(encode.sample_json(result))) == {
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [1, 2], "logprobs": [-0.5, -1.0]}],
        "prompt_logprobs": [None, -0.5],
        "topk_prompt_logprobs": [None, [[3, -0.5]]],
        "prompt_cache_hit_tokens": 1,
    }


# Everything else


def test_other_results() -> None:
    path = "tinker://s:train:0/weights/a"
    assert sdk.CreateModelResponse.model_validate(encode.created_json("s:train:0")).model_id == "s:train:0"
    assert sdk.SaveWeightsResponse.model_validate(encode.saved_json(path)).path == path
    assert sdk.LoadWeightsResponse.model_validate(encode.loaded_json(path, "m")).path == path
    assert sdk.SaveWeightsForSamplerResponse.model_validate(encode.saved_for_sampler_json(path)).path == path
    assert encode.kept_json("s:sample:0") == {
        "type": "save_weights_for_sampler",
        "path": None,
        "sampling_session_id": "s:sample:0",
    }
    assert encode.saved_external_json(path, 7)["size_bytes"] == 7
    read = json.loads(encode.json_bytes(encode.step_json(StepDone(metrics={"norm": math.nan, "lr": 0.5}))))
    assert math.isnan(sdk.OptimStepResponse.model_validate(read).metrics["norm"])  # type: ignore[index]
    failed = encode.failure_json(EngineFailure(message="unknown loss", blame=Blame.USER))
    assert failed == {"error": "unknown loss", "category": "user"}


def test_a_batch_takes_milliseconds() -> None:
    result = SampleResult(sequences=[sequence(list(range(64))) for _ in range(512)])
    fastest = math.inf
    for _ in range(5):
        start = time.perf_counter()
        encode.sample_protobuf(result)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 0.05  # about 2 ms on an idle core
