"""Tinker: models and their training, samples, and waiting for results. Thin: what requests mean is in `service`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from palestra.server.http.access import CallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.http.openapi import JSON_BODY
from palestra.server.tinker import schemas as s
from palestra.server.tinker.decode import (
    forward_backward_from_json,
    forward_from_json,
    pass_from_protobuf,
    sample_from_json,
)
from palestra.server.tinker.encode import json_bytes
from palestra.server.tinker.schemas_rest import SamplerResponse
from palestra.server.tinker.service import ServiceNow
from palestra.util.json_types import JsonObject

training = APIRouter(prefix="/api/v1", tags=["training"])
sampling = APIRouter(prefix="/api/v1", tags=["sampling"])
results = APIRouter(prefix="/api/v1", tags=["futures"])

PROTOBUF = "application/x-protobuf"
_ANSWERS: dict[int | str, JsonObject] = {408: {"model": s.TryAgainResponse, "description": "Not ready yet; ask again."}}


def _body_of(*schemas: type[s.WireModel]) -> JsonObject:
    """Describes bodies to OpenAPI that are read by hand, for speed and for protobuf."""
    content: JsonObject = {"application/json": {"schema": schemas[0].model_json_schema()}} if schemas else {}
    return {"requestBody": {"required": True, "content": {**content, PROTOBUF: {"schema": {"type": "string"}}}}}


@training.post("/create_model", response_model_exclude_none=True)
async def create_model(body: s.CreateModelRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Make a LoRA adapter on a base model."""
    return await service.models.create_model(caller, body)


@training.post("/get_info")
async def get_info(body: s.ModelRequest, service: ServiceNow, caller: CallerNow) -> s.GetInfoResponse:
    """Base model, rank and tokenizer of a model."""
    return service.models.get_info(caller, body.model_id)


