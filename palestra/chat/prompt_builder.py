"""Builds the prompt of a chat: cached ids for the history, and only new messages rendered."""

from __future__ import annotations

from dataclasses import replace

from palestra.chat.prompt_records import CachedTurn, HistoryMatch, HistoryMode, MatchingTurns, Prompt, PromptRequest
from palestra.chat.tokenizer import ChatTokenizer


def prompt_of(tokenizer: ChatTokenizer, request: PromptRequest, found: MatchingTurns) -> Prompt:
    prompt = _put_together(tokenizer, request, found)
    if prompt.beginning is None or prompt.begun:
        return prompt
    return replace(prompt, begun=len(tokenizer.encode_text(prompt.beginning.get("content") or "")))


def _put_together(tokenizer: ChatTokenizer, request: PromptRequest, found: MatchingTurns) -> Prompt:
    if request.history is HistoryMode.TEMPLATE and request.prefix is None:
        return _rendered(tokenizer, request, found)
    if found.turns:
        if found.length > request.end:
            earlier = _before(request, found.turns[-1]) if request.prefix is None else MatchingTurns()
            return _inside(tokenizer, request, found) or _put_together(tokenizer, request, earlier)
        match = HistoryMatch.CONTINUED if request.is_whole(found.length) else HistoryMatch.BRANCHED
        return _going_on(tokenizer, request, found.turns[-1].ids(), found, match)
    if request.prefix is not None:
        return _going_on(
            tokenizer, request, list(request.prefix.ids), MatchingTurns(request.prefix.length), HistoryMatch.GIVEN
        )
    return _prompt(
        request,
        found,
        _encoded(tokenizer, request),
        HistoryMatch.NEW if request.is_whole(0) else HistoryMatch.UNMATCHED,
    )


def _rendered(tokenizer: ChatTokenizer, request: PromptRequest, found: MatchingTurns) -> Prompt:
    """Continues from the last turn whose tokens the template still renders unchanged."""
    ids = _encoded(tokenizer, request)
    newest = turn = found.turns[-1] if found.turns else None
    cached_ids = [] if turn is None else turn.ids()
    while turn is not None and ids[: len(cached_ids)] != cached_ids:
        del cached_ids[len(cached_ids) - len(turn) :]
        turn = turn.parent
    if turn is None:
        return _prompt(request, found, ids, HistoryMatch.NEW if request.is_whole(0) else HistoryMatch.UNMATCHED)
    is_whole = turn is newest and request.is_whole(found.length)
    return _prompt(
        request, found, ids, HistoryMatch.CONTINUED if is_whole else HistoryMatch.BRANCHED, turn, len(cached_ids)
    )


def _inside(tokenizer: ChatTokenizer, request: PromptRequest, found: MatchingTurns) -> Prompt | None:
    """Continues within the final message, which was sampled here. None: a stop string has cut off a part of what was
    sampled."""
    turn = found.turns[-1]
    ids, begun = turn.ids(), turn.begun + len(turn.sampled)
    if turn.is_open:
        return _prompt(request, found, ids, HistoryMatch.CONTINUED, turn, len(ids), drift=turn.drift, begun=begun)
    if not turn.sampled or turn.sampled[-1] not in tokenizer.stop_ids:
        return None
    # Without its end it is no longer the turn that was sampled.
    start = len(ids) - len(turn)
    return _prompt(
        request, found, ids[:-1], HistoryMatch.CONTINUED, turn.parent, start, drift=turn.drift, begun=begun - 1
    )


def _before(request: PromptRequest, turn: CachedTurn) -> MatchingTurns:
    """Returns the last turn before this one that the messages still match."""
    lengths = {name: length for length, name in enumerate(request.names)}
    parent = turn.parent
    while parent is not None and parent.name not in lengths:
        parent = parent.parent
    return MatchingTurns() if parent is None else MatchingTurns(lengths[parent.name], [parent])


def _going_on(
    tokenizer: ChatTokenizer, request: PromptRequest, ids: list[int], found: MatchingTurns, match: HistoryMatch
) -> Prompt:
    parent, start = found.turns[-1] if found.turns else None, len(ids)
    if found.length > request.end:  # a prefix in which the answer continues
        return _prompt(request, found, ids[:-1] if ids[-1] in tokenizer.stop_ids else ids, match)
    following = tokenizer.following(
        request.messages[found.length - 1],
        request.messages[found.length :],
        request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.template_kwargs,
        max_tokens=request.max_tokens,
        thought=parent is not None and bool(parent.thoughts),
        opened=parent is not None and not parent.begun and not parent.drift,
    )
    is_as_written = bool(ids) and ids[-1] == following.end
    if not is_as_written and not (ids and ids[-1] in following.other_ends):
        ids.append(following.end)  # the turn was ended by its length or a stop string, so its end token was not sampled
        is_as_written = True
    drift = parent is not None and (parent.drift or following.is_rewritten or not is_as_written)
    return _prompt(request, found, [*ids, *following.tokens], match, parent, start, drift=drift)


def _encoded(tokenizer: ChatTokenizer, request: PromptRequest) -> list[int]:
    return tokenizer.encode_chat(
        request.messages,
        request.tools,
        request.add_generation_prompt,
        request.continue_final_message,
        template_kwargs=request.template_kwargs,
        max_tokens=request.max_tokens,
    )


def _prompt(
    request: PromptRequest,
    found: MatchingTurns,
    ids: list[int],
    match: HistoryMatch,
    parent: CachedTurn | None = None,
    start: int = 0,
    *,
    drift: bool = False,
    begun: int = 0,
) -> Prompt:
    """`start`: how many of the ids are the parent's."""
    known, length = (found.turns[-1].thoughts, found.length) if found.turns else ({}, 0)
    return Prompt(
        ids=ids,
        parent=parent,
        read=ids if parent is None else ids[start:],
        messages=request.messages[_known(request, found, parent) :],
        match=match,
        owner=request.scope[0],
        name=request.names[request.end],
        thoughts={**known, **{place: text for place, text in request.thoughts.items() if place >= length}},
        length=request.end,
        beginning=request.messages[-1] if request.continue_final_message else None,
        begun=begun,
        candidates=len(found.turns),
        drift=drift,
    )


def _known(request: PromptRequest, found: MatchingTurns, parent: CachedTurn | None) -> int:
    """Returns how many of the messages the parent has."""
    if parent is None:
        return 0
    if found.turns and parent is found.turns[-1]:
        return found.length
    return request.names.index(parent.name) if parent.name in request.names else 0
