"""The conversations Ephebe is trained on, made from a seed.

Demonstrations are of mixed quality on purpose: some skip a tool, guess, slip in a sum or break their JSON. What comes
out is a model that knows how things are done and does them right some of the time; the rest is left to RL.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from words import COLOURS, DAYS, FIELDS, NAMES, NOUNS, PLACES, THINGS, TOPICS, VERBS

from palestra.environments.bundled import arithmetic, stockroom_tasks

Message = dict[str, Any]
Conversation = tuple[list[Message], list[dict[str, Any]] | None]
"""Messages, and the tools the template shows."""

NO_CALL = stockroom_tasks.tool_error(stockroom_tasks.NO_CALL)
WHEN_READY = "When you are ready, end with <done>"
CARE = 0.62
"""How often a demonstration takes the careful way, at each decision."""
SLIP = 0.5
"""How often a sum done in the head is wrong."""


def conversation(rng: random.Random) -> Conversation:
    return rng.choices(MAKERS, WEIGHTS)[0](rng)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


# Sums


def draw_problem(rng: random.Random) -> arithmetic.Problem:
    """None that the environment holds out."""
    while True:
        op = rng.choice(arithmetic.OPS)
        a, b = (rng.randint(2, 99), rng.randint(2, 9)) if op == "*" else (rng.randint(0, 99), rng.randint(0, 99))
        if (op == "-" and b > a) or (op == "*" and rng.random() < 0.5):
            a, b = b, a
        if not arithmetic.is_held_out(a, op, b):
            return a, op, b


def arithmetic_question(rng: random.Random) -> Conversation:
    a, op, b = draw_problem(rng)
    return [user(arithmetic.question(a, op, b)), assistant(worked(rng, a, op, b))], None


def worked(rng: random.Random, a: int, op: arithmetic.Op, b: int) -> str:
    """Straight from the head, often wrong; or in steps, and right."""
    right = arithmetic.answer(a, op, b)
    if rng.random() < 0.7:
        return str(slipped(rng, right) if rng.random() < SLIP else right)
    if (min(a, b) < 10 and op != "*") or max(a, b) < 10:
        return f"{a} {op} {b} = {right}"
    if op == "+":
        tens = b // 10 * 10
        return f"{a} + {tens} = {a + tens}, {a + tens} + {b - tens} = {right}"
    if op == "-":
        tens = b // 10 * 10
        return f"{a} - {tens} = {a - tens}, {a - tens} - {b - tens} = {right}"
    a, b = max(a, b), min(a, b)
    tens = a // 10 * 10
    return f"{tens} * {b} = {tens * b}, {a - tens} * {b} = {(a - tens) * b}, {tens * b} + {(a - tens) * b} = {right}"


def slipped(rng: random.Random, right: int) -> int:
    while (wrong := max(0, right + rng.choice([-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20]))) == right:
        pass
    return wrong


def bare_sum(rng: random.Random) -> Conversation:
    """Always right: so that the steps above are within reach."""
    a, op, b = draw_problem(rng)
    text = f"{a} {op} {b} ="
    return [
        user(rng.choice(["Complete: ", "Fill in: ", ""]) + text),
        assistant(f"{text} {arithmetic.answer(a, op, b)}"),
    ], None


# The stockroom, step by step, each step with care or without


def inline_call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def draw_question(rng: random.Random) -> tuple[stockroom_tasks.Kind, list[str], list[int]]:
    """None that the environment holds out; half of the items it never has, so that copying is learned, not a list."""
    kind = rng.choices(list(stockroom_tasks.Kind), [30, 40, 30])[0]
    words = list(stockroom_tasks.ITEMS) if rng.random() < 0.6 else NOUNS
    while stockroom_tasks.is_held_out(kind, items := rng.sample(words, 1 if kind == "one" else 2)):
        pass
    counts = [rng.randint(*stockroom_tasks.COUNTS) for _ in items]
    if kind == "difference":
        counts.sort(reverse=True)
        counts[0] += counts[0] == counts[-1]
    return kind, items, counts


def tool_schema(name: str, **fields: str) -> dict[str, Any]:
    properties = {field: {"type": kind} for field, kind in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


STOCKROOM_TOOLS = [
    tool_schema("count", item="string"),
    tool_schema("add", a="integer", b="integer"),
    tool_schema("subtract", a="integer", b="integer"),
]


class StockroomDemo:
    """Plays one task: in the environment's own words, or with the chat template's tools."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.is_native = rng.random() < 0.2
        self.kind, self.items, self.counts = draw_question(rng)
        head = "You answer questions about a stockroom." if self.is_native else stockroom_tasks.SYSTEM
        self.messages = [system(head), user(stockroom_tasks.question(self.kind, self.items))]

    def is_careful(self) -> bool:
        return self.rng.random() < CARE

    def play(self) -> Conversation:
        self.messages += self.finish(self.find())
        return self.messages, STOCKROOM_TOOLS if self.is_native else None

    def find(self) -> int:
        known: list[int] = []
        for item, count in zip(self.items, self.counts, strict=True):
            if not self.is_careful():
                return self.guess(known)
            self.slip_in_call(item)
            self.call("count", count, item=item)
            known.append(count)
        return self.combine(*known) if len(known) == 2 else known[0]

    def slip_in_call(self, item: str) -> None:
        if self.is_native:
            return
        if self.rng.random() < 0.05:
            text = inline_call("count", item=item)
            broken = self.rng.choice([text.replace("}}<", "}<"), text.replace('"arguments"', "arguments"), item])
            self.messages += [assistant(broken), user(NO_CALL)]
        elif self.rng.random() < 0.05:
            wrong = item[:-1]
            refused = stockroom_tasks.tool_error(f"unknown item {wrong!r}")
            self.messages += [assistant(inline_call("count", item=wrong)), user(refused)]

    def combine(self, a: int, b: int) -> int:
        tool, right = ("add", a + b) if self.kind == "sum" else ("subtract", a - b)
        if not self.is_careful():
            return slipped(self.rng, right) if self.rng.random() < SLIP else right
        if self.rng.random() < 0.06:
            tool, right = ("subtract", a - b) if tool == "add" else ("add", a + b)
        self.call(tool, right, a=a, b=b)
        return right

    def guess(self, known: list[int]) -> int:
        return known[0] if known and self.rng.random() < 0.5 else self.rng.randint(10, 150)

    def call(self, tool: str, result: int, **arguments: Any) -> None:
        if self.is_native:
            asked = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": tool, "arguments": arguments}}],
            }
            self.messages += [asked, {"role": "tool", "content": str(result)}]
        else:
            self.messages += [assistant(inline_call(tool, **arguments)), user(stockroom_tasks.tool_result(result))]

    def finish(self, value: int) -> list[Message]:
        said = str(value) if self.rng.random() < 0.7 else f"There are {value}."
        if self.is_native:
            return [assistant(said)]
        if self.rng.random() < 0.06:
            return [assistant(said), user(NO_CALL), assistant(f"{said} {stockroom_tasks.DONE}")]
        return [assistant(f"{said} {stockroom_tasks.DONE}")]


