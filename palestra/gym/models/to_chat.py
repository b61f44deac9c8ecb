"""A Responses request as a chat request.

Owns: which fields have another name there. Never touches: items and tools (`palestra.chat.responses_input`), settings
of a server, the network.
"""

from palestra.chat.responses_input import (
    ChatDialect,
    ItemError,
    chat_format,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from palestra.gym.errors import BadRequest
from palestra.util.json_types import JsonMapping, JsonObject

SAME = ("metadata", "service_tier", "store", "temperature", "top_p", "user")
"""Fields that both APIs have in the same words."""


def chat_request(params: JsonMapping, *, with_ids: bool) -> JsonObject:
    """`params` as `requests.checked` gives them; the model's name is the caller's to add. Raises BadRequest."""
    try:
        found = chat_messages(params["input"], params.get("instructions"), ChatDialect.PLAIN, with_ids=with_ids)
        said = _tools(params)
    except ItemError as e:
        place = e.place if e.field is None else (*e.place, e.field)
        raise BadRequest(place, str(e), given=e.given) from None
    body: JsonObject = {"messages": [one.message for one in found]}
    body |= {key: params[key] for key in SAME if key in params}
    if "max_output_tokens" in params:
        body["max_tokens"] = params["max_output_tokens"]
    if params.get("top_logprobs"):
        body |= {"logprobs": True, "top_logprobs": params["top_logprobs"]}
    effort = params.get("reasoning", {}).get("effort")
    if effort is not None:
        body["reasoning_effort"] = effort
    asked = chat_format(params.get("text", {}).get("format"))
    return body | said | ({} if asked is None else {"response_format": asked})


def _tools(params: JsonMapping) -> JsonObject:
    tools, choice = params.get("tools"), params.get("tool_choice")
    if not tools:
        if choice == "required":
            raise ItemError(("tool_choice",), "tool_choice='required' requires at least one tool")
        return {}
    chosen: JsonObject = {"tools": chat_tools(tools, without=["strict"])}
    nameless = next((at for at, one in enumerate(chosen["tools"]) if "name" not in one["function"]), None)
    if nameless is not None:
        raise ItemError(("tools", nameless), "a function needs a name")
    if choice is not None:
        chosen["tool_choice"] = chat_tool_choice(choice, ChatDialect.PLAIN)
    if "parallel_tool_calls" in params:
        chosen["parallel_tool_calls"] = params["parallel_tool_calls"]
    return chosen
