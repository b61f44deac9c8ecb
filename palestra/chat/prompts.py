"""A chat's prompt: the ids held for what was said before, and only what is new rendered.

Owns: how a prompt is put together. Never touches: who holds the ids, models, HTTP.
"""

from __future__ import annotations

from dataclasses import replace

from palestra.chat.tokenizer import ChatTokenizer
from palestra.chat.turns import Ask, Found, Held, History, Match, Prompt


def prompt_of(tokenizer: ChatTokenizer, ask: Ask, found: Found) -> Prompt:
    prompt = _put_together(tokenizer, ask, found)
    if prompt.beginning is None or prompt.begun:
        return prompt
    return replace(prompt, begun=len(tokenizer.encode_text(prompt.beginning.get("content") or "")))


def _put_together(tokenizer: ChatTokenizer, ask: Ask, found: Found) -> Prompt:
    if ask.history is History.TEMPLATE and ask.prefix is None:
        return _rendered(tokenizer, ask, found)
    if found.turns:
        if found.length > ask.end:
            earlier = _before(ask, found.turns[-1]) if ask.prefix is None else Found()
            return _inside(tokenizer, ask, found) or _put_together(tokenizer, ask, earlier)
        match = Match.CONTINUED if ask.is_whole(found.length) else Match.BRANCHED
        return _going_on(tokenizer, ask, found.turns[-1].ids(), found, match)
    if ask.prefix is not None:
        return _going_on(tokenizer, ask, list(ask.prefix.ids), Found(ask.prefix.length), Match.GIVEN)
    return _prompt(ask, found, _encoded(tokenizer, ask), Match.NEW if ask.is_whole(0) else Match.UNMATCHED)


def _rendered(tokenizer: ChatTokenizer, ask: Ask, found: Found) -> Prompt:
    """Goes on from the last turn that is still there token for token."""
    ids = _encoded(tokenizer, ask)
    newest = turn = found.turns[-1] if found.turns else None
    held = [] if turn is None else turn.ids()
    while turn is not None and ids[: len(held)] != held:
        del held[len(held) - len(turn) :]
        turn = turn.parent
    if turn is None:
        return _prompt(ask, found, ids, Match.NEW if ask.is_whole(0) else Match.UNMATCHED)
    is_whole = turn is newest and ask.is_whole(found.length)
    return _prompt(ask, found, ids, Match.CONTINUED if is_whole else Match.BRANCHED, turn, len(held))


def _inside(tokenizer: ChatTokenizer, ask: Ask, found: Found) -> Prompt | None:
    """In the final message, which was sampled here. None: a stop string has cut off some of what was sampled."""
    turn = found.turns[-1]
    ids, begun = turn.ids(), turn.begun + len(turn.sampled)
    if turn.is_open:
        return _prompt(ask, found, ids, Match.CONTINUED, turn, len(ids), drift=turn.drift, begun=begun)
    if not turn.sampled or turn.sampled[-1] not in tokenizer.stop_ids:
        return None
    # Without its end it is no longer the turn that was sampled.
    start = len(ids) - len(turn)
    return _prompt(ask, found, ids[:-1], Match.CONTINUED, turn.parent, start, drift=turn.drift, begun=begun - 1)


def _before(ask: Ask, turn: Held) -> Found:
    """The last turn before one that the messages still mean."""
    lengths = {name: length for length, name in enumerate(ask.names)}
    parent = turn.parent
    while parent is not None and parent.name not in lengths:
        parent = parent.parent
    return Found() if parent is None else Found(lengths[parent.name], [parent])


def _going_on(tokenizer: ChatTokenizer, ask: Ask, ids: list[int], found: Found, match: Match) -> Prompt:
    parent, start = found.turns[-1] if found.turns else None, len(ids)
    if found.length > ask.end:  # a prefix that the answer goes on in
        return _prompt(ask, found, ids[:-1] if ids[-1] in tokenizer.stop_ids else ids, match)
    following = tokenizer.following(
        ask.messages[found.length - 1],
        ask.messages[found.length :],
        ask.tools,
        add_generation_prompt=ask.add_generation_prompt,
        continue_final_message=ask.continue_final_message,
        template_kwargs=ask.template_kwargs,
        max_tokens=ask.max_tokens,
        thought=parent is not None and bool(parent.thoughts),
        opened=parent is not None and not parent.begun and not parent.drift,
    )
    if not ids or ids[-1] != following.end:
        ids.append(following.end)  # its length or a stop string ended the turn: nobody drew its end
    drift = parent is not None and (parent.drift or following.is_rewritten)
    return _prompt(ask, found, [*ids, *following.tokens], match, parent, start, drift=drift)


def _encoded(tokenizer: ChatTokenizer, ask: Ask) -> list[int]:
    return tokenizer.encode_chat(
        ask.messages,
        ask.tools,
        ask.add_generation_prompt,
        ask.continue_final_message,
        template_kwargs=ask.template_kwargs,
        max_tokens=ask.max_tokens,
    )


def _prompt(
    ask: Ask,
    found: Found,
    ids: list[int],
    match: Match,
    parent: Held | None = None,
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
        messages=ask.messages[_known(ask, found, parent) :],
        match=match,
        owner=ask.scope[0],
        name=ask.names[ask.end],
        thoughts={**known, **{place: text for place, text in ask.thoughts.items() if place >= length}},
        length=ask.end,
        beginning=ask.messages[-1] if ask.continue_final_message else None,
        begun=begun,
        candidates=len(found.turns),
        drift=drift,
    )


def _known(ask: Ask, found: Found, parent: Held | None) -> int:
    """How many of the messages the parent has."""
    if parent is None:
        return 0
    if found.turns and parent is found.turns[-1]:
        return found.length
    return ask.names.index(parent.name) if parent.name in ask.names else 0
