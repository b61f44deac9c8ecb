"""Converts conversations to the exact tokens that a model gets, and back."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from palestra.chat.errors import ChatError, TooLongError
from palestra.chat.message_shapes import MessageShape
from palestra.chat.pictures import PictureTokens, has_marks
from palestra.chat.placeholders import HELLO, WORDS, TemplatePlaceholders
from palestra.chat.rendering import RenderedChat, Renderer, TemplateInput
from palestra.chat.special_text import SpecialText
from palestra.chat.templates import WITH_TOOLS, ChatTemplate, Messages, Tools
from palestra.chat.token_lengths import longest_text
from palestra.chat.tokenizer_files import TokenizerFiles, read_tokenizer
from palestra.chat.tool_calls import END_THINK, THINK
from palestra.chat.tool_parsers import AnswerFormat, CallFormat, detect, tool_format
from palestra.chat.vision_card import read_card
from palestra.types import VisionCard
from palestra.util.json_types import JsonMapping


@dataclass(frozen=True, slots=True)
class TurnSuffix:
    """What comes after an assistant's turn."""

    tokens: list[int]
    end: int
    """The token before these ids, which ends the turn. The model has sampled it, unless it was stopped."""
    other_ends: Collection[int]
    """Tokens that a model may sample instead, if the template writes them only at the end of a conversation."""
    is_rewritten: bool
    """Whether the template renders the turn differently from what was read and sampled, now that something follows
    it."""


