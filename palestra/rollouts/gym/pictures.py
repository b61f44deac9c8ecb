"""Pictures of a gym's rollouts: those that the row and the agent's answer show, at their places among the tokens.

A gym's agent calls the model endpoint by itself and returns token ids, in which a picture is a run of image tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.picture_files import read_pictures
from palestra.rollouts.gym.results import NotTrainable
from palestra.rollouts.turn_messages import turn_messages
from palestra.types.rollouts import Rollout, RolloutStop
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.picture_parts import is_picture, url_part


def show_pictures(rollout: Rollout, given: object, output: Sequence[Any], tokenizer: ChatTokenizer) -> None:
    """As `place_pictures`. Raises NotTrainable."""
    try:
        place_pictures(rollout, given, output, tokenizer)
    except ChatError as error:
        raise NotTrainable(RolloutStop.ENV_FAILED, str(error)) from None


def place_pictures(rollout: Rollout, given: object, output: Sequence[Any], tokenizer: ChatTokenizer) -> None:
    """Fills in the rollout's pictures. `given` and `output` are those of the Responses API. Raises ChatError if the
    tokens have other pictures than these."""
    if tokenizer.card is None or tokenizer.pictures is None or not rollout.turns:
        return
    shown = _parts(given if isinstance(given, list) else [])
    seen = read_pictures([{"role": "user", "content": shown + _parts(output)}], tokenizer.card)
    read = [rollout.prompt, *(turn.observation for turn in rollout.turns)]
    positions = sum(part.count(tokenizer.pictures.image_id) for part in read)
    if positions != sum(mark.rows for mark in seen.marks):
        raise ChatError(
            f"its tokens have other pictures than the {len(seen.files)} of its row and its answer; an agent must send "
            "pictures as data: URLs, and return the results of tools that show some"
        )
    tokens = [*rollout.prompt, *(token for turn in rollout.turns for token in [*turn.observation, *turn.tokens])]
    rollout.pictures = seen.placed(tokenizer.pictures, tokens)
    rollout.picture_files = {file.digest: file for file in seen.files}
    messages = turn_messages(rollout, tokenizer)
    rollout.messages[-len(messages) :] = messages
    if shown and rollout.messages:
        first = rollout.messages[0]
        named = [url_part(f"picture:{file.digest}") for file in seen.files[: len(shown)]]
        rollout.messages[0] = {**first, "content": [*named, {"type": "text", "text": str(first.get("content") or "")}]}


def _parts(items: Sequence[Any]) -> list[JsonObject]:
    contents = [_content(item) for item in items if isinstance(item, dict)]
    return [part for content in contents if isinstance(content, list) for part in content if is_picture(part)]


def _content(item: JsonMapping) -> object:
    """The content of a message, or of a tool's result."""
    return item["content"] if "content" in item else item.get("output")
