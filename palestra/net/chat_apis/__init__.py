"""Chat calls in the APIs of model endpoints: OpenAI's chat completions, which nearly all servers speak, and Anthropic's
Messages. A call is written in OpenAI's form and put into another one where the endpoint needs it."""

from palestra.net.chat_apis.answers import AnswerPiece, CallAnswer, ChatApi, NotAnAnswer, StreamedAnswer, TokenLogprob
from palestra.net.chat_apis.choice import API_NAMES, ApiName, chat_api, endpoint_url, error_of
from palestra.net.chat_apis.endpoint import ModelEndpoint
from palestra.net.chat_apis.openai import OpenAIChat

__all__ = [
    "API_NAMES",
    "AnswerPiece",
    "ApiName",
    "CallAnswer",
    "ChatApi",
    "ModelEndpoint",
    "NotAnAnswer",
    "OpenAIChat",
    "StreamedAnswer",
    "TokenLogprob",
    "chat_api",
    "endpoint_url",
    "error_of",
]
