"""One rollout: what was said, how it was graded, its siblings, its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pprint import pformat
from typing import Any

import msgspec
from msgspec import Struct

from palestra.runs.reader import Part, RunNotFound, RunReader
from palestra.runs.record_files import RunError, read_records
from palestra.runs.rollout_records import RolloutRecord, TokenRecord
from palestra.runs.token_cells import TokenCell, TokenOrigin, load_tokenizer, token_cells
from palestra.util.safe_text import safe_text
from palestra.view.rollouts.messages import ShownMessage, content_text, show_messages
from palestra.view.rollouts.play_again import PlayAgain, how_to_play_again
from palestra.view.rollouts.rollout_list import read_step
from palestra.view.rollouts.rollout_records import ListedRecord, ShownRecord, complete, complete_tokens, messages_in
from palestra.view.rollouts.verdicts import ShownVerdict, read_verdict
from palestra.view.runs.catalogue import Catalogue

ORIGINS = list(TokenOrigin)
WIDTH = 110  # of a line in a test case


class Sibling(Struct, frozen=True):
    id: str
    index: int
    reward: float | None
    stop: str
    advantage: float | None
    is_fork: bool
    """Whether it goes on from a turn of another rollout."""


class RolloutDetail(Struct, frozen=True):
    run: str
    part: Part
    step: int
    record: RolloutRecord
    """The record as it was written."""
    messages: list[ShownMessage]
    siblings: list[Sibling]
    """All rollouts of its group, itself among them."""
    previous: str | None
    next: str | None
    verdict: ShownVerdict | None
    """What the environment's verifier saw and said, if that was recorded."""
    again: PlayAgain
    token_rows: list[str]
    """Ids of the conversations whose tokens are kept: the rollout's own, and branches."""


class TokenColumns(Struct, frozen=True):
    """Tokens in columns of equal length."""

    id: str
    ids: list[int]
    texts: list[str]
    """The text that each token adds, with control characters written out."""
    origins: list[int]
    """0: of the prompt, 1: an observation, 2: sampled."""
    turns: list[int]
    """The turn of each token; 0 for the prompt."""
    versions: list[int | None]
    """The version of the weights that drew each token; None for tokens that were not sampled."""
    logprobs: list[float | None]
    trainer_logprobs: list[float | None]
    advantages: list[float | None]
    advantage_divisor: float | None
    """What the advantages were divided by in the loss; None if an older version wrote them, already divided."""
    entropies: list[float | None]
    """In nats, of the trainer's distribution from which the token was to be predicted, just before the update."""
    has_texts: bool
    """False if the tokenizer is not at hand; then texts are ids."""


def read_rollout(catalogue: Catalogue, name: str, part: Part, step: int, rollout_id: str) -> RolloutDetail:
    run = catalogue.open(name)
    record = _find(run, part, step, rollout_id)
    others = [one for one in read_step(run, part, step) if one["group"] == str(record.get("group"))]
    siblings = sorted((_sibling(one) for one in others), key=lambda one: one.index)
    place = next((at for at, one in enumerate(siblings) if one.id == rollout_id), 0)
    return RolloutDetail(
        run=name,
        part=part,
        step=step,
        record=record,
        messages=show_messages(messages_in(record)),
        siblings=siblings,
        previous=siblings[place - 1].id if place > 0 else None,
        next=siblings[place + 1].id if place + 1 < len(siblings) else None,
        verdict=read_verdict(complete(record)["verdict"]),
        again=how_to_play_again(catalogue, name, record),
        token_rows=_token_rows(run, part, step, complete(record)),
    )


