"""Tokens that the inference engine keeps for a trainer: there is no such engine here."""

from typing import Protocol

from nemo_gym.json_types import JsonObject


class ExternalCaptureHandler(Protocol):
    def prepare_request(self, request_payload: JsonObject) -> JsonObject: ...

    def prepare_response(self, response_payload: JsonObject) -> None: ...

    async def finalize_response(self, served_payload: JsonObject) -> None: ...


def make_external_capture_handler(backend: str) -> ExternalCaptureHandler:
    raise NotImplementedError(f"token_id_capture.external_staging: {backend} keeps no tokens for a Palestra gym")
