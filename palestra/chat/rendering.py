"""Renders conversations to text that is safe to encode: texts of special tokens in messages are replaced by
placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from palestra.chat.errors import ChatError
from palestra.chat.placeholders import HELLO, WORDS, Message, TemplatePlaceholders
from palestra.chat.special_text import SpecialText
from palestra.chat.templates import ChatTemplate, Messages, Tools
from palestra.util.json_types import JsonMapping


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template renders."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool = True
    kwargs: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    hidden: Sequence[str] = ()
    """The texts that the placeholders in it stand for."""


@dataclass(frozen=True, slots=True)
class AfterTurn:
    """A placeholder for a turn, what comes before it, and what really comes after it."""

    rendered: RenderedChat
    is_rewritten: bool
    """Whether the template renders the turn differently from what was read and sampled, now that something follows
    it."""


class Renderer:
    def __init__(self, template: ChatTemplate, text: SpecialText, placeholders: TemplatePlaceholders) -> None:
        self._template, self._text, self._placeholders = template, text, placeholders

    def render(self, chat: TemplateInput) -> RenderedChat:
        hidden: list[str] = []
        messages, tools, kwargs = chat.messages, chat.tools, chat.kwargs
        if self._text.is_in((messages, tools, kwargs)):
            messages, tools, kwargs = (self._text.hide(part, hidden) for part in (messages, tools, kwargs))
        return RenderedChat(self._template.render(messages, tools, chat.add_generation_prompt, kwargs), hidden)

    def after_turn(self, turn: Message, chat: TemplateInput, *, thought: bool, opened: bool) -> AfterTurn:
        """Renders what follows a turn. `chat` begins after the turn. `thought` and `opened` are those of
        `ChatTokenizer.following`. Tools that the template would show again are left out, because they were read
        before."""
        known = replace(chat, tools=self._placeholders.tools if chat.tools else chat.tools)
        shown, after = self._shown(turn, known, thought)
        is_rewritten = after.is_rewritten or (opened and not self._begins_as_read(after.rendered, known))
        rest = self._placeholders.after(after.rendered.text) or ""
        if known.tools and self._placeholders.has_tools(rest):
            return AfterTurn(self._behind(shown, replace(known, tools=None)), is_rewritten)
        return AfterTurn(after.rendered, is_rewritten)

    def _shown(self, turn: Message, chat: TemplateInput, thought: bool) -> tuple[Message, AfterTurn]:
        """Renders a placeholder of the turn in a form that the template shows."""
        shown = self._placeholders.turn(turn, thought)
        try:
            rendered = self._behind(shown, chat)
        except ChatError:
            rendered = RenderedChat("")
        if self._placeholders.after(rendered.text) is not None:
            return shown, AfterTurn(rendered, not self._placeholders.is_all_shown(shown, rendered.text))
        # The turn only makes calls, which the template does not show, or more calls than it allows.
        content_mark = self._placeholders.turn(WORDS, thought=False)
        return content_mark, AfterTurn(self._behind(content_mark, chat), is_rewritten=True)

    def _behind(self, turn: Message, chat: TemplateInput) -> RenderedChat:
        return self.render(replace(chat, messages=[HELLO, turn, *chat.messages]))

    def _begins_as_read(self, rendered: RenderedChat, chat: TemplateInput) -> bool:
        """Whether the template still renders what was read before the turn."""
        before = self.render(replace(chat, messages=[HELLO], add_generation_prompt=True))
        return self.shown(rendered).startswith(self.shown(before))

    def shown(self, rendered: RenderedChat) -> str:
        """Returns the text with placeholders replaced by what they stand for."""
        return self._text.show(rendered.text, rendered.hidden) if rendered.hidden else rendered.text
