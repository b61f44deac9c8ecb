"""Tokens that the inference engine keeps for a trainer: there is no such engine here."""

from typing import Any, Protocol


class ExternalCaptureHandler(Protocol):
    def prepare_request(self, request_payload: dict[str, Any]) -> dict[str, Any]: ...

    def prepare_response(self, response_payload: dict[str, Any]) -> None: ...

    async def finalize_response(self, served_payload: dict[str, Any]) -> None: ...


def make_external_capture_handler(backend: str) -> ExternalCaptureHandler:
    raise NotImplementedError(f"token_id_capture.external_staging: {backend} keeps no tokens for a Palestra gym")