@training.post("/forward_backward", openapi_extra=_body_of(), response_model_exclude_none=True)
async def forward_backward(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Compute a loss and add its gradient; with `forward_only` the loss alone."""
    body = await read_body(request)
    is_protobuf = request.headers.get("content-type", "").startswith(PROTOBUF)
    decode = pass_from_protobuf if is_protobuf else forward_backward_from_json
    return await service.training.run_pass(caller, await decoded(decode, body))


@training.post("/forward", openapi_extra=_body_of(), response_model_exclude_none=True)
async def forward(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """The same without gradients, for SDK 0.24 and older: newer ones send `forward_only`."""
    return await service.training.run_pass(caller, await decoded(forward_from_json, await read_body(request)))


@training.post("/optim_step", response_model_exclude_none=True)
async def optim_step(body: s.OptimStepRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Make one optimizer step with the accumulated gradient."""
    return await service.training.optim_step(caller, body)


@training.post("/save_weights", response_model_exclude_none=True)
async def save_weights(body: s.SaveWeightsRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Save weights and optimizer state as a checkpoint."""
    return await service.training.save_weights(caller, body)


@training.post("/save_weights_for_sampler", response_model_exclude_none=True)
async def save_weights_for_sampler(
    body: s.SaveWeightsForSamplerRequest, service: ServiceNow, caller: CallerNow
) -> s.FutureResponse:
    """Save the weights for sampling: under a name, or as a sampler of this session."""
    return await service.training.save_weights_for_sampler(caller, body)


@training.post("/save_weights_external", response_model_exclude_none=True)
async def save_weights_external(
    body: s.SaveWeightsExternalRequest, service: ServiceNow, caller: CallerNow
) -> s.FutureResponse:
    """Save the weights alone as an export, to be downloaded; a second one of the same name replaces it."""
    return await service.training.save_weights_external(caller, body)


@training.post("/load_weights", response_model_exclude_none=True)
async def load_weights(body: s.LoadWeightsRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Load a checkpoint into a model, or as a new one."""
    if body.model_id is None:
        return await service.models.load_as_new(caller, body)
    return await service.training.load_into(caller, body)


@training.post("/unload_model", response_model_exclude_none=True)
async def unload_model(body: s.ModelRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """For SDK 0.24 and older. Unloading a model that is not loaded is no error."""
    return await service.models.unload_model(caller, body.model_id)


@training.post("/weights_info")
async def weights_info(body: s.WeightsInfoRequest, service: ServiceNow, caller: CallerNow) -> s.WeightsInfoResponse:
    """Base model and rank of a checkpoint."""
    return await service.training.weights_info(caller, body.tinker_path)


@sampling.post("/create_sampling_session")
async def create_sampling_session(
    body: s.CreateSamplingSessionRequest, service: ServiceNow, caller: CallerNow
) -> s.CreateSamplingSessionResponse:
    """Make a sampler of a base model or of saved weights."""
    return s.CreateSamplingSessionResponse(
        sampling_session_id=await service.sampling.create_sampling_session(caller, body)
    )


@sampling.post("/join_sampling_session")
async def join_sampling_session(
    body: s.JoinSamplingSessionRequest, service: ServiceNow, caller: CallerNow
) -> s.JoinSamplingSessionResponse:
    """Count one more client of a sampler; the answer has this client's number."""
    return s.JoinSamplingSessionResponse(client_counter=service.sampling.join(caller, body.sampling_session_id))


@sampling.post("/asample", openapi_extra=JSON_BODY, response_model_exclude_none=True)
async def asample(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Request samples; the result is read as a future."""
    return await service.sampling.sample(caller, await decoded(sample_from_json, await read_body(request)))


@sampling.post("/sample", openapi_extra=JSON_BODY, response_model_exclude_none=True)
async def sample(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """The same, for SDK 0.24 and older."""
    return await service.sampling.sample(caller, await decoded(sample_from_json, await read_body(request)))


@sampling.post("/continue_samples")
async def continue_samples(
    body: s.ContinueSamplesRequest, service: ServiceNow, caller: CallerNow
) -> s.ContinueSamplesResponse:
    """Let samples under way go on with the weights of another sampler. An addition of ours to the Tinker API."""
    return service.sampling.continue_samples(caller, body)


@sampling.post("/sequence_weights")
async def sequence_weights(
    body: s.SequenceWeightsRequest, service: ServiceNow, caller: CallerNow
) -> s.SequenceWeightsResponse:
    """Which weights drew which tokens of samples that went on with others. An addition of ours to the Tinker API."""
    return service.sampling.sequence_weights(caller, body)


@sampling.get("/sampling_load", response_model_exclude_none=True)
async def sampling_load(
    service: ServiceNow, caller: CallerNow, base_model: Annotated[str, Query(max_length=1000)]
) -> s.SamplingLoadResponse:
    """How full the engine is that samples for a base model. An addition of ours to the Tinker API."""
    return service.sampling.load(base_model)


@sampling.get("/samplers/{sampler_id}", response_model_exclude_none=True)
async def sampler(sampler_id: str, service: ServiceNow, caller: CallerNow) -> SamplerResponse:
    """Which model and weights a sampler has."""
    return service.sampling.sampler_info(caller, sampler_id)


@results.post("/retrieve_future", responses=_ANSWERS, response_class=Response)
async def retrieve_future(
    body: s.RetrieveFutureRequest, request: Request, service: ServiceNow, caller: CallerNow
) -> Response:
    """The result of a call, or `try_again` after a while."""
    wants_protobuf = PROTOBUF in request.headers.get("accept", "")
    answer = await service.results.retrieve(caller, body.request_id, as_protobuf=wants_protobuf)
    if isinstance(answer, s.TryAgainResponse):
        return JSONResponse(answer.model_dump(exclude_none=True), status_code=408)
    if isinstance(answer, bytes):
        return Response(answer, media_type=PROTOBUF)
    return Response(json_bytes(answer), media_type="application/json")


@results.post("/retrieve_futures", response_model_exclude_none=True)
async def retrieve_futures(
    body: s.RetrieveFuturesRequest, service: ServiceNow, caller: CallerNow
) -> s.RetrieveFuturesResponse:
    """The states of several calls at once."""
    return await service.results.retrieve_many(caller, body)


@results.post("/cancel_future", status_code=204)
async def cancel_future(body: s.CancelFutureRequest, service: ServiceNow, caller: CallerNow) -> Response:
    """Cancel a sampling call of the caller; unknown ones are no error."""
    service.results.cancel(caller, body.request_id)
    return Response(status_code=204)
