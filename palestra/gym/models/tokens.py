"""Token ids and logprobs of a chat answer, wherever an endpoint puts them, and the seed that a call is drawn by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from palestra.gym.wire import encoded
from palestra.types.gym import TOKEN_FIELDS
from palestra.types.openai import ChatCompletion
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping

PREFIX = "token_id:"
ASKED = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "n": 1}
"""Fields that make an endpoint return them."""
ASKED_INLINE = {"return_token_ids": True, "logprobs_mode": "temperature"}
"""Fields for the prompt's ids in the same answer; the second one is our endpoint's: logprobs as sampled, which training
needs and which NeMo RL's engines return anyway."""


class TokensMissing(ValueError):
    """An answer without ids, or with contradictory ones. The message says which."""


def found_on_message(message: Message) -> bool:
    """Whether the engine put all three fields there itself. Raises TokensMissing if it put only some."""
    given = [key for key in TOKEN_FIELDS if message.get(key) is not None]
    if given and len(given) != len(TOKEN_FIELDS):
        raise TokensMissing(f"its message has {', '.join(given)}, but not all of {', '.join(TOKEN_FIELDS)}")
    if given and len(message["generation_token_ids"]) != len(message["generation_log_probs"]):
        raise TokensMissing("its message has different numbers of generation_token_ids and generation_log_probs")
    return bool(given)


def generated(choice: JsonMapping) -> tuple[list[int], list[float]]:
    """Returns the sampled ids and their logprobs. Raises TokensMissing."""
    content = (choice.get("logprobs") or {}).get("content")
    if content is None:
        raise TokensMissing("it has no logprobs, though they were asked for")
    try:
        logprobs = [float(one["logprob"]) for one in content]
        names = [one["token"] for one in content]
    except (KeyError, TypeError, ValueError) as e:
        raise TokensMissing(f"its logprobs cannot be read ({type(e).__name__}: {e})") from None
    inline = choice.get("token_ids")
    if inline is None:
        return _numbers(names), logprobs
    return _agreeing(inline, names), logprobs


def generated_text(choice: JsonMapping) -> tuple[list[int], list[float]]:
    """The same for an answer of text completions. Raises TokensMissing."""
    logprob_fields = choice.get("logprobs") or {}
    logprobs, names = logprob_fields.get("token_logprobs"), logprob_fields.get("tokens")
    if not isinstance(logprobs, list) or not isinstance(names, list):
        raise TokensMissing("it has no logprobs, though they were asked for")
    content = [{"token": name, "logprob": one} for name, one in zip(names, logprobs, strict=False)]
    return generated({"logprobs": {"content": content}, "token_ids": choice.get("token_ids")})


def prompt_ids(completion: JsonMapping) -> list[int] | None:
    """Returns the prompt's ids as vLLM and our endpoint return them: beside the choices, or in one (text completions).
    None: not returned."""
    ids = completion.get("prompt_token_ids")
    return completion["choices"][0].get("prompt_token_ids") if ids is None else ids


def put(completion: ChatCompletion, prompt: Sequence[int], ids: list[int], logprobs: list[float]) -> None:
    """Puts the ids on the message of the answer, in place; the fields that carried them are removed."""
    choice = completion["choices"][0]
    values: tuple[Any, ...] = (prompt, ids, logprobs)
    choice["message"] |= dict(zip(TOKEN_FIELDS, values, strict=True))
    clean(completion)


def clean(completion: ChatCompletion) -> None:
    completion.pop("prompt_token_ids", None)
    for key in ("logprobs", "token_ids", "prompt_token_ids"):
        completion["choices"][0].pop(key, None)


def _numbers(names: list[Any]) -> list[int]:
    try:
        return [int(name.removeprefix(PREFIX)) for name in names]
    except (ValueError, AttributeError):
        raise TokensMissing(
            f"its tokens are text, not {PREFIX}NUMBER: the endpoint supports neither return_token_ids nor "
            "return_tokens_as_token_ids"
        ) from None


def _agreeing(inline: object, names: list[Any]) -> list[int]:
    if not isinstance(inline, list) or len(inline) != len(names):
        raise TokensMissing(
            f"it has {len(inline) if isinstance(inline, list) else 'no'} token ids and {len(names)} logprobs"
        )
    if names and isinstance(names[0], str) and names[0].startswith(PREFIX) and _numbers(names) != inline:
        raise TokensMissing("its token_ids are not those of its logprobs")
    return inline


MOST_ROLLOUTS = 100_000  # at once; the least recently used one is forgotten first
SEED_BITS = 63  # engines take signed 64-bit seeds


class CallSeeds:
    def __init__(self, most: int = MOST_ROLLOUTS) -> None:
        self._calls: OrderedDict[str, int] = OrderedDict()
        self._most = most

    def next(self, rollout_seed: str, messages: Sequence[Message]) -> int:
        """Each call has a seed of its own: with one for the rollout, every turn would be drawn with the same random
        numbers, and an agent that asks the same question again would get the same answer for ever. It is derived from
        the call's number and, for a server that was restarted in the middle, from its messages; without ids of calls
        and tokens, so that a repeated run is the same."""
        number = self._calls.pop(rollout_seed, 0)
        self._calls[rollout_seed] = number + 1
        if len(self._calls) > self._most:
            self._calls.popitem(last=False)
        turns = [[one.get("role"), one.get("content")] for one in messages]
        digest = blake2b(encoded([rollout_seed, number, turns]), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
