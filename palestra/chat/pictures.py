"""Pictures in the text of messages: marks that stand for them while a template renders, and their tokens.

Templates of the Qwen families write one picture as `<|vision_start|><|image_pad|><|vision_end|>` where its part stands
among the text of a message, those of Gemma 4 as `<|image|>`, in some versions between empty lines, and without white
space around the texts beside it. Here a part becomes a mark, text like any other; when the rendered text is encoded,
the mark becomes the family's tokens, with as many of the middle one as the picture has positions. What the template
does around a picture is found by rendering one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.chat.errors import ChatError
from palestra.chat.templates import Messages
from palestra.util.json_types import JsonMapping

_NONCE = secrets.token_hex(8)
OPEN, CLOSE = f"\ufdd0{_NONCE}:", "\ufdd1"
"""Around a mark, with Unicode's noncharacters; a caller cannot guess the other one, so that no text can be taken for
it."""
SCHEME = "picture:"
"""URLs of pictures that the server keeps, by their digests."""
FAMILIES = (("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), ("<|image>", "<|image|>", "<image|>"))
"""What stands before a picture, for each of its positions, and behind it."""

_MARK = re.compile(f"{OPEN}([0-9a-f]{{64}}):([0-9]+){CLOSE}")
_MARK_WHOLE = re.compile(f"{OPEN}[0-9a-f]{{64}}:[0-9]+{CLOSE}")
_LASTING = "\ufdd0"
SAMPLE = [
    {"role": "user", "content": [{"type": "text", "text": "A "}, {"type": "image"}, {"type": "text", "text": " B"}]}
]
"""What shows how a template writes a picture."""


@dataclass(frozen=True, slots=True)
class PictureMark:
    digest: str
    rows: int
    """Positions that the picture takes."""

    @property
    def text(self) -> str:
        return f"{OPEN}{self.digest}:{self.rows}{CLOSE}"


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """The tokens of a picture in this family."""

    before: str
    image: str
    behind: str
    image_id: int
    trims_text: bool = False
    """The template drops white space at both ends of a text beside a picture."""

    @classmethod
    def of(cls, specials: Mapping[str, int], render: Callable[[Messages], str]) -> PictureTokens | None:
        """`render` shows messages as the template does; it may refuse them with ChatError."""
        texts = next((texts for texts in FAMILIES if all(text in specials for text in texts)), None)
        if texts is None:
            return None
        before, image, behind = texts
        try:
            shown = render(SAMPLE)
        except ChatError:
            shown = ""
        found = re.search(
            rf"A( ?)(\s*)(?:{re.escape(before)})?{re.escape(image)}(?:{re.escape(behind)})?(\s*?)( ?)B", shown
        )
        if found is None:
            return cls(before, image, behind, specials[image])
        space, left, right, _ = found.groups()
        return cls(left + before, image, behind + right, specials[image], trims_text=not space)

    def trimmed(self, messages: Messages) -> Messages:
        """The messages as the template shows them if they had parts: texts beside marks may lose white space."""
        if not self.trims_text or not any(map(_is_marked, messages)):
            return messages
        return [{**one, "content": _trimmed(one["content"])} if _is_marked(one) else one for one in messages]

    def expanded(self, text: str) -> str:
        """Rendered text, with tokens in place of marks."""
        return _MARK.sub(lambda found: self.before + self.image * int(found[2]) + self.behind, text)

    def places(self, ids: Sequence[int], marks: Sequence[PictureMark]) -> list[int]:
        """Finds the places of a prompt's pictures, in its order. Single tokens of this kind may be around: a model can
        sample them. Raises ChatError where a picture is not there."""
        starts: list[int] = []
        at = 0
        for mark in marks:
            run = self._run(ids, at, mark.rows)
            if run is None:
                raise ChatError(f"the chat template leaves out picture {len(starts) + 1} of {len(marks)}")
            starts.append(run)
            at = run + mark.rows
        return starts

    def _run(self, ids: Sequence[int], at: int, rows: int) -> int | None:
        """The first run of exactly so many image tokens."""
        while at < len(ids):
            try:
                start = ids.index(self.image_id, at)
            except ValueError:
                return None
            at = start
            while at < len(ids) and ids[at] == self.image_id:
                at += 1
            if at - start == rows:
                return start
        return None


def _is_marked(message: JsonMapping) -> bool:
    content = message.get("content")
    return isinstance(content, str) and has_marks(content)


def _trimmed(content: str) -> str:
    texts = [text.strip() for text in _MARK_WHOLE.split(content)]
    marks = [found[0] for found in _MARK.finditer(content)]
    return "".join(part for pair in zip(texts, [*marks, ""], strict=True) for part in pair)


def lasting(text: str) -> str:
    """The text with marks that are the same in every process, by which a conversation is found again."""
    return text.replace(OPEN, _LASTING) if OPEN in text else text


def has_marks(text: str) -> bool:
    return OPEN in text


def with_parts(messages: Sequence[JsonMapping]) -> list[JsonMapping]:
    """Messages as an API shows them: with parts where there are marks."""
    return [
        {**one, "content": _parts(one["content"])} if has_marks(one.get("content") or "") else one for one in messages
    ]


def _parts(content: str) -> list[Any]:
    parts: list[Any] = []
    at = 0
    for found in _MARK.finditer(content):
        if text := content[at : found.start()]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image_url", "image_url": {"url": f"{SCHEME}{found[1]}"}})
        at = found.end()
    if text := content[at:]:
        parts.append({"type": "text", "text": text})
    return parts
