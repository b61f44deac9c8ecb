"""`vllm_model`: Responses on top of an endpoint's chat completions, with the token ids that training needs."""

from __future__ import annotations

import time
from uuid import uuid4

import orjson

from palestra.gym.errors import BadAnswer, BadRequest, PeerFailed
from palestra.gym.models import tokens
from palestra.gym.models.base import ModelServer
from palestra.gym.models.conversions import THOUGHT, chat_request, response
from palestra.gym.models.openai import whole_completion, whole_response
from palestra.gym.models.plain_text import as_chat, template_of, text_request
from palestra.gym.models.settings import VLLMSettings, read_settings
from palestra.gym.models.tokens import CallSeeds
from palestra.gym.models.upstream import Upstream
from palestra.gym.records import ServerInstance
from palestra.gym.servers.base import Peers
from palestra.gym.wire import GymRequest, GymResponse, encoded
from palestra.types.gym import EXTRA_BODY, POLICY, ROLLOUT_SEED, TOKEN_FIELDS
from palestra.types.openai import ChatBody, ChatCompletion, ModelResponse, ResponsesParams
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

CHAT, TEXT, RESPONSES, TOKENIZE = "/chat/completions", "/completions", "/responses", "/tokenize"
TOO_LONG = (b"context length", b"max_tokens", b"context_length_exceeded")
TOKENIZED = ("model", "messages", "tools", "chat_template_kwargs", "mm_processor_kwargs", "required_prefix_token_ids")
AUDIO = ("audio_data", "audio_path", "audio_paths")


