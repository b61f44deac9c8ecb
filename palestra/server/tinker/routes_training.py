"""Tinker: models and their training requests. Thin: what they mean is in `service`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from palestra.server.http.access import CallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.tinker import schemas as s
from palestra.server.tinker.decode import forward_backward_from_json, forward_from_json, pass_from_protobuf
from palestra.server.tinker.service import ServiceNow
from palestra.util.json_types import JsonObject

router = APIRouter(prefix="/api/v1", tags=["training"])

PROTOBUF = "application/x-protobuf"


def _body_of(*schemas: type[s.WireModel]) -> JsonObject:
    """Describes bodies to OpenAPI that are read by hand, for speed and for protobuf."""
    content: JsonObject = {"application/json": {"schema": schemas[0].model_json_schema()}} if schemas else {}
    return {"requestBody": {"required": True, "content": {**content, PROTOBUF: {"schema": {"type": "string"}}}}}


@router.post("/create_model", response_model_exclude_none=True)
async def create_model(body: s.CreateModelRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Make a LoRA adapter on a base model."""
    return await service.models.create_model(caller, body)


@router.post("/get_info")
async def get_info(body: s.ModelRequest, service: ServiceNow, caller: CallerNow) -> s.GetInfoResponse:
    """Base model, rank and tokenizer of a model."""
    return service.models.get_info(caller, body.model_id)


@router.post("/forward_backward", openapi_extra=_body_of(), response_model_exclude_none=True)
async def forward_backward(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Compute a loss and add its gradient; with `forward_only` the loss alone."""
    body = await read_body(request)
    is_protobuf = request.headers.get("content-type", "").startswith(PROTOBUF)
    decode = pass_from_protobuf if is_protobuf else forward_backward_from_json
    return await service.models.run_pass(caller, await decoded(decode, body))


@router.post("/forward", openapi_extra=_body_of(), response_model_exclude_none=True)
async def forward(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """The same without gradients, for SDK 0.24 and older: newer ones send `forward_only`."""
    return await service.models.run_pass(caller, await decoded(forward_from_json, await read_body(request)))


@router.post("/optim_step", response_model_exclude_none=True)
async def optim_step(body: s.OptimStepRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Make one optimizer step with the accumulated gradient."""
    return await service.models.optim_step(caller, body)


@router.post("/save_weights", response_model_exclude_none=True)
async def save_weights(body: s.SaveWeightsRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Save weights and optimizer state as a checkpoint."""
    return await service.weights.save_weights(caller, body)


@router.post("/save_weights_for_sampler", response_model_exclude_none=True)
async def save_weights_for_sampler(
    body: s.SaveWeightsForSamplerRequest, service: ServiceNow, caller: CallerNow
) -> s.FutureResponse:
    """Save the weights for sampling: under a name, or as a sampler of this session."""
    return await service.weights.save_weights_for_sampler(caller, body)


@router.post("/save_weights_external", response_model_exclude_none=True)
async def save_weights_external(
    body: s.SaveWeightsExternalRequest, service: ServiceNow, caller: CallerNow
) -> s.FutureResponse:
    """Save the weights alone as an export, to be downloaded; a second one of the same name replaces it."""
    return await service.weights.save_weights_external(caller, body)


@router.post("/load_weights", response_model_exclude_none=True)
async def load_weights(body: s.LoadWeightsRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Load a checkpoint into a model, or as a new one."""
    if body.model_id is None:
        return await service.models.load_as_new(caller, body)
    return await service.weights.load_into(caller, body)


@router.post("/unload_model", response_model_exclude_none=True)
async def unload_model(body: s.ModelRequest, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """For SDK 0.24 and older. Unloading a model that is not loaded is no error."""
    return await service.models.unload_model(caller, body.model_id)


@router.post("/weights_info")
async def weights_info(body: s.WeightsInfoRequest, service: ServiceNow, caller: CallerNow) -> s.WeightsInfoResponse:
    """Base model and rank of a checkpoint."""
    return await service.weights.weights_info(caller, body.tinker_path)
