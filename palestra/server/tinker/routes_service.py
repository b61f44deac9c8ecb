"""Tinker: the calls around a session. Thin: what they mean is in `service`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from palestra.server.http.access import CallerNow
from palestra.server.tinker import schemas as s
from palestra.server.tinker.service import ServiceNow

router = APIRouter(prefix="/api/v1", tags=["service"])


@router.post("/client/config")
async def client_config(body: s.ClientConfigRequest, caller: CallerNow) -> s.ClientConfigResponse:
    """Settings of the client library, which the SDK requests at its start."""
    return s.ClientConfigResponse()


@router.post("/client/dynamic_config")
async def client_dynamic_config(body: s.ClientConfigRequest, caller: CallerNow) -> s.ClientDynamicConfigResponse:
    """Settings that the SDK requests again while it runs."""
    return s.ClientDynamicConfigResponse(sample_cancel_enabled=True)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the server answers."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def get_server_capabilities(service: ServiceNow, caller: CallerNow) -> s.CapabilitiesResponse:
    """The base models that can be trained and sampled."""
    return service.sessions.capabilities()


@router.post("/create_session")
async def create_session(
    body: s.CreateSessionRequest, service: ServiceNow, caller: CallerNow
) -> s.CreateSessionResponse:
    """Begin a session, to which all that the client makes belongs."""
    return s.CreateSessionResponse(session_id=await service.sessions.create_session(caller, body))


@router.post("/session_heartbeat")
async def session_heartbeat(
    body: s.SessionHeartbeatRequest, service: ServiceNow, caller: CallerNow
) -> s.SessionHeartbeatResponse:
    """Keep a session alive."""
    await service.sessions.heartbeat(caller, body.session_id)
    return s.SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(
    session_id: s.Id, body: s.FinishSessionRequest, service: ServiceNow, caller: CallerNow
) -> Response:
    """End a session and free its models."""
    await service.sessions.finish_session(caller, session_id, body)
    return Response(status_code=204)


@router.post("/telemetry")
async def telemetry(body: s.TelemetryRequest, caller: CallerNow) -> s.TelemetryResponse:
    """Accept the SDK's telemetry and drop it: its events contain tracebacks and, at times, keys."""
    return s.TelemetryResponse()
