"""Reads a whole dataset as training would, row by row: what is wrong with it, and how long its rows are.

Of each row it keeps a few numbers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct, field

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.picture_files import read_pictures
from palestra.data.conversations import Conversation, content_of, conversation_of, pair_of
from palestra.data.errors import DatasetError
from palestra.data.kinds import DataKind, kind_of
from palestra.data.rows import RawRow, read_rows
from palestra.environments.errors import TaskFileError
from palestra.environments.tasks import Row, TaskReader
from palestra.training.batches.sft_examples import encode_example
from palestra.types.rollouts import Message

HASH_BYTES = 8
NO_LIMIT = 1 << 40
PERCENTILES = (50, 90, 99)

PictureCheck = Callable[[Sequence[Message]], None]
"""Raises ChatError if a picture of messages cannot be read."""


def no_check(messages: Sequence[Message]) -> None:
    """For those who only count: the pixels of pictures are not unpacked."""


class Lengths(Struct):
    """Numbers of tokens, one for each row."""

    values: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, tokens: int) -> None:
        self.values.append(tokens)

    def summary(self) -> dict[str, float]:
        ordered = sorted(self.values)
        last = len(ordered) - 1
        marks = {f"p{percent}": ordered[round(last * percent / 100)] for percent in PERCENTILES}
        mean = sum(ordered) / len(ordered)
        return {"min": ordered[0], "mean": mean, **marks, "max": ordered[-1], "total": sum(ordered)}


class DatasetSurvey(Struct, kw_only=True):
    kind: DataKind
    rows: int = 0
    messages: int = 0
    with_tools: int = 0
    """Rows with tools for the chat template."""
    with_system: int = 0
    duplicates: int = 0
    """Rows that are equal to an earlier one, byte for byte."""
    roles: dict[str, int] = field(default_factory=dict)
    """Number of messages by role."""
    tokens: dict[str, Lengths] = field(default_factory=dict)
    """Lengths under the model's template, if there is a model: of prompts, of whole rows, of what is learned."""
    cut: int = 0
    """Rows that are longer than the limit and lose their end."""
    empty: int = 0
    """Rows that are skipped, because nothing of their answer is within the limit."""
    longest: str = ""
    """Place of the longest row."""


class DatasetReader:
    """Reads rows as the loop of their kind does, and counts."""

    def __init__(
        self, kind: DataKind | None, tokenizer: ChatTokenizer | None, limit: int | None, check_pictures: PictureCheck
    ) -> None:
        """`kind` None: that of the first row, which all others must have. `limit` is `max_sequence_length`."""
        self._kind, self._tokenizer, self._limit = kind, tokenizer, limit or NO_LIMIT
        self._check_pictures, self._tasks = check_pictures, TaskReader("dataset")
        self._seen: set[bytes] = set()
        self._longest = 0
        self.survey: DatasetSurvey | None = None

    def read(self, row: RawRow) -> None:
        """Raises DatasetError."""
        content = row.content()
        try:
            kind = self._kind or kind_of(content)
            if kind is not DataKind.PROMPTS:
                content = content_of(row)
            survey = self.survey = self.survey or DatasetSurvey(kind=kind)
            self._kind = kind
            match kind:
                case DataKind.CHATS:
                    found = [conversation_of(content)]
                case DataKind.PREFERENCES:
                    pair = pair_of(content)
                    found = [pair.chosen, pair.rejected]
                case DataKind.PROMPTS:
                    task = self._tasks.read(Row(str(row.place), content, Path(row.place.file).parent))
                    found = [Conversation(task.prompt)]
            lengths = self._lengths(kind, found) if self._tokenizer else None
            for one in found:
                self._check_pictures(one.messages)
        except (DatasetError, ChatError) as error:
            problem = error.problem if isinstance(error, DatasetError) else str(error)
            raise DatasetError(problem, row.place) from None
        except TaskFileError as error:
            raise DatasetError(str(error).removeprefix(f"{row.place}: "), row.place) from None
        self._count(survey, row, found)
        if lengths is not None:
            self._count_tokens(survey, row, lengths)

    def _lengths(self, kind: DataKind, found: Sequence[Conversation]) -> list[_RowLength]:
        assert self._tokenizer is not None
        if kind is DataKind.PROMPTS:
            seen = read_pictures(found[0].messages, self._tokenizer.card, opens_files=True)
            prompt = len(self._tokenizer.encode_chat(seen.messages, None))
            return [_RowLength(prompt, prompt, 0)]
        lengths = []
        for one in found:
            example = encode_example(self._tokenizer, one, NO_LIMIT)
            mask = example.sequence.mask
            prompt = mask.index(True) if any(mask) else len(mask)
            lengths.append(_RowLength(prompt, len(mask), example.trained))
        return lengths

    def _count(self, survey: DatasetSurvey, row: RawRow, found: Sequence[Conversation]) -> None:
        survey.rows += 1
        messages = [message for one in found for message in one.messages]
        survey.messages += len(messages)
        for message in messages:
            survey.roles[message["role"]] = survey.roles.get(message["role"], 0) + 1
        survey.with_tools += found[0].tools is not None
        survey.with_system += found[0].messages[0]["role"] in ("system", "developer")
        digest = hashlib.blake2b(row.line, digest_size=HASH_BYTES).digest()
        survey.duplicates += digest in self._seen
        self._seen.add(digest)

    def _count_tokens(self, survey: DatasetSurvey, row: RawRow, lengths: Sequence[_RowLength]) -> None:
        longest = max(one.total for one in lengths)
        if longest > self._longest:
            self._longest, survey.longest = longest, row.place.short
        counts = {"prompt": lengths[0].prompt, "all": longest}
        if survey.kind is not DataKind.PROMPTS:
            counts["learned"] = sum(one.learned for one in lengths)
            survey.empty += any(one.prompt >= self._limit or not one.learned for one in lengths)
        for name, tokens in counts.items():
            survey.tokens.setdefault(name, Lengths()).add(tokens)
        survey.cut += longest > self._limit


class _RowLength(Struct, frozen=True):
    prompt: int
    """Number of tokens before the first one that is learned."""
    total: int
    learned: int


def survey_dataset(
    source: str | Path,
    kind: DataKind | None,
    tokenizer: ChatTokenizer | None,
    limit: int | None,
    check_pictures: PictureCheck = no_check,
) -> DatasetSurvey:
    """Raises DatasetError at the first row that training would not take."""
    reader = DatasetReader(kind, tokenizer, limit, check_pictures)
    for row in read_rows(source):
        reader.read(row)
    if reader.survey is None:
        raise DatasetError(f"{source} is empty; it should hold one JSON object in each line")
    return reader.survey


def bad_rows(
    source: str | Path,
    kind: DataKind | None,
    tokenizer: ChatTokenizer | None,
    check_pictures: PictureCheck = no_check,
) -> Iterator[DatasetError]:
    """Gives what is wrong, row by row; if the kind is not given, it is that of the first row that has one."""
    reader = DatasetReader(kind, tokenizer, None, check_pictures)
    for row in read_rows(source):
        try:
            reader.read(row)
        except DatasetError as error:
            yield error
