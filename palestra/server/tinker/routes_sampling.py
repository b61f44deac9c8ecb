"""Tinker: sampling sessions and samples. Thin: what they mean is in `service`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from palestra.server.http.access import CallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.http.openapi import JSON_BODY
from palestra.server.tinker import schemas as s
from palestra.server.tinker.decode import sample_from_json
from palestra.server.tinker.schemas_rest import SamplerResponse
from palestra.server.tinker.service import ServiceNow

router = APIRouter(prefix="/api/v1", tags=["sampling"])


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: s.CreateSamplingSessionRequest, service: ServiceNow, caller: CallerNow
) -> s.CreateSamplingSessionResponse:
    """Make a sampler of a base model or of saved weights."""
    return s.CreateSamplingSessionResponse(
        sampling_session_id=await service.sampling.create_sampling_session(caller, body)
    )


@router.post("/join_sampling_session")
async def join_sampling_session(
    body: s.JoinSamplingSessionRequest, service: ServiceNow, caller: CallerNow
) -> s.JoinSamplingSessionResponse:
    """Count one more client of a sampler; the answer has this client's number."""
    return s.JoinSamplingSessionResponse(client_counter=service.sampling.join(caller, body.sampling_session_id))


@router.post("/asample", openapi_extra=JSON_BODY, response_model_exclude_none=True)
async def asample(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """Request samples; the result is read as a future."""
    return await service.sampling.sample(caller, await decoded(sample_from_json, await read_body(request)))


@router.post("/sample", openapi_extra=JSON_BODY, response_model_exclude_none=True)
async def sample(request: Request, service: ServiceNow, caller: CallerNow) -> s.FutureResponse:
    """The same, for SDK 0.24 and older."""
    return await service.sampling.sample(caller, await decoded(sample_from_json, await read_body(request)))


@router.post("/continue_samples")
async def continue_samples(
    body: s.ContinueSamplesRequest, service: ServiceNow, caller: CallerNow
) -> s.ContinueSamplesResponse:
    """Let samples under way go on with the weights of another sampler. An addition of ours to the Tinker API."""
    return service.sampling.continue_samples(caller, body)


@router.post("/sequence_weights")
async def sequence_weights(
    body: s.SequenceWeightsRequest, service: ServiceNow, caller: CallerNow
) -> s.SequenceWeightsResponse:
    """Which weights drew which tokens of samples that went on with others. An addition of ours to the Tinker API."""
    return service.sampling.sequence_weights(caller, body)


@router.get("/sampling_load", response_model_exclude_none=True)
async def sampling_load(
    service: ServiceNow, caller: CallerNow, base_model: Annotated[str, Query(max_length=1000)]
) -> s.SamplingLoadResponse:
    """How full the engine is that samples for a base model. An addition of ours to the Tinker API."""
    return service.sampling.load(base_model)


@router.get("/samplers/{sampler_id}", response_model_exclude_none=True)
async def sampler(sampler_id: str, service: ServiceNow, caller: CallerNow) -> SamplerResponse:
    """Which model and weights a sampler has."""
    return service.sampling.sampler_info(caller, sampler_id)