class ChatTokenizer:
    """A tokenizer with its chat template. Rendering depends on the whole conversation, so a history is never rendered
    again: a turn's tokens are kept as they were sampled, and `observation` returns what comes between one turn and the
    next."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        self._specials = files.specials
        self._text = SpecialText(files.specials)
        self._placeholders = TemplatePlaceholders(self._text)
        self._template = ChatTemplate(files.templates, files.named, files.where)
        self._renderer = Renderer(self._template, self._text, self._placeholders)
        self._where = files.where
        self.tool_format: CallFormat = tool_format("hermes")
        """The format in which the model writes calls, detected from its template; assign another if that is wrong."""
        self.unknown_format = ""
        """Why the format is a guess: the template shows calls in an unknown format."""
        try:
            self.tool_format = detect(files.templates.get(WITH_TOOLS, files.templates["default"]))
        except ChatError as error:
            self.unknown_format = str(error)
        self.thinks = any(THINK in source for source in files.templates.values())
        """Whether the template shows think blocks."""
        self._turn_end_text = self._find_turn_end(files.named.get("eos_token"))
        self.turn_end = self._specials[self._turn_end_text]
        """The token that the template writes at the end of an assistant's turn."""
        self._eos_ids = files.eos_ids
        self._past_end_text = self._find_past_end()
        self.pictures = PictureTokens.of(files.specials, lambda shown: self._template.render(shown, None, False, {}))
        """Tokens of pictures, for families that see."""
        self.card: VisionCard | None = None
        """How pictures are resized; None if the folder's model reads text only."""

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Loads tokenizer and template. Raises ChatError if the folder does not have both."""
        tokenizer = cls(read_tokenizer(Path(folder)))
        tokenizer.card = read_card(Path(folder), tokenizer.pictures)
        return tokenizer

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: JsonMapping | None = None,
    ) -> str:
        return self._template.render(messages, tools, add_generation_prompt, template_kwargs or {})

    @cached_property
    def shape(self) -> MessageShape:
        """Returns which sequences of messages the template takes."""
        return MessageShape.of(self.render)

    def template_knows(self, variable: str) -> bool:
        return self._template.knows(variable)

    def encode_chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        template_kwargs: JsonMapping | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encodes a conversation. With `continue_final_message` it ends at the last word of the last message, which is
        the assistant's. Raises TooLongError if it is certain, before everything is encoded, that there are more than
        `max_tokens`."""
        if continue_final_message:
            messages, add_generation_prompt = self._placeholders.left_open(messages), False
        chat = TemplateInput(self._shown(messages), tools, add_generation_prompt, template_kwargs or {})
        rendered = self._renderer.render(chat)
        if continue_final_message:
            rendered = replace(rendered, text=self._placeholders.cut_at_end(rendered.text))
        return self._encode(rendered, max_tokens)

    def observation(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        template_kwargs: JsonMapping | None = None,
    ) -> list[int]:
        """Returns the tokens between the end-of-turn token of an assistant's turn and the assistant's next turn, with
        `messages` in between. Prompt + turn + observation are the tokens of the whole conversation."""
        return self.following(
            WORDS, messages, tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        ).tokens

    def following(
        self,
        turn: JsonMapping,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: JsonMapping | None = None,
        max_tokens: int | None = None,
        thought: bool = False,
        opened: bool = False,
    ) -> TurnSuffix:
        """Returns what comes after an assistant's turn. Only a short placeholder for the conversation before it is
        rendered.

        `thought`: the turn, or one before it, had reasoning. `opened`: look at what was read before it, too.
        """
        if continue_final_message:
            messages, add_generation_prompt = self._placeholders.left_open(messages), False
        chat = TemplateInput(self._shown(messages), tools, add_generation_prompt, template_kwargs or {})
        shown = self._renderer.after_turn(turn, chat, thought=thought, opened=opened)
        end, after = self._split_at_end(shown.rendered.text)
        if continue_final_message:
            after = self._placeholders.cut_at_end(after)
        # Encoded after the token that it follows: some tokenizers treat the beginning of a text differently.
        first, *tokens = self._encode(replace(shown.rendered, text=end + after), max_tokens)
        return TurnSuffix(tokens, first, self.stop_ids if self._past_end_text else (), shown.is_rewritten)

    def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Encodes text, never as a special token, whatever the text contains. `max_tokens`: as in `encode_chat`."""
        if self._text.first(text) is None:
            return self._encode(RenderedChat(text), max_tokens)
        hidden: list[str] = []
        return self._encode(RenderedChat(self._text.hide(text, hidden), hidden), max_tokens)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def token_name(self, token: int) -> str:
        """Returns the token as the vocabulary spells it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token) or ""

    @property
    def vocabulary(self) -> dict[str, int]:
        """Returns all tokens, special ones included, with their ids."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def special_texts(self) -> Mapping[str, int]:
        """Returns texts that are always one token, whether it is called special or not, with its id."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the eos ids of the folder's files, `turn_end` (the files of a base model do not name
        it), and those of its answer format."""
        stops = self.tool_format.stops if isinstance(self.tool_format, AnswerFormat) else ()
        more = [self._specials[text] for text in stops if text in self._specials]
        return tuple(dict.fromkeys([*self._eos_ids, self.turn_end, *more]))

    @property
    def spoken_tags(self) -> tuple[str, ...]:
        """Tags that separate reasoning, text and calls. If these are special tokens, an answer that is decoded without
        them cannot be parsed."""
        return (THINK, END_THINK, *self.tool_format.tags)

    def special_ids(self, but: Collection[str] = ()) -> frozenset[int]:
        """Returns the ids of the tokens that decoding drops."""
        return frozenset(token for text, token in self._specials.items() if text not in but)

    def _shown(self, messages: Messages) -> Messages:
        """The messages for the template, with marks where pictures stand."""
        return messages if self.pictures is None else self.pictures.trimmed(messages)

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """The texts that end a turn. If a template writes no end, the first token of the next turn may be one."""
        texts = [self._specials_by_id[token] for token in self.stop_ids if token in self._specials_by_id]
        texts += [self._past_end_text] if self._past_end_text else []
        return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))

    def _split_at_end(self, text: str) -> tuple[str, str]:
        """Splits at the end of the placeholder's turn."""
        rest = self._placeholders.after(text)
        if rest is None:
            raise ChatError(
                f"the chat template of {self._where} drops an assistant's turn once another message follows"
            )
        found = self._ends.search(rest)
        return (found[0], rest[found.end() :]) if found else (self._turn_end_text, rest)

    def _find_turn_end(self, eos: str | None) -> str:
        rendered = self._template.render([HELLO, self._placeholders.turn(WORDS, thought=False)], None, False, {})
        after = self._placeholders.after(rendered)
        if after is None:
            raise ChatError(f"the chat template of {self._where} does not show what the assistant says")
        written = self._text.first(after)
        if end := written or eos:
            return end
        raise ChatError(
            f"nothing ends an assistant's turn in {self._where}: its chat template writes no special token there\n"
            "  name one as `eos_token` in tokenizer_config.json"
        )

    def _find_past_end(self) -> str:
        """Returns the text that ends a turn if others follow it, in case this differs from the end of the last turn."""
        turn = self._placeholders.turn(WORDS, thought=False)
        try:
            last, past = (self._template.render([HELLO, turn, *more], None, False, {}) for more in ([], [HELLO]))
        except ChatError:
            return ""
        ends = [self._text.first(self._placeholders.after(text) or "") for text in (last, past)]
        return ends[1] or "" if ends[0] and ends[0] != ends[1] else ""

    def _encode(self, rendered: RenderedChat, max_tokens: int | None) -> list[int]:
        if max_tokens is not None:
            self._refuse_too_long(rendered, max_tokens)
        if self.pictures is not None and has_marks(rendered.text):
            rendered = replace(rendered, text=self.pictures.expanded(rendered.text))
        if not rendered.hidden:
            return _ids(self._tokenizer, rendered.text)
        tokens = self._encode_aliased(rendered)
        if any(token in self._specials_by_id for token in tokens):
            # The tokenizer's model itself would make such a token of plain text, so its characters are separated.
            tokens = self._encode_aliased(rendered, cut=self._cut)
        cut = self._plain.token_to_id(self._cut)
        return [self._aliases_by_id.get(token, token) for token in tokens if token != cut]

    def _encode_aliased(self, rendered: RenderedChat, cut: str = "") -> list[int]:
        """Encodes special tokens that the template wrote by their aliases, and hidden texts as plain text."""
        text = self._text.replace(rendered.text, self._aliases)
        return _ids(self._plain, self._text.show(text, rendered.hidden, cut))

    def _refuse_too_long(self, rendered: RenderedChat, max_tokens: int) -> None:
        if len(rendered.text) <= max_tokens or self._longest_text is None:
            return
        least = -(-len(self._renderer.shown(rendered)) // self._longest_text)
        if least > max_tokens:
            raise TooLongError(least)

    @cached_property
    def _longest_text(self) -> int | None:
        return longest_text(self._tokenizer)

    @cached_property
    def _specials_by_id(self) -> dict[int, str]:
        return {token: text for text, token in self._specials.items()}

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return {text: self._text.mark("T", token) for text, token in self._specials.items()}

    @cached_property
    def _cut(self) -> str:
        return self._text.mark("C")

    @cached_property
    def _plain(self) -> Tokenizer:
        """A second tokenizer, for which special texts are plain text; each has an alias that is matched exactly like
        it."""
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        flags = self._tokenizer.get_added_tokens_decoder()
        for text, alias in self._aliases.items():
            original = flags[self._specials[text]]
            plain.add_tokens([AddedToken(alias, normalized=False, lstrip=original.lstrip, rstrip=original.rstrip)])
        plain.add_tokens([AddedToken(self._cut, normalized=False)])
        return plain

    @cached_property
    def _aliases_by_id(self) -> dict[int, int]:
        pairs = ((self._plain.token_to_id(alias), self._specials[text]) for text, alias in self._aliases.items())
        return {alias: token for alias, token in pairs if alias is not None}


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Uses the call for several texts, because it lets other threads run meanwhile."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
