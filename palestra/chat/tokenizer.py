"""Conversations as the exact tokens a model is given, and back.

Owns: encoding whole conversations and what follows an assistant's turn; text that can never become a special token.
Never touches: models, HTTP, transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from palestra.chat.errors import ChatError
from palestra.chat.special_text import SpecialText
from palestra.chat.templates import ChatTemplate, Messages, Tools
from palestra.chat.tokenizer_files import TokenizerFiles, read_tokenizer


class ChatTokenizer:
    """Rendering depends on the whole conversation, so a history is never rendered again: a turn's tokens are kept as
    they were sampled, and `observation` gives what comes between one turn and the next."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        self._specials = files.specials
        self._text = SpecialText(files.specials)
        self._template = ChatTemplate(files.templates, files.named, files.where)
        self._where = files.where
        self._turn_end_text = self._find_turn_end(files.named.get("eos_token"))
        self.turn_end = self._specials[self._turn_end_text]
        """The token that the template writes at the end of an assistant's turn."""
        self.stop_ids = tuple(dict.fromkeys([*files.eos_ids, self.turn_end]))
        """What ends a turn: the eos ids of the folder's files, and `turn_end` (a base model's files do not name it)."""

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Raises ChatError where the folder has no tokenizer or no chat template."""
        return cls(read_tokenizer(Path(folder)))

    def render(
        self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        return self._template.render(messages, tools, add_generation_prompt, **template_kwargs)

    def encode_chat(
        self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        text, hidden = self._render_hidden(messages, tools, add_generation_prompt, template_kwargs)
        return self._encode(text, hidden)

    def observation(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None, **template_kwargs: Any
    ) -> list[int]:
        """The tokens between the end-of-turn token of an assistant's turn and the assistant's next, where `messages`
        came in between. Prompt + turn + observation are the tokens of the whole conversation."""
        text, hidden = self._render_hidden([*self._base, *messages], tools, add_generation_prompt, template_kwargs)
        _, found, rest = text.partition(self._stub)
        if not found:
            raise ChatError(
                f"the chat template of {self._where} drops an assistant's turn once another message follows"
            )
        before, end, after = rest.partition(self._turn_end_text)
        following = after if end else before
        # Encoded behind the token it follows: some tokenizers treat the beginning of a text differently.
        return self._encode(self._turn_end_text + following, hidden)[1:]

    def encode_text(self, text: str) -> list[int]:
        """Never a special token, whatever the text says."""
        if self._text.first(text) is None:
            return self._encode_as_is(text)
        hidden: list[str] = []
        return self._encode(self._text.hide(text, hidden), hidden)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    @cached_property
    def _stub(self) -> str:
        return self._text.mark("S")

    @cached_property
    def _base(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": self._stub}]

    def _find_turn_end(self, eos: str | None) -> str:
        rendered = self._template.render(self._base, None, add_generation_prompt=False)
        if self._stub not in rendered:
            raise ChatError(f"the chat template of {self._where} does not show what the assistant says")
        written = self._text.first(rendered.partition(self._stub)[2])
        if found := written or eos:
            return found
        raise ChatError(
            f"nothing ends an assistant's turn in {self._where}: its chat template writes no special token there\n"
            "  name one as `eos_token` in tokenizer_config.json"
        )

    def _render_hidden(
        self, messages: Messages, tools: Tools | None, add_generation_prompt: bool, kwargs: dict[str, Any]
    ) -> tuple[str, list[str]]:
        """With stand-ins for the special texts that others wrote, and what they stand for."""
        hidden: list[str] = []
        if self._text.is_in((messages, tools, kwargs)):
            messages, tools, kwargs = (self._text.hide(part, hidden) for part in (messages, tools, kwargs))
        return self._template.render(messages, tools, add_generation_prompt, **kwargs), hidden

    def _encode(self, text: str, hidden: list[str]) -> list[int]:
        if not hidden:
            return self._encode_as_is(text)
        tokens = self._encode_aliased(text, hidden)
        if any(token in self._specials_by_id for token in tokens):
            # The tokenizer's model itself makes such a token of plain text: keep its characters apart.
            tokens = self._encode_aliased(text, hidden, cut=self._cut)
        cut = self._plain.token_to_id(self._cut)
        return [self._aliases_by_id.get(token, token) for token in tokens if token != cut]

    def _encode_aliased(self, text: str, hidden: list[str], cut: str = "") -> list[int]:
        """Special tokens that the template wrote under their aliases, what was hidden as the text it is."""
        shown = self._text.show(self._text.replace(text, self._aliases), hidden, cut)
        return self._plain.encode(shown, add_special_tokens=False).ids

    def _encode_as_is(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

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
        """A second one, for which special texts are text; each has an alias that is matched exactly as it would be."""
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
