"""The ways in which teachers read what a student said: as it was, with more in the prompt, or in another tokenizer's
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from palestra.chat import ChatTokenizer
from palestra.chat.picture_files import read_pictures
from palestra.data.conversations import Conversation
from palestra.rollouts.policy_sampler import SamplingError, TopScores
from palestra.training.batches.sft_examples import encode_example
from palestra.training.row_scores import PlayedRow, TokenScorer, all_tokens
from palestra.training.token_spans import TokenSpan, shared_spans
from palestra.types.pictures import PromptPicture, whole_pictures
from palestra.types.rollouts import Message

NO_LIMIT = 1 << 30


class PlainTeacher:
    """A teacher that reads the student's own tokens. Without a scorer it is the student, as it played."""

    def __init__(self, scorer: TokenScorer | None, top_k: int) -> None:
        """`top_k`: of how many tokens in each place the probability is needed; 0: only of those that were sampled."""
        self._scorer, self._top_k = scorer, top_k

    async def score(self, played: PlayedRow, limit: int, own: TokenScorer) -> TopScores:
        cut, pictures = whole_pictures(played.row.pictures, limit)
        return await self.read(all_tokens(played.row)[:cut], pictures, own)

    async def read(self, tokens: Sequence[int], pictures: Sequence[PromptPicture], own: TokenScorer) -> TopScores:
        scorer = self._scorer or own
        if self._top_k:
            return await scorer.score_top(tokens, self._top_k, pictures=pictures)
        return TopScores(await scorer.score(tokens, pictures=pictures), [])


class PrivilegedTeacher:
    """A teacher whose prompt also says what the student is not told, such as the answer or a demonstration (SDFT,
    OPSD): a text with fields of the task is added to the last message of the prompt."""

    def __init__(self, teacher: PlainTeacher, tokenizer: ChatTokenizer, context: str) -> None:
        self._teacher, self._tokenizer, self._context = teacher, tokenizer, context

    async def score(self, played: PlayedRow, limit: int, own: TokenScorer) -> TopScores:
        cut, pictures = whole_pictures(played.row.pictures, limit)
        tokens = all_tokens(played.row)[:cut]
        messages, files = first_messages(self._tokenizer, played), played.rollout.picture_files
        head = self._tokenizer.encode_chat(read_pictures(messages, self._tokenizer.card, files).messages)
        seen = read_pictures(with_context(messages, self._text(played)), self._tokenizer.card, files)
        prompt = self._tokenizer.encode_chat(seen.messages)
        moved = [replace(one, start=one.start - len(head) + len(prompt)) for one in pictures if one.start >= len(head)]
        pictures = [*seen.placed(self._tokenizer.pictures, prompt), *moved]
        found = await self._teacher.read([*prompt, *tokens[len(head) :]], pictures, own)
        top = [None] * len(head) + found.top[len(prompt) :] if found.top else []
        return TopScores([0.0] * len(head) + found.logprobs[len(prompt) :], top)

    def _text(self, played: PlayedRow) -> str:
        try:
            return self._context.format_map(played.task.extras)
        except (KeyError, IndexError, AttributeError) as error:
            known = ", ".join(sorted(played.task.extras)) or "none"
            raise SamplingError(
                f"teachers[].context names {error}, and task {played.task.id} has no such field in its extras; "
                f"it has {known}"
            ) from None


class OtherTokenizerTeacher:
    """A teacher with a tokenizer of its own. It reads the conversation in its own tokens. Where both tokenizers have a
    boundary at the same character, a span ends; what the teacher says about a span counts for each of the student's
    tokens in it: their logprobs are returned so that student minus teacher is the difference of the whole span."""

    def __init__(self, scorer: TokenScorer, tokenizer: ChatTokenizer, student: ChatTokenizer) -> None:
        self._scorer, self._tokenizer, self._student = scorer, tokenizer, student

    async def score(self, played: PlayedRow, limit: int, own: TokenScorer) -> TopScores:
        row, rollout = played.row, played.rollout
        if row.pictures:
            raise SamplingError(
                f"rollout {rollout.id} has pictures, which a teacher with another tokenizer cannot read; choose one "
                "with the student's tokenizer"
            )
        example = encode_example(self._tokenizer, Conversation(_up_to_the_last_turn(rollout.messages)), NO_LIMIT)
        sequence = example.sequence
        changes = enumerate(pairwise([False, *sequence.mask, False]))
        edges = [place for place, (before, here) in changes if before != here]
        turns = list(zip(edges[::2], edges[1::2], strict=True))[-len(row.turns) :]
        if len(rollout.rows) > 1 or len(turns) != len(row.turns):
            raise SamplingError(
                f"rollout {rollout.id}: a teacher with another tokenizer can only read conversations that nothing was "
                "removed from"
            )
        scores = await self._scorer.score(sequence.tokens)
        found = [0.0] * len(row.prompt)
        for turn, (start, end) in zip(row.turns, turns, strict=True):
            spans = shared_spans(self._student, turn.tokens, self._tokenizer, sequence.tokens[start:end])
            found += [0.0] * len(turn.observation)
            found += as_students(turn.logprobs, scores[start:end], spans)
        return TopScores(found[:limit], [])


def as_students(own: Sequence[float], teachers: Sequence[float], spans: Sequence[TokenSpan]) -> list[float]:
    """Returns logprobs for the student's tokens: own minus these is, for each token, what own and teacher's logprobs of
    its span differ by. A token in no span gets its own."""
    found = list(own)
    for span in spans:
        gap = sum(own[slice(*span.student)]) - sum(teachers[slice(*span.teacher)])
        for place in range(*span.student):
            found[place] = own[place] - gap
    return found


def first_messages(tokenizer: ChatTokenizer, played: PlayedRow) -> list[Message]:
    """Returns the messages that a row's prompt begins with. Raises SamplingError if the environment has rewritten
    them."""
    messages = played.rollout.messages
    for end, message in enumerate(messages):
        if end and message.get("role") == "assistant":
            seen = read_pictures(messages[:end], tokenizer.card, played.rollout.picture_files)
            prompt = tokenizer.encode_chat(seen.messages)
            if played.row.prompt[: len(prompt)] == prompt:
                return messages[:end]
    raise SamplingError(
        f"rollout {played.rollout.id}: its prompt is not that of the conversation's first messages, so the context of "
        "a teacher cannot be added"
    )


def with_context(messages: Sequence[Message], text: str) -> list[Message]:
    *before, last = messages
    content = last.get("content") or ""
    if isinstance(content, list):
        return [*before, {**last, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}]
    return [*before, {**last, "content": f"{content}\n\n{text}"}]


def _up_to_the_last_turn(messages: Sequence[Message]) -> list[Message]:
    last = max(place for place, message in enumerate(messages) if message.get("role") == "assistant")
    return list(messages[: last + 1])
