"""The base of model servers, for those that Palestra has none of its own for."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated

from fastapi import Body, FastAPI, Request

from nemo_gym.json_types import JsonObject
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.rollout_correlation import RolloutContextMiddleware
from nemo_gym.server_utils import BaseRunServerInstanceConfig, BaseServer, SimpleServer

__all__ = [
    "BaseResponsesAPIModel",
    "BaseResponsesAPIModelConfig",
    "Body",
    "SimpleResponsesAPIModel",
    "start_model_execution",
]


def start_model_execution(request: Request, *, upstream_attempted: bool) -> JsonObject:
    """Where a model server notes how an answer came about: for records that are not made here."""
    return {"upstream_attempted": upstream_attempted}


class BaseResponsesAPIModelConfig(BaseRunServerInstanceConfig):
    pass


class BaseResponsesAPIModel(BaseServer):
    config: BaseResponsesAPIModelConfig  # pyright: ignore[reportIncompatibleVariableOverride]


class SimpleResponsesAPIModel(BaseResponsesAPIModel, SimpleServer):
    config: BaseResponsesAPIModelConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.add_middleware(RolloutContextMiddleware)
        app.post("/v1/chat/completions")(self.chat_completions)
        app.post("/v1/responses")(self.responses)
        return app

    @abstractmethod
    async def chat_completions(
        self, body: Annotated[NeMoGymChatCompletionCreateParamsNonStreaming, Body()]
    ) -> NeMoGymChatCompletion: ...

    @abstractmethod
    async def responses(self, body: Annotated[NeMoGymResponseCreateParamsNonStreaming, Body()]) -> NeMoGymResponse: ...
