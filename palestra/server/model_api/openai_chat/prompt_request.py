"""Makes the prompt request of a call: everything that its prompt depends on."""

from __future__ import annotations

from palestra.chat import ChatTokenizer
from palestra.chat.prompt_records import HistoryMode, PromptRequest, TokenPrefix
from palestra.server.core.owners.callers import Caller
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.model_resolver import SamplingTarget
from palestra.server.model_api.openai_chat.messages import check_depth, given_tokens, read_messages, read_tools
from palestra.server.model_api.openai_chat.pictures import SeenPictures
from palestra.server.model_api.openai_chat.schemas import ChatRequest, TokenizeRequest
from palestra.util.json_types import JsonObject

PREFIX = "required_prefix_token_ids"
CONTINUE = "continue_final_message"
KWARGS = "chat_template_kwargs"
SAID_ELSEWHERE = ("messages", "tools", "add_generation_prompt", CONTINUE)
"""Names that templates know and that are fields of the request itself."""


def prompt_request(
    caller: Caller,
    target: SamplingTarget,
    tokenizer: ChatTokenizer,
    call: ChatRequest | TokenizeRequest,
    seen: SeenPictures,
) -> PromptRequest:
    messages = read_messages(call.messages or [], seen.marks)
    roles = [message["role"] for message in messages]
    if isinstance(call, ChatRequest):
        read_tools(call.deferred_tools)  # they are checked; a message shows them
    continues = bool(call.continue_final_message)
    if continues and call.add_generation_prompt:
        raise invalid(CONTINUE, f"{CONTINUE} and add_generation_prompt are both true; send one of them")
    if continues and roles[-1] != "assistant":
        raise invalid(CONTINUE, f"{CONTINUE}: the last message has the role {roles[-1]}; it must be assistant")
    prefix = _prefix(call, roles)
    return PromptRequest(
        scope=_scope(caller, target),
        messages=tokenizer.shape.fit(messages) if prefix is None else messages,  # a prefix counts messages
        tools=read_tools(call.tools),
        template_kwargs=_template_kwargs(call),
        add_generation_prompt=call.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        history=None if call.history is None else HistoryMode(call.history),
        prefix=prefix,
    )


def _scope(caller: Caller, target: SamplingTarget) -> tuple[str, ...]:
    """Returns the scope of a conversation. It has the base model and not the alias, which may come to mean another base
    model, whose tokens mean something else. The weights of an episode change during it, and so do their names."""
    name = target.name if caller.attempt is None else ""
    return caller.owner, caller.who, name, target.worker.name


def _template_kwargs(call: ChatRequest | TokenizeRequest) -> JsonObject:
    given = call.chat_template_kwargs or {}
    for name in SAID_ELSEWHERE:
        if name in given:
            raise invalid(KWARGS, f"{KWARGS}: {name} is a field of the request itself; send it there")
    check_depth(given, KWARGS)
    return given


def _prefix(call: ChatRequest | TokenizeRequest, roles: list[str]) -> TokenPrefix | None:
    """Returns the prefix that the request names, or that of the last message that has its own ids."""
    brought = given_tokens(call.messages or [])
    ids = call.required_prefix_token_ids
    if ids is None:
        return (
            None
            if brought is None or call.history == HistoryMode.TEMPLATE
            else TokenPrefix(brought.ids, brought.place + 1)
        )
    if not ids:
        raise invalid(PREFIX, f"{PREFIX} is empty; leave it out, or send the ids up to the last answer")
    if "assistant" not in roles:
        raise invalid(
            PREFIX, f"{PREFIX} holds the ids up to the assistant's last message, but there is no such message"
        )
    if call.history == HistoryMode.TEMPLATE:
        raise invalid(
            "history", f"history: template renders the whole prompt; leave out {PREFIX}, or send history: exact"
        )
    return TokenPrefix(ids, len(roles) - roles[::-1].index("assistant"))