def read_tokens(catalogue: Catalogue, name: str, step: int, row_id: str) -> TokenColumns:
    """The tokens of a rollout, or of a branch of one. Raises RunNotFound if none are kept."""
    run = catalogue.open(name)
    written = run.find_tokens(row_id, step)
    if written is None:
        raise RunNotFound(
            f"no tokens of {row_id[:100]!r} are kept; keep_tokens in the config keeps them, evaluations have none"
        )
    facts = run.read_about().get("facts") or {}
    tokenizer = _tokenizer(facts.get("tokenizer"))
    try:
        record = complete_tokens(written)
    except msgspec.ValidationError as error:
        raise RunError(f"the tokens of {row_id[:100]!r} cannot be read: {error}") from None
    cells = token_cells(record, tokenizer)
    return TokenColumns(
        id=row_id,
        ids=[cell.id for cell in cells],
        texts=_texts(cells, record.get("pictures", ())),
        origins=[ORIGINS.index(cell.origin) for cell in cells],
        turns=_turns(record),
        versions=_versions(record),
        logprobs=[cell.logprob for cell in cells],
        trainer_logprobs=[cell.trainer_logprob for cell in cells],
        advantages=[cell.advantage for cell in cells],
        advantage_divisor=record.get("advantage_divisor"),
        entropies=[cell.entropy for cell in cells],
        has_texts=tokenizer is not None,
    )


def _texts(cells: Sequence[TokenCell], pictures: Sequence[Sequence[Any]]) -> list[str]:
    """The text of each token; a picture's is at its first position."""
    texts = [safe_text(cell.text) for cell in cells]
    for start, rows, digest in pictures:
        place = slice(max(0, start), max(0, start + rows))
        texts[place] = [f"[picture {safe_text(digest[:12])}: {rows} positions]", *[""] * len(texts)][
            : len(texts[place])
        ]
    return texts


def write_test_case(detail: RolloutDetail) -> str:
    """The rollout as Python, to begin a test of its environment with."""
    record = detail.record
    answers = [content_text(one) for one in messages_in(record) if one.get("role") == "assistant"]
    facts = {name: record.get(name) for name in ("environment", "task", "seed", "stop", "reward")}
    lines = [f"# Rollout {safe_text(str(record.get('id')), keep='')} of step {detail.step} of the run {detail.run}."]
    lines += [f"{name} = {value!r}" for name, value in facts.items()]
    parts = {"messages": messages_in(record), "answers": answers}
    lines += [f"{name} = {pformat(value, width=WIDTH, sort_dicts=False)}" for name, value in parts.items()]
    return "\n".join(lines) + "\n"


def _find(run: RunReader, part: Part, step: int, rollout_id: str) -> RolloutRecord:
    read_step(run, part, step)  # says which steps there are, if not this one
    for record in read_records(run.step_file(part, step), rollout_id):
        if record.get("id") == rollout_id:
            return record
    raise RunNotFound(f"there is no rollout {rollout_id[:100]!r} in step {step} of {run.name}")


def _sibling(record: ListedRecord) -> Sibling:
    is_fork = record.get("fork_of") is not None
    index = int(record["index"] or 0)
    return Sibling(record["id"], index, record["reward"], record["stop"], record["advantage"], is_fork)


def _token_rows(run: RunReader, part: Part, step: int, record: ShownRecord) -> list[str]:
    if part is not Part.ROLLOUTS or not run.step_file(Part.TOKENS, step).is_file():
        return []
    rollout_id = str(record["id"])
    branches = [f"{rollout_id}.{number}" for number in range(1, int(record.get("branches") or 0) + 1)]
    return [rollout_id, *branches]


def _turns(record: TokenRecord) -> list[int]:
    lengths = [len(record["prompt"]), *(len(turn["observation"]) + len(turn["tokens"]) for turn in record["turns"])]
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def _versions(record: TokenRecord) -> list[int | None]:
    found: list[int | None] = [None] * len(record["prompt"])
    for turn in record["turns"]:
        drawn = [turn["version"]] * len(turn["tokens"])
        for segment in turn["segments"]:
            drawn[segment["start"] :] = [segment["version"]] * len(drawn[segment["start"] :])
        found += [*[None] * len(turn["observation"]), *drawn]
    return found


_tokenizer = lru_cache(maxsize=8)(load_tokenizer)
