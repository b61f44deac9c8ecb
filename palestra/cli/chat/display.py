"""Shows a conversation as it comes: two models in columns, or one after the other where there is no
terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from palestra.endpoints.conversation import ChatEvent, ToolMessages
from palestra.net.chat_apis import AnswerPiece, StreamedAnswer, TokenLogprob
from palestra.types import StopReason
from palestra.util.figures import number_text
from palestra.util.safe_text import safe_text

THINKING, TOOLS = "dim italic", "cyan"
SHADES = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""Styles of tokens, by the least probability that they are for."""
Segments = list[tuple[str, str]]
"""Texts and their styles."""


class Display(Protocol):
    """Shows one exchange."""

    def show(self, index: int, event: ChatEvent | None) -> None: ...

    def close(self) -> None: ...


def open_display(names: Sequence[str], console: Console, *, with_logprobs: bool) -> Display:
    formatters = [EventFormatter(with_logprobs, has_colours=_has_colours(console)) for _ in names]
    if len(names) > 1 and console.is_terminal and not console.is_dumb_terminal:
        return Columns(names, formatters, console)
    return OneAfterTheOther(names, formatters, console)


def _has_colours(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


class EventFormatter:
    """Turns what happens into text, for one model."""

    def __init__(self, with_logprobs: bool, *, has_colours: bool) -> None:
        self._with_logprobs, self._has_colours = with_logprobs, has_colours
        self._is_thinking = False
        self._is_line_open = False

    def of(self, event: ChatEvent | None) -> Segments:
        segments = self._segments(event)
        if line := "".join(text for text, _ in segments):
            self._is_line_open = not line.endswith("\n")
        return segments

    def _segments(self, event: ChatEvent | None) -> Segments:
        if event is None:
            return []
        if isinstance(event, AnswerPiece):
            return self._piece(event)
        if isinstance(event, StreamedAnswer):
            return self._end(event)
        if isinstance(event, ToolMessages):
            return [(f"[{one['role']}] {one.get('content') or ''}\n", TOOLS) for one in event.messages]
        return [(f"[the episode ends with reward {number_text(event.reward)}]\n", TOOLS)]

    def _piece(self, piece: AnswerPiece) -> Segments:
        if self._with_logprobs and self._has_colours:
            return [(one.token, shade(one.logprob)) for one in piece.tokens]
        found: Segments = []
        if piece.reasoning:
            found.append((piece.reasoning if self._is_thinking else f"[thinking] {piece.reasoning}", THINKING))
            self._is_thinking = True
        if piece.text:
            found.append((f"\n{piece.text}" if self._is_thinking else piece.text, ""))
            self._is_thinking = False
        return found

    def _end(self, answer: StreamedAnswer) -> Segments:
        self._is_thinking = False
        found: Segments = [("\n", "")] if self._is_line_open else []
        if answer.stop is StopReason.LENGTH:
            found.append(("[cut at the token limit]\n", TOOLS))
        if self._with_logprobs and not self._has_colours:
            found.append((logprob_list(answer.tokens), ""))
        return found


def shade(logprob: float) -> str:
    probability = math.exp(min(0.0, logprob))
    return next(style for least, style in SHADES if probability >= least)


def logprob_list(tokens: Sequence[TokenLogprob]) -> str:
    return "".join(f"{one.logprob:9.4f}  {math.exp(one.logprob):6.1%}  {one.token!r}\n" for one in tokens)


class OneAfterTheOther:
    """Shows the first answer at once, and each further one when those before it have ended."""

    def __init__(self, names: Sequence[str], formatters: Sequence[EventFormatter], console: Console) -> None:
        self._names, self._formatters, self._console = names, formatters, console
        self._waiting: list[list[ChatEvent | None]] = [[] for _ in names]
        self._current = -1
        self._next()

    def close(self) -> None:
        pass

    def show(self, index: int, event: ChatEvent | None) -> None:
        if index != self._current:
            self._waiting[index].append(event)
            return
        self._print(event)
        if event is None:
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current >= len(self._names):
            return
        if len(self._names) > 1:
            self._console.print(Text(f"[{self._names[self._current]}]", style="bold"))
        for event in self._waiting[self._current]:
            self.show(self._current, event)

    def _print(self, event: ChatEvent | None) -> None:
        for text, style in self._formatters[self._current].of(event):
            if self._console.is_terminal:
                self._console.print(Text(safe_text(text), style=style), end="", soft_wrap=True)
            else:
                self._console.file.write(text)
                self._console.file.flush()


class Columns:
    """Both at once, side by side."""

    def __init__(self, names: Sequence[str], formatters: Sequence[EventFormatter], console: Console) -> None:
        self._names, self._formatters = names, formatters
        self._texts = [Text() for _ in names]
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=12)
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def show(self, index: int, event: ChatEvent | None) -> None:
        for text, style in self._formatters[index].of(event):
            self._texts[index].append(safe_text(text), style=style or None)

    def _table(self) -> Table:
        table = Table(expand=True, box=None, padding=(0, 2, 0, 0))
        for name in self._names:
            table.add_column(Text(name), ratio=1, overflow="fold")
        table.add_row(*self._texts)
        return table
