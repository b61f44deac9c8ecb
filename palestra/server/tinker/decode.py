"""Converts request bodies to records. Whatever arrives, the result is a record or a WireError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import TypeVar

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError

from palestra.server.core.paths import check_run_id
from palestra.server.core.pictures.locations import PictureError, from_base64
from palestra.server.core.pictures.reader import EncodedPicture
from palestra.server.core.samples.samplers import SampleCall
from palestra.server.core.training.routing_records import ProvenanceSpan
from palestra.server.core.wire_errors import WireError, shown, wire_error_of
from palestra.server.tinker import schemas_data as schemas
from palestra.server.tinker import wire_pb2 as wire
from palestra.server.tinker.tensors import int32_values, tensor_of_message, tensor_of_schema
from palestra.types import Datum, ImageChunk, PlacedImage, SampleRequest, SamplingParams, TextChunk
from palestra.types.engine import Pass

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class PassRequest:
    model_id: str
    seq_id: int
    """1 or more."""
    operation: Pass
    spans: list[list[ProvenanceSpan]] = field(default_factory=list)
    """Where the tokens of each datum come from, an empty list where the client does not say; empty if nowhere."""
    files: dict[str, EncodedPicture] = field(default_factory=dict)
    """Pictures, by the names that stand in image chunks in place of digests."""


def parse_json(schema: type[M], body: bytes) -> M:
    try:
        return schema.model_validate_json(body)
    except ValidationError as e:
        raise wire_error_of(e) from None


# forward and forward_backward


def pass_from_protobuf(body: bytes) -> PassRequest:
    try:
        message = wire.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise WireError("the body is not a ForwardBackwardRequest in protobuf") from None
    if message.seq_id < 1:
        raise WireError(f"seq_id is {message.seq_id}; it must be 1 or more")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = _config_value(name, value)
    for name, value in config.items():
        if isinstance(value, float) and not isfinite(value):
            raise WireError(f"loss_fn_config {shown(name)} is {value}; it must be finite")
    files: dict[str, EncodedPicture] = {}
    operation = Pass(
        data=_each(partial(_datum_of_message, files), message.data),
        loss=message.loss_fn,
        config=dict(sorted(config.items())),
        forward_only=message.forward_only,
    )
    spans = [] if files else _each(_spans_of_message, message.data)  # they do not count positions of pictures
    spans = spans if any(spans) else []
    return PassRequest(check_run_id(message.model_id), message.seq_id, operation, spans, files)


def forward_backward_from_json(body: bytes) -> PassRequest:
    request = parse_json(schemas.ForwardBackwardRequest, body)
    return _pass_of_schema(request, request.forward_backward_input, forward_only=False)


def forward_from_json(body: bytes) -> PassRequest:
    request = parse_json(schemas.ForwardRequest, body)
    return _pass_of_schema(request, request.forward_input, forward_only=True)


def _pass_of_schema(
    request: schemas.ForwardBackwardRequest | schemas.ForwardRequest, given: schemas.PassInput, *, forward_only: bool
) -> PassRequest:
    files: dict[str, EncodedPicture] = {}
    operation = Pass(
        data=_each(partial(_datum_of_schema, files), given.data),
        loss=given.loss_fn,
        config=dict(given.loss_fn_config or {}),
        forward_only=forward_only,
    )
    return PassRequest(check_run_id(request.model_id), request.seq_id, operation, files=files)


T = TypeVar("T")
R = TypeVar("R")


def _each(convert: Callable[[T], R], data: Sequence[T]) -> list[R]:
    if not data:
        raise WireError("data is empty; send at least one datum")
    converted: list[R] = []
    for datum in data:
        try:
            converted.append(convert(datum))
        except WireError as e:
            raise WireError(f"data[{len(converted)}]: {e}") from None
    return converted


def _config_value(name: str, value: wire.LossConfigValue) -> float | str:
    match value.WhichOneof("value"):
        case "number":
            return value.number
        case "text":
            return value.text
        case _:
            raise WireError(f"loss_fn_config {shown(name)} has no value")


def _datum_of_message(files: dict[str, EncodedPicture], datum: wire.Datum) -> Datum:
    """Sorted, because protobuf reads a map in a different order in every process, and a repeated request must be
    equal."""
    inputs = datum.loss_fn_inputs
    return Datum(
        chunks=tuple(_chunk_of_message(files, chunk) for chunk in datum.model_input),
        loss_inputs={name: tensor_of_message(name, inputs[name]) for name in sorted(inputs)},
    )


def _spans_of_message(datum: wire.Datum) -> list[ProvenanceSpan]:
    spans: list[ProvenanceSpan] = []
    for span in datum.model_input_spans:
        is_sampled = span.WhichOneof("source") == "sampled_tokens"
        run = span.sampled_tokens if is_sampled else span.prompt_tokens
        if min(run.offset, run.length) < 0:
            raise WireError(f"model_input_spans: offset {run.offset} and length {run.length} must not be negative")
        spans.append(ProvenanceSpan(run.sequence_id, run.offset, run.length, is_sampled))
    n_tokens = sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
    covered = sum(span.length for span in spans)
    if spans and covered != n_tokens:
        raise WireError(f"model_input_spans cover {covered} positions, but model_input has {n_tokens} tokens")
    return spans


def _datum_of_schema(files: dict[str, EncodedPicture], datum: schemas.DatumBody) -> Datum:
    return Datum(
        chunks=tuple(_chunk_of_schema(files, chunk) for chunk in datum.model_input.chunks),
        loss_inputs={name: tensor_of_schema(name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
    )


def _chunk_of_message(files: dict[str, EncodedPicture], chunk: wire.Chunk) -> TextChunk | ImageChunk:
    kind = chunk.WhichOneof("chunk")
    if kind == "image":
        expected = chunk.image.expected_tokens if chunk.image.HasField("expected_tokens") else None
        return _image(files, EncodedPicture(chunk.image.data, expected_rows=expected))
    if kind != "encoded_text":
        raise _unsupported_chunk(kind or "unknown")
    tokens = chunk.encoded_text.tokens
    if len(tokens) % 4:
        raise WireError(f"encoded_text: {len(tokens)} bytes are not a whole number of int32 tokens")
    if len(tokens) > 4 * schemas.MAX_TOKENS:
        raise WireError(f"encoded_text: {len(tokens) // 4} tokens; a chunk may have at most {schemas.MAX_TOKENS}")
    return TextChunk(int32_values(tokens))


def _chunk_of_schema(files: dict[str, EncodedPicture], chunk: schemas.ModelInputChunk) -> TextChunk | ImageChunk:
    match chunk:
        case schemas.ModelInputChunk(type="encoded_text", tokens=list(tokens)):
            return TextChunk(tuple(tokens))
        case schemas.ModelInputChunk(type="image", data=str(data)):
            return _image(files, EncodedPicture(_file(data), expected_rows=chunk.expected_tokens))
        case schemas.ModelInputChunk(type="image_asset_pointer", location=str(location)):
            return _image(files, EncodedPicture(url=location, expected_rows=chunk.expected_tokens))
    field = {"encoded_text": "tokens", "image": "data", "image_asset_pointer": "location"}.get(chunk.type)
    raise _unsupported_chunk(chunk.type) if field is None else WireError(f"{chunk.type}: {field} is missing")


def _file(given: str) -> bytes:
    try:
        return from_base64(given)
    except PictureError as e:
        raise WireError(str(e)) from None


def _image(files: dict[str, EncodedPicture], encoded: EncodedPicture) -> ImageChunk:
    """Pictures that a client expects to take other numbers of positions are kept apart: each is checked."""
    name = f"{encoded.key} {encoded.expected_rows}"
    files[name] = encoded
    return ImageChunk(name)


def _unsupported_chunk(kind: str) -> WireError:
    return WireError(f"input chunk of type {shown(kind)} is not supported; send encoded_text or image chunks")


# Samples


def sample_from_json(body: bytes) -> SampleCall:
    given = parse_json(schemas.SampleRequestBody, body)
    if given.sampling_session_id is None and given.base_model is None and given.model_path is None:
        raise WireError("sampling_session_id is missing")
    if given.sampling_session_id is not None and given.seq_id is None:
        raise WireError("seq_id is missing; a sampling session needs it")
    targets = given.target_prompt_logprobs
    prompt: list[int] = []
    images: list[PlacedImage] = []
    files: dict[str, EncodedPicture] = {}
    for chunk in (_chunk_of_schema(files, chunk) for chunk in given.prompt.chunks):
        if isinstance(chunk, ImageChunk):
            images.append(PlacedImage(len(prompt), chunk.digest))
        else:
            prompt += chunk.tokens
    request = SampleRequest(
        prompt=tuple(prompt),
        images=tuple(images),
        params=_sampling_params(given.sampling_params),
        num_samples=given.num_samples,
        topk_logprobs=given.topk_sample_logprobs,
        prompt_logprobs=bool(given.prompt_logprobs),
        topk_prompt_logprobs=given.topk_prompt_logprobs,
        prompt_logprobs_last_n=given.prompt_logprobs_last_n,
        target_prompt_logprobs=None if targets is None else tensor_of_schema("target_prompt_logprobs", targets),
        prompt_alt_tokens_k=given.prompt_alt_tokens_k,
        record_routing=bool(given.record_stability_info),
    )
    session = given.sampling_session_id
    return SampleCall(request, session, given.seq_id, given.base_model, given.model_path, files=files)


def _sampling_params(given: schemas.SamplingParamsBody) -> SamplingParams:
    """Stop strings are added to the model's end of sequence; token ids, and an empty list, replace it."""
    token_ids: tuple[int, ...] | None = None
    strings: tuple[str, ...] = ()
    match given.stop:
        case None:
            pass
        case str(text):
            strings = (text,)
        case []:
            token_ids = ()
        case [str(), *_]:
            strings = tuple(str(s) for s in given.stop)
        case _:
            token_ids = tuple(int(t) for t in given.stop)
    return SamplingParams(
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        stop_token_ids=token_ids,
        stop_strings=strings,
    )
