"""What agents send is shown to the model by every template, word for word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from palestra.chat import ChatTokenizer
from palestra.chat.errors import ChatError
from palestra.chat.message_shapes import MessageShape
from tests.chat.conftest import STYLES


def said(role: str, words: str) -> dict[str, Any]:
    return {"role": role, "content": words}


CODEX = [said("system", "zz-sa"), said("system", "zz-sb"), said("user", "zz-ua"), said("user", "zz-ub")]
CLAUDE = [
    said("system", "zz-sa"),
    said("user", "zz-ua"),
    said("system", "zz-sb"),
    said("assistant", "zz-aa"),
    said("user", "zz-ub"),
]


@pytest.mark.parametrize("messages", [CODEX, CLAUDE], ids=["codex", "claude"])
@pytest.mark.parametrize("style", STYLES)
def test_every_template_shows_what_agents_say(
    tokenizer_of: Callable[[str], ChatTokenizer], style: str, messages: list[dict[str, Any]]
) -> None:
    tokenizer = tokenizer_of(style)
    text = tokenizer.render(tokenizer.shape.fit(messages))
    places = [text.find(one["content"]) for one in messages]
    assert -1 not in places
    assert places == sorted(places)


def first_system_only(messages: Sequence[Any]) -> str:
    if any(one["role"] == "system" for one in messages[1:]):
        raise ChatError("System message must be at the beginning.")
    return "".join(f"[{one['role']}]{one['content']}" for one in messages)


def test_a_system_message_without_a_place_is_the_users() -> None:
    shape = MessageShape.of(first_system_only)
    assert shape == MessageShape(systems=False, later_system=False, users=True)
    assert first_system_only(shape.fit(CODEX)) == "[system]zz-sa\n\nzz-sb[user]zz-ua[user]zz-ub"
    assert first_system_only(shape.fit(CLAUDE)) == "[system]zz-sa[user]zz-ua[user]zz-sb[assistant]zz-aa[user]zz-ub"


def test_messages_that_a_template_takes_stay_as_they_are() -> None:
    assert MessageShape(systems=True, later_system=True, users=True).fit(CLAUDE) == CLAUDE
