"""A user who is played by a model: it says in its own words what the script says.

What the user tells, and whether the answer is yes, is decided by the script, so that a task stays exact and can be
judged. The model decides how it is said. Where it leaves out a fact or an amount, the script's own words are used.
"""

from __future__ import annotations

import os
from typing import Literal

import httpx
import msgspec

from palestra.environments.fleet.errors import BackendError
from palestra.environments.platform.scripted_user import HiddenFacts
from palestra.net.chat_apis import NotAnAnswer, chat_api, endpoint_url
from palestra.net.json_calls import CallFailure, post_json
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping

MAX_TOKENS = 200
MAX_CHARS = 1000
ORDER = (
    "You play {name}, who talks to a company's agent. You are given the conversation so far and what you say next. "
    "Say exactly that in your own words, in one or two sentences. Keep every number, code, name and address as it is. "
    "Add no other facts, agree to nothing else and refuse nothing else. Answer with your words only."
)


class UserModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that plays users."""

    base_url: str
    """Address of its endpoint, such as http://127.0.0.1:8000/v1."""
    model: str
    """The model's name at the endpoint."""
    api: Literal["auto", "openai", "anthropic"] = "auto"
    key_env: str = ""
    """Name of the environment variable with the key."""
    temperature: float = 1.0
    timeout_s: float = 60.0


def user_model_of(settings: JsonMapping) -> UserModel:
    """Raises ValueError."""
    try:
        return msgspec.convert(settings, UserModel, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"env_config.user: {error}") from None


async def rephrased(user: UserModel, hidden: HiddenFacts, answer: str) -> str:
    """Returns the answer as the model says it. `hidden` is the user's side of the instance, whose talk ends with the
    answer. Raises BackendError if the endpoint does not answer."""
    api = chat_api(user.api, user.base_url)
    talk = "\n".join(f"{one['who'].capitalize()}: {one['text']}" for one in hidden.get("talk", [])[:-1])
    messages: list[Message] = [
        {"role": "system", "content": ORDER.format(name=hidden.get("user"))},
        {"role": "user", "content": f"{talk}\n\nYou say next: {answer}"},
    ]
    body = api.body(user.model, messages, {"max_tokens": MAX_TOKENS, "temperature": user.temperature})
    headers, limit_s = api.headers(os.environ.get(user.key_env, "") or "none"), user.timeout_s
    try:
        async with httpx.AsyncClient(base_url=endpoint_url(user.base_url), headers=headers, timeout=limit_s) as http:
            text = api.answer(await post_json(http, api.path, body, patience_s=limit_s)).text.strip()
    except (CallFailure, NotAnAnswer) as error:
        raise BackendError(f"the model that plays the user: {error}") from None
    # facts that are sentences may be said in other words; codes, names and days may not
    needed = [value for value in hidden.get("facts", {}).values() if value in answer and not value.endswith(".")]
    is_faithful = text and len(text) <= MAX_CHARS and all(value.lower() in text.lower() for value in needed)
    return text if is_faithful else answer