class VLLMModel(ModelServer):
    """The model server `vllm_model`, for chat completions, with token ids on every answer."""

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self.settings = read_settings(VLLMSettings, instance)
        headers = {**self.settings.default_headers, "authorization": f"Bearer {self.settings.api_key}"}
        self.upstream = Upstream(self.settings.urls, headers, self.settings)
        self._seeds = CallSeeds()
        folder = self.settings.tokenizer_folder
        self._template = template_of(folder, self.name) if self.settings.render_chat_template else None

    async def close(self) -> None:
        await self.upstream.close()

    async def look(self, path: str) -> GymResponse | None:
        return GymResponse(body=dict(self.upstream.counts)) if path == "/stats" else None

    async def respond(self, call: GymRequest, params: ResponsesParams, beside: JsonPayload) -> ModelResponse:
        settings = self.settings
        if settings.is_responses_native:
            return await self._respond_natively(call, params, beside)
        body = chat_request(params, with_ids=settings.return_token_id_information)
        for name, value in beside.items():
            body[name] = value
        completion = await self.complete(call, body)
        return response(params, completion, model=self._model(params), has_thoughts=settings.uses_reasoning_parser)

    async def complete(self, call: GymRequest, body: ChatBody) -> ChatCompletion:
        request = self._request(body)
        messages = request["messages"]
        if not self.settings.sequential_reasoning_allowed and _is_only_thought(messages[-1]):
            return self._empty("content_filter")
        try:
            if self.settings.use_completions_api:
                return await self._complete_text(call, request)
            answer = await self.upstream.post(call.session_id, CHAT, request)
        except PeerFailed as error:
            if error.status == 400 and any(text in error.body for text in TOO_LONG):
                return self._empty("length")
            raise
        completion = whole_completion(answer, self.upstream)
        self._join_thoughts(completion, CHAT)
        if self.settings.return_token_id_information:
            await self._place_tokens(call, request, completion)
        return completion

    # Requests

    def _request(self, given: ChatBody) -> JsonObject:
        """Returns the request for the endpoint: `extra_body` of the settings has the lowest precedence,
        `sampling_overrides` the highest."""
        settings = self.settings
        messages = [self._message(one) for one in given["messages"]]
        body: JsonObject = {**given, "model": self._model(given), "messages": messages}
        metadata = body.get("metadata")
        if not isinstance(metadata, dict):
            metadata = {}
        audio = [key for key in AUDIO if metadata.get(key)]
        if audio:
            raise BadRequest(("metadata", audio[0]), "audio is not supported")
        kwargs = (settings.chat_template_kwargs or {}) | _object(metadata, "chat_template_kwargs")
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        if settings.return_token_id_information:
            body |= tokens.ASKED
            if settings.request_prompt_and_generation_token_ids:
                body |= tokens.ASKED_INLINE
        elif body.get("top_logprobs", 0) is None:
            del body["top_logprobs"]  # for vLLM a null means no logprobs at all
        beneath = (settings.extra_body or {}) | _object(metadata, EXTRA_BODY)
        if isinstance(metadata.get(ROLLOUT_SEED), str):
            beneath["seed"] = self._seeds.next(metadata[ROLLOUT_SEED], body["messages"])
        return beneath | body | (settings.sampling_overrides or {})

    def _model(self, body: JsonMapping) -> str:
        metadata = body.get("metadata")
        policy = metadata.get(POLICY) if isinstance(metadata, dict) else None
        return policy if isinstance(policy, str) and policy else self.settings.model

    def _message(self, message: object) -> Message:
        """Returns a message with roles and reasoning as the endpoint expects them. The given one is not changed."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(("messages",), "Input should be a list of messages with a role", given=message)
        settings, role, content = self.settings, message["role"], message.get("content")
        if role == "developer" and settings.replace_developer_role_with_system:
            return {**message, "role": "system"}
        if (
            role != "assistant"
            or not settings.uses_reasoning_parser
            or settings.preserve_reasoning_in_assistant_content
        ):
            return message
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(text for text in texts if isinstance(text, str))
        if not isinstance(content, str) or "<think>" not in content:
            return message
        thoughts = THOUGHT.findall(content)
        rest = {**message, "content": THOUGHT.sub("", content)}
        if thoughts and settings.uses_interleaved_reasoning:
            return {
                **rest,
                "reasoning_content": thoughts[0],
                "reasoning": thoughts[0],
            }  # the field of older versions of vLLM, and of newer ones
        return rest

    # Answers

    def _join_thoughts(self, completion: ChatCompletion, path: str) -> None:
        """Moves reasoning into think tags in the content, the one form from which all three APIs are served."""
        message = completion["choices"][0]["message"]
        older, newer = message.pop("reasoning_content", None), message.pop("reasoning", None)
        thought = older or newer
        if not thought:
            return
        if not self.settings.uses_reasoning_parser:
            raise BadAnswer(
                self.upstream.replicas[0].url,
                path,
                f"the endpoint separates reasoning; set uses_reasoning_parser: true for {self.name}",
                encoded(message),
            )
        message["content"] = f"<think>{thought}</think>{message.get('content') or ''}"

    async def _place_tokens(self, call: GymRequest, body: JsonMapping, completion: ChatCompletion) -> None:
        choice = completion["choices"][0]
        try:
            if tokens.found_on_message(choice["message"]):
                tokens.clean(completion)
                return
            ids, logprobs = tokens.generated(choice)
        except tokens.TokensMissing as e:
            raise self._bad(CHAT, str(e), completion) from None
        prompt = tokens.prompt_ids(completion)
        if prompt is None:
            prompt = await self._tokenized(call, {key: body[key] for key in TOKENIZED if key in body})
        tokens.put(completion, prompt, ids, logprobs)

    async def _tokenized(self, call: GymRequest, body: JsonPayload) -> list[int]:
        tokenized = await self.upstream.post(call.session_id, TOKENIZE, body)
        prompt = tokenized.get("tokens")
        if not isinstance(prompt, list):
            raise self._bad(TOKENIZE, "no `tokens`", tokenized)
        return prompt

    def _empty(self, finish: str) -> ChatCompletion:
        message = {"role": "assistant", "content": None, "tool_calls": None}
        return {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.settings.model,
            "choices": [{"index": 0, "finish_reason": finish, "message": message, "logprobs": None}],
            "usage": None,
        }

    def _bad(self, path: str, why: str, answer: object) -> BadAnswer:
        return BadAnswer(self.upstream.replicas[0].url, path, why, encoded(answer))

    # Other routes of the endpoint

    async def _complete_text(self, call: GymRequest, body: JsonMapping) -> ChatCompletion:
        request = text_request(body, self._template, with_ids=self.settings.return_token_id_information)
        answer = whole_completion(await self.upstream.post(call.session_id, TEXT, request), self.upstream, key="text")
        choice = answer["choices"][0]
        if not self.settings.return_token_id_information:
            return as_chat(answer, model=self.settings.model)
        try:
            ids, logprobs = tokens.generated_text(choice)
        except tokens.TokensMissing as e:
            raise self._bad(TEXT, str(e), answer) from None
        prompt = tokens.prompt_ids(answer)
        if prompt is None:
            prompt = await self._tokenized(call, {"model": request["model"], "prompt": request["prompt"]})
        completion = as_chat(answer, model=self.settings.model)
        tokens.put(completion, prompt, ids, logprobs)
        return completion

    async def _respond_natively(self, call: GymRequest, params: ResponsesParams, beside: JsonPayload) -> ModelResponse:
        settings = self.settings
        body: JsonObject = {**(settings.extra_body or {}), **beside, **params, "model": self._model(params)}
        if settings.chat_template_kwargs:
            body["chat_template_kwargs"] = settings.chat_template_kwargs
        if settings.replace_developer_role_with_system and isinstance(body["input"], list):
            body["input"] = [
                {**item, "role": "system"} if item.get("role") == "developer" else item for item in body["input"]
            ]
        if settings.return_token_id_information:
            body["return_token_ids"] = True
        answer = await self.upstream.post(call.session_id, RESPONSES, body | (settings.sampling_overrides or {}))
        tokenized = whole_response(answer, self.upstream)
        last = tokenized["output"][-1] if tokenized["output"] else {}
        if settings.return_token_id_information and any(last.get(key) is None for key in TOKEN_FIELDS):
            raise self._bad(RESPONSES, "its last item has no token ids; set is_responses_native: false", tokenized)
        return tokenized


def _is_only_thought(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls")


def _object(metadata: JsonMapping, key: str) -> JsonObject:
    """Parses JSON text in the metadata, which can hold text only."""
    text = metadata.get(key)
    if not text:
        return {}
    try:
        found = orjson.loads(text)
    except ValueError:
        raise BadRequest(("metadata", key), "Input should be the text of a JSON object", given=text) from None
    if not isinstance(found, dict):
        raise BadRequest(("metadata", key), "Input should be the text of a JSON object", given=text)
    return found
