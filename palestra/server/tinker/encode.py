"""Converts the engine's records to response bodies.

Protobuf for passes and samples (JSON for SDKs before 0.25), JSON for everything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, groupby
from math import nan

from palestra.server.core.futures import TrainFuture
from palestra.server.tinker import wire_pb2 as wire
from palestra.server.tinker.schemas import FutureResponse
from palestra.server.tinker.tensors import float32_bytes, float32_values, int32_bytes, int64_bytes, message_of_tensor
from palestra.types import SampledSequence, SampleResult, StopReason, TopLogprobs
from palestra.types.engine import EngineFailure, PassResult, StepDone
from palestra.util.json_types import JsonObject

RECORD = "ArrayRecord"
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # the SDK's mark for an empty top-k cell


def accepted(future: TrainFuture) -> FutureResponse:
    return FutureResponse(request_id=future.request_id, model_id=future.model_id)


# Passes


def pass_protobuf(result: PassResult) -> bytes:
    message = wire.ForwardBackwardOutput(loss_fn_output_type=RECORD, metrics=result.metrics)
    for trailing, run in groupby(result.outputs, key=lambda output: output.shape[1:]):
        outputs = list(run)
        record = message.loss_fn_outputs.add(type_tag=RECORD, num_datums=len(outputs))
        _add_field(record, "logprobs", [o.logprobs for o in outputs], trailing)
        if any(o.entropies for o in outputs):
            _add_field(record, "entropies", [o.entropies for o in outputs])
    return message.SerializeToString()


def _add_field(record: wire.ArrayRecord, name: str, parts: Sequence[bytes], trailing: Sequence[int] = ()) -> None:
    field = record.fields[name]
    field.data = b"".join(parts)
    field.offsets = int64_bytes([*accumulate(map(len, parts), initial=0)])
    field.dtype = wire.DTYPE_FLOAT32
    field.trailing_shape.extend(trailing)


def pass_json(result: PassResult) -> JsonObject:
    return {
        "loss_fn_output_type": RECORD,
        "loss_fn_outputs": [
            {
                "logprobs": _tensor_json(o.logprobs, o.shape),
                **({"entropies": _tensor_json(o.entropies, o.shape[:1])} if o.entropies else {}),
            }
            for o in result.outputs
        ],
        "metrics": result.metrics,
    }


def _tensor_json(values: bytes, shape: Sequence[int]) -> JsonObject:
    return {"data": float32_values(values), "dtype": "float32", "shape": list(shape)}


# Samples


def sample_protobuf(result: SampleResult) -> bytes:
    message = wire.SampleResponse(
        sequences=[_sequence(s) for s in result.sequences], prompt_cache_hit_tokens=result.cached_prompt_tokens
    )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = float32_bytes([nan if x is None else x for x in result.prompt_logprobs])
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(message_of_tensor(result.target_prompt_logprobs))
    if result.prompt_alt_tokens is not None and result.prompt_alt_logprobs is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(message_of_tensor(result.prompt_alt_tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(message_of_tensor(result.prompt_alt_logprobs))
    return message.SerializeToString()


def sample_json(result: SampleResult) -> JsonObject:
    """Returns what SDKs before 0.25 can request."""
    topk = result.topk_prompt_logprobs
    return {
        "type": "sample",
        "sequences": [
            {"stop_reason": _stop_reason(s).value, "tokens": s.tokens, "logprobs": s.logprobs} for s in result.sequences
        ],
        "prompt_logprobs": result.prompt_logprobs,
        "topk_prompt_logprobs": None if topk is None else [_pairs(row) for row in topk],
        "prompt_cache_hit_tokens": result.cached_prompt_tokens,
    }


def _sequence(sequence: SampledSequence) -> wire.SampledSequence:
    stopped = _stop_reason(sequence) is StopReason.STOP
    return wire.SampledSequence(
        stop_reason=wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH,
        tokens=int32_bytes(sequence.tokens),
        logprobs=float32_bytes(sequence.logprobs),
        topk_sampled_logprobs=_topk(sequence.topk_logprobs) if sequence.topk_logprobs else None,
    )


def _stop_reason(sequence: SampledSequence) -> StopReason:
    """The wire format has no third reason."""
    return StopReason.STOP if sequence.stop_reason is StopReason.STOP else StopReason.LENGTH


def _topk(rows: Sequence[TopLogprobs | None]) -> wire.TopkLogprobs:
    """Returns a dense matrix; short and missing rows are filled up."""
    k = max((len(row.token_ids) for row in rows if row is not None), default=0)
    token_ids: list[int] = []
    logprobs: list[float] = []
    for row in rows:
        found = 0
        if row is not None:
            found = len(row.token_ids)
            token_ids += row.token_ids
            logprobs += row.logprobs
        if found < k:
            token_ids += [NO_TOKEN] * (k - found)
            logprobs += [NO_LOGPROB] * (k - found)
    return wire.TopkLogprobs(token_ids=int32_bytes(token_ids), logprobs=float32_bytes(logprobs), k=k, length=len(rows))


def _pairs(row: TopLogprobs | None) -> list[tuple[int, float]] | None:
    return None if row is None else list(zip(row.token_ids, row.logprobs, strict=True))


# Everything else


def created_json(model_id: str) -> JsonObject:
    return {"type": "create_model", "model_id": model_id}


def step_json(result: StepDone) -> JsonObject:
    return {"metrics": result.metrics}


def saved_json(path: str) -> JsonObject:
    return {"type": "save_weights", "path": path}


def saved_for_sampler_json(path: str) -> JsonObject:
    return {"type": "save_weights_for_sampler", "path": path}


def kept_json(sampling_session_id: str) -> JsonObject:
    return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampling_session_id}


def saved_external_json(path: str, size_bytes: int) -> JsonObject:
    return {"type": "save_weights_external", "path": path, "size_bytes": size_bytes}


def loaded_json(path: str, model_id: str) -> JsonObject:
    return {"type": "load_weights", "path": path, "model_id": model_id}


MAX_ERROR_CHARS = 2000  # a message may repeat what the client sent


def failure_json(failure: EngineFailure) -> JsonObject:
    return {"error": failure.message[:MAX_ERROR_CHARS], "category": failure.blame.value}


def json_bytes(body: JsonObject) -> bytes:
    """Writes NaN and infinity as Python's json does: the SDK reads those, and refuses null in their place."""
    return json.dumps(body, separators=(",", ":")).encode()