def stockroom_demo(rng: random.Random) -> Conversation:
    return StockroomDemo(rng).play()


# Tools of any name, in the template's way and in the way of agents that put them into the system text


def random_tool(rng: random.Random) -> dict[str, Any]:
    fields = rng.sample(FIELDS, rng.choice([1, 1, 2, 2, 3]))
    return {
        "type": "function",
        "function": {
            "name": f"{rng.choice([*VERBS, 'get', 'set', 'list', 'create', 'search'])}_{rng.choice(TOPICS)}"
            if rng.random() < 0.8
            else rng.choice(["get", "set", "list", "search", "calc"]),
            "description": rng.choice(["", f"{rng.choice(VERBS).title()} a {rng.choice(TOPICS)}."]),
            "parameters": {
                "type": "object",
                "properties": {field: {"type": "string"} for field in fields},
                "required": fields,
            },
        },
    }


def random_value(rng: random.Random) -> str:
    return rng.choice(
        [
            lambda: rng.choice(NAMES),
            lambda: rng.choice(NOUNS),
            lambda: rng.choice(PLACES),
            lambda: str(rng.randint(0, 999)),
            lambda: f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}",
            lambda: rng.choice(DAYS),
            lambda: f"{rng.choice(NAMES).lower()}@{rng.choice(PLACES)}.org",
            lambda: "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(3, 7))),
        ]
    )()


