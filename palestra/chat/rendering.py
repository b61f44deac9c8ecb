"""Conversations as text that an encoder can trust: special texts that others wrote have stand-ins.

Owns: rendering them, and a turn within a short stand-in for what came before it. Never touches: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from palestra.chat.errors import ChatError
from palestra.chat.special_text import SpecialText
from palestra.chat.stand_ins import HELLO, WORDS, Message, StandIns
from palestra.chat.templates import ChatTemplate, Messages, Tools
from palestra.util.json_types import JsonMapping


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template renders."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool = True
    kwargs: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    hidden: Sequence[str] = ()
    """What the stand-ins in it stand for."""


@dataclass(frozen=True, slots=True)
class AfterTurn:
    """A stand-in for a turn, what comes before it, and what really comes after it."""

    rendered: Rendered
    is_rewritten: bool
    """Whether the template shows the turn otherwise than it was read and sampled, now that something follows it."""


class Renderer:
    def __init__(self, template: ChatTemplate, text: SpecialText, stand_ins: StandIns) -> None:
        self._template, self._text, self._stand_ins = template, text, stand_ins

    def render(self, chat: Chat) -> Rendered:
        hidden: list[str] = []
        messages, tools, kwargs = chat.messages, chat.tools, chat.kwargs
        if self._text.is_in((messages, tools, kwargs)):
            messages, tools, kwargs = (self._text.hide(part, hidden) for part in (messages, tools, kwargs))
        return Rendered(self._template.render(messages, tools, chat.add_generation_prompt, kwargs), hidden)

    def after_turn(self, turn: Message, chat: Chat, *, thought: bool, opened: bool) -> AfterTurn:
        """`chat`: from the turn's end on. `thought` and `opened` are `ChatTokenizer.following`'s. Tools that the
        template would show again are left out: they were read before."""
        known = replace(chat, tools=self._stand_ins.tools if chat.tools else chat.tools)
        shown, after = self._shown(turn, known, thought)
        is_rewritten = after.is_rewritten or (opened and not self._begins_as_read(after.rendered, known))
        rest = self._stand_ins.after(after.rendered.text) or ""
        if known.tools and self._stand_ins.has_tools(rest):
            return AfterTurn(self._behind(shown, replace(known, tools=None)), is_rewritten)
        return AfterTurn(after.rendered, is_rewritten)

    def _shown(self, turn: Message, chat: Chat, thought: bool) -> tuple[Message, AfterTurn]:
        """As a turn that the template shows."""
        shown = self._stand_ins.turn(turn, thought)
        try:
            rendered = self._behind(shown, chat)
        except ChatError:
            rendered = Rendered("")
        if self._stand_ins.after(rendered.text) is not None:
            return shown, AfterTurn(rendered, not self._stand_ins.is_all_shown(shown, rendered.text))
        # It only makes calls, which the template does not show, or more of them than it allows.
        words = self._stand_ins.turn(WORDS, thought=False)
        return words, AfterTurn(self._behind(words, chat), is_rewritten=True)

    def _behind(self, turn: Message, chat: Chat) -> Rendered:
        return self.render(replace(chat, messages=[HELLO, turn, *chat.messages]))

    def _begins_as_read(self, rendered: Rendered, chat: Chat) -> bool:
        """Whether what was read before the turn is still what the template writes there."""
        before = self.render(replace(chat, messages=[HELLO], add_generation_prompt=True))
        return self.shown(rendered).startswith(self.shown(before))

    def shown(self, rendered: Rendered) -> str:
        """With what was hidden."""
        return self._text.show(rendered.text, rendered.hidden) if rendered.hidden else rendered.text