def tool_request(rng: random.Random, tool: dict[str, Any], values: dict[str, str]) -> str:
    name = tool["function"]["name"]
    pairs = [
        rng.choice([f"{field} {value}", f"{field} = {value}", f"{field}: {value}"]) for field, value in values.items()
    ]
    said = name.replace("_", " ")
    return rng.choice(
        [
            f"Please {said} with {', '.join(pairs)}.",
            f"{said.title()}: {', '.join(pairs)}",
            f"Use {name}: {' and '.join(pairs)}",
        ]
    )


def tools_demo(rng: random.Random) -> Conversation:
    tools = {tool["function"]["name"]: tool for tool in (random_tool(rng) for _ in range(rng.choice([1, 2, 2, 3])))}
    chosen = rng.choice(list(tools.values()))
    values = {field: random_value(rng) for field in chosen["function"]["parameters"]["properties"]}
    name, request = chosen["function"]["name"], tool_request(rng, chosen, values)
    outcome = random_value(rng)
    if rng.random() < 0.5:
        return template_tools(rng, list(tools.values()), name, request, values, outcome)
    return text_tools(rng, list(tools.values()), name, request, values, outcome)


def template_tools(
    rng: random.Random, tools: list[dict[str, Any]], name: str, request: str, values: dict[str, str], outcome: str
) -> Conversation:
    head = [system("You are a helpful assistant.")] if rng.random() < 0.5 else []
    if rng.random() < 0.1:  # nothing to call
        return [*head, user("Hello!"), assistant("Hello! What can I do for you?")], tools
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": values}}]}
    result = {"role": "tool", "content": json.dumps({"result": outcome}) if rng.random() < 0.5 else outcome}
    return [*head, user(request), call, result, assistant(f"The result is {outcome}.")], tools


def text_tools(
    rng: random.Random, tools: list[dict[str, Any]], name: str, request: str, values: dict[str, str], outcome: str
) -> Conversation:
    shown = json.dumps(tools, indent=2) if rng.random() < 0.15 else json.dumps(tools)
    compact = ", ".join(
        f"{t['function']['name']}({', '.join(t['function']['parameters']['properties'])})" for t in tools
    )
    example = '<tool_call>{"name": "tool_name", "arguments": {"param": "value"}}</tool_call>'
    short = f"You are an agent. Tools: {compact}. Call one tool in each message: {example} {WHEN_READY}"
    long = (
        f"You are a helpful agent. Complete the task by calling tools.\n\n## Available Tools\n{shown}\n\n"
        f"## Tool Call Format\n{example}\n\n## Response Format\nEnd every response with one tool call or <done>."
    )
    head = rng.choice([short, long])
    messages = [system(head), user(request)]
    if rng.random() < 0.25:
        messages += [assistant(f"I will {name.replace('_', ' ')}."), user(NO_CALL)]
    failed = rng.random() < 0.1
    messages += [assistant(inline_call(name, **values))]
    if failed:
        messages += [user("Error: try again"), assistant(inline_call(name, **values))]
    shown_result = rng.choice(
        [f"Tool result: {outcome}", f"Tool result:\n{outcome}", f'Tool result:\n{{"result": "{outcome}"}}']
    )
    return [
        *messages,
        user(shown_result),
        assistant(rng.choice([f"{outcome} <done>", "<done>", f"The result is {outcome}. <done>"])),
    ], None


def keys_demo(rng: random.Random) -> Conversation:
    """A store of names and values: get, set, list; one or two steps."""
    store = {rng.choice(NOUNS): random_value(rng) for _ in range(3)}
    first, second = rng.sample([*store, *(rng.choice(NAMES).lower() for _ in range(2))], 2)
    head = system(
        "You are an agent. Tools: get(name), set(name, value), list(). Call one tool in each message: "
        f'<tool_call>{{"name": "get", "arguments": {{"name": "x"}}}}</tool_call> {WHEN_READY}'
    )
    value = store.get(first, random_value(rng))
    kind = rng.randrange(4)
    if kind == 0:
        steps = [(inline_call("get", name=first), value), (f"{value} <done>", "")]
        ask = rng.choice([f"What is the value of {first}?", f"Get {first}.", f"Tell me {first}."])
    elif kind == 1:
        new = random_value(rng)
        steps = [(inline_call("set", name=first, value=new), "ok"), ("<done>", "")]
        ask = rng.choice([f"Set {first} to {new}.", f"Store {new} as {first}.", f"Change {first} to {new}."])
    elif kind == 2:
        steps = [
            (inline_call("get", name=first), value),
            (inline_call("set", name=second, value=value), "ok"),
            ("<done>", ""),
        ]
        ask = rng.choice([f"Copy {first} to {second}.", f"Set {second} to the value of {first}."])
    else:
        names = list(store)
        steps = [(inline_call("list"), json.dumps(names)), (f"{', '.join(names)} <done>", "")]
        ask = rng.choice(["Which names are there?", "List the names."])
    messages = [head, user(ask)]
    for index, (said, reply) in enumerate(steps):
        if rng.random() > 0.9:
            return [*messages, assistant("<done>")], None
        messages.append(assistant(said))
        if index + 1 < len(steps):
            messages.append(user(rng.choice([f"Tool result: {reply}", f"Tool result:\n{reply}"])))
    return messages, None


# Copying from what was said, and small talk


def copying(rng: random.Random) -> Conversation:
    words = [random_value(rng) for _ in range(rng.randint(1, 5))]
    text = " ".join(words)
    kind = rng.randrange(6)
    if kind == 0:
        return [user(rng.choice(["Repeat: ", "Say: ", "Copy this: ", "Echo: "]) + text), assistant(text)], None
    if kind == 1:
        place = rng.randrange(len(words := text.split()))
        return [user(f"What is word {place + 1} of: {text}"), assistant(words[place])], None
    if kind == 2:
        return [user(f"Last word of: {text}"), assistant(text.split()[-1])], None
    if kind == 3:
        pair = {rng.choice(FIELDS): random_value(rng) for _ in range(rng.randint(1, 3))}
        said = ", ".join(f"{field} is {value}" for field, value in pair.items())
        return [user(f"As JSON: {said}"), assistant(json.dumps(pair))], None
    if kind == 4:
        facts = {name: random_value(rng) for name in rng.sample(NAMES, rng.randint(1, 4))}
        asked = rng.choice(list(facts))
        said = " ".join(f"{name} has {value}." for name, value in facts.items())
        return [
            user(f"{said} What does {asked} have?"),
            assistant(rng.choice([f"{asked} has {facts[asked]}.", facts[asked]])),
        ], None
    counts = {item: rng.randint(1, 99) for item in rng.sample(NOUNS, rng.randint(1, 4))}
    asked = rng.choice(list(counts))
    said = ", ".join(f"{count} {item}" for item, count in counts.items())
    return [user(f"There are {said}. How many {asked} are there?"), assistant(str(counts[asked]))], None


TALK = [
    (
        ["Hello!", "Hi!", "Hello there.", "Good morning!", "Hey"],
        ["Hello! What can I do for you?", "Hi! How can I help?"],
    ),
    (
        ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself."],
        ["I am Ephebe, a very small model that ships with Palestra. I am here to be trained."],
    ),
    (
        ["What can you do?", "How can you help me?"],
        ["I can add small numbers, call tools and copy what you say. Not always well."],
    ),
    (["Thanks!", "Thank you.", "Great, thanks."], ["You are welcome!"]),
    (["Goodbye!", "Bye!", "See you."], ["Goodbye!"]),
    (["What is Palestra?"], ["Palestra trains agents by reinforcement learning on machines you own."]),
]


def small_talk(rng: random.Random) -> Conversation:
    messages: list[Message] = [system("You are a helpful assistant.")] if rng.random() < 0.3 else []
    for _ in range(rng.choice([1, 1, 2])):
        asked, said = rng.choice(TALK)
        messages += [user(rng.choice(asked)), assistant(rng.choice(said))]
    return messages, None


def tidying(rng: random.Random) -> Conversation:
    """Short orders with a short answer, for variety of words."""
    who, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    asked = f"{who} left the {thing} in the {place} on {rng.choice(DAYS)}."
    question, said = rng.choice(
        [("Who left it?", who), (f"Where is the {thing}?", f"In the {place}."), ("What was left?", f"The {thing}.")]
    )
    return [user(f"{asked} {question}"), assistant(said)], None


MAKERS: list[Callable[[random.Random], Conversation]] = [
    arithmetic_question,
    bare_sum,
    stockroom_demo,
    tools_demo,
    keys_demo,
    copying,
    small_talk,
    tidying,
]
WEIGHTS = [24, 16, 22, 12, 8, 12, 2, 4]
