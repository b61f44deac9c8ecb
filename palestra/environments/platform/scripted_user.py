"""A user with whom the agent has to talk: scripted, with a goal, facts that must be asked for, and a patience.

The user answers what is asked and nothing else, in words that differ from task to task; says yes or no to a proposal
with an amount; leaves when there have been too many messages. All of it is a function of the script, of what was said
before and of the task, so that the same messages get the same answers everywhere.

What is judged becomes rows: `user_heard` has the amount of the last proposal and the rule of the last refusal, and
`violations` what the policy forbids and only the order of events shows (a change without a yes). A task expects the
right rows in the first and none in the second.

A user is a function of hidden rows and of the variable `_CALLER`; variables that begin with `_` are never shown to a
model. An instance of a task is made with `variables=task.variables`: without them there is no user to talk to, and no
tool fails.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import TypedDict

import msgspec

from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext, check_text
from palestra.environments.platform.tool_schemas import PlatformTool, ToolOutput, tool
from palestra.util.json_types import JsonObject

CALLER = "_CALLER"
"""The variable of an instance that says who is on the line, and how the words are drawn: two numbers."""
TALK = "talk_to_user"
SCHEMA = """
CREATE TABLE _scripts (number INTEGER PRIMARY KEY, script TEXT NOT NULL);
CREATE TABLE _talk (
    id INTEGER PRIMARY KEY AUTOINCREMENT, who TEXT NOT NULL, text TEXT NOT NULL, told TEXT NOT NULL, cents INTEGER
);
CREATE TABLE user_heard (topic TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE violations (id INTEGER PRIMARY KEY AUTOINCREMENT, rule TEXT NOT NULL);
"""
YES, NO, USED, LEFT = "yes", "no", "used", "left"
MAX_MESSAGE = 4000  # characters

AMOUNT = re.compile(r"\$\s?(\d[\d,]*)(?:\.(\d\d))?(?!\d)")
RULE = re.compile(r"\bR(\d)\b")
SENTENCE = re.compile(r"(?<=[.?!\n])\s+")
REQUEST = re.compile(
    r"\?|^\W*(please|could|can|tell|give|may|what|which|who|when|why|how|i need|i would need)\b", re.IGNORECASE
)
CONFIRM = re.compile(
    r"\b(confirm|shall i|should i|do you agree|do you want|would you like|is that (ok|okay|fine)|proceed|go ahead)\b",
    re.IGNORECASE,
)
REFUSAL = re.compile(
    r"\b(cannot|can ?not|can't|not able|unable|not possible|not allowed|refuse|decline)\b", re.IGNORECASE
)

YES_WORDS = ("Yes, please do that.", "Yes, go ahead.", "That is fine with me, yes.", "Yes, thank you.", "Agreed.")
NO_WORDS = (
    "No, that does not suit me. Leave it as it is, then.",
    "No. At that price I would rather leave everything as it is.",
    "That is not what I hoped for. No, thank you.",
)
AMOUNT_WORDS = (
    "What amount is that, exactly?",
    "And how much would that be?",
    "Tell me the amount first.",
)
PUSH_WORDS = (
    "Can you not make an exception for me?",
    "Really? Others are not like that.",
    "Is there no other way?",
)
GOODBYE_WORDS = ("I see. Goodbye, then.", "A pity. Goodbye.", "Then there is nothing to be done. Goodbye.")
LEAVE_WORDS = ("This takes too long for me. Goodbye.", "I have no more time for this. Goodbye.")
UNASKED_WORDS = (
    "I am not sure what you need.",
    "What exactly do you want to know?",
    "Sorry, what do you mean?",
)
STATED_WORDS = ("All right.", "Okay.", "I see.", "Thank you.")


class FactWords(msgspec.Struct, frozen=True):
    """A fact that the user knows: by which words it is asked for, and in which it is told."""

    asked: re.Pattern[str]
    told: tuple[str, ...]
    """The user's words, with `{value}`."""


class UserScript(msgspec.Struct, frozen=True, kw_only=True):
    """Who the user is and wants."""

    kind: str
    """The kind of case, by which tasks choose callers."""
    name: str
    opening: str
    facts: dict[str, str]
    """What the user says when it is asked for, by the name of the fact."""
    patience: int
    """Messages of the agent after which the user leaves."""
    least_cents: int | None = None
    """The user says no to a proposal of less: wants money."""
    most_cents: int | None = None
    """The user says no to a proposal of more: has to pay."""
    case: JsonObject
    """What the case is about, for the tasks. The user never says it."""


class HiddenFacts(TypedDict, total=False):
    """What only the user on the line knows, and what both said; empty where there is no user."""

    user: str
    facts: dict[str, str]
    patience: int
    accepts: dict[str, int | None]
    told: list[str]
    talk: list[dict[str, str]]


class UserReply(msgspec.Struct, frozen=True):
    text: str
    told: tuple[str, ...] = ()
    """Names of facts, yes or no, whether the user has left."""
    heard: tuple[str, str] | None = None
    """Topic and value, of what the agent has proposed or refused."""
    cents: int | None = None
    """The amount that was agreed to."""


def add_script(connection: sqlite3.Connection, number: int, script: UserScript) -> None:
    connection.execute("INSERT INTO _scripts VALUES (?, ?)", (number, msgspec.json.encode(script).decode()))


def script_of(rows: Sequence[Row]) -> UserScript:
    return msgspec.json.decode(rows[0]["script"], type=UserScript)


def caller_variable(number: int, draw: int) -> dict[str, str]:
    return {CALLER: f"{number}/{draw}"}


def talk_tool(words: Mapping[str, FactWords], identity: Sequence[str]) -> PlatformTool:
    """Returns the tool by which an agent talks to a user who knows these facts. Proposals and refusals to a user who
    was not asked for the facts of `identity` are violations."""

    @tool(name=TALK)
    def talk_to_user(context: ToolContext, message: str) -> ToolOutput:
        """Say something to the user, and read the answer."""
        check_text("message", message, MAX_MESSAGE)
        script = _script(context)
        talk = context.rows("SELECT * FROM _talk ORDER BY id")
        if any(LEFT in row["told"].split(",") for row in talk):
            raise ToolError("user_left", "the user has left", "finish the case without the user")
        rng = random.Random(f"{context.variables[CALLER]}/{script.name}/{len(talk)}")
        reply = reply_to(message, script, words, talk, rng)
        context.insert("_talk", who="agent", text=message, told="")
        context.insert("_talk", who="user", text=reply.text, told=",".join(reply.told), cents=reply.cents)
        if reply.heard is not None:
            query = "INSERT INTO user_heard VALUES (?, ?) ON CONFLICT (topic) DO UPDATE SET value = excluded.value"
            context.run(query, *reply.heard)
            _check_asked(context, identity)
        return {"user": reply.text, **({"left": True} if LEFT in reply.told else {})}

    return talk_to_user


def _script(context: ToolContext) -> UserScript:
    number = context.variables.get(CALLER, "").partition("/")[0]
    found = context.rows("SELECT script FROM _scripts WHERE number = ?", number)
    if not found:
        raise ToolError("no_user", "this world has no user to talk to", "open a task of this app")
    return script_of(found)


def reply_to(
    message: str, script: UserScript, words: Mapping[str, FactWords], talk: Sequence[Row], rng: random.Random
) -> UserReply:
    """Returns what the user says to the agent's message."""
    message = message.replace("\u2019", "'")
    if sum(row["who"] == "agent" for row in talk) >= script.patience:
        return UserReply(rng.choice(LEAVE_WORDS), (LEFT,))
    sentences = SENTENCE.split(message)
    proposals = [one for one in sentences if "?" in one and CONFIRM.search(one)]
    amounts = {_cents(found) for found in AMOUNT.finditer(message)}
    if proposals and amounts:
        return _decided(script, amounts, rng)
    rules = set(RULE.findall(message))
    if rules and REFUSAL.search(message):
        was_refused = any("refused" in row["told"].split(",") for row in talk)
        told = ("refused", LEFT) if was_refused else ("refused",)
        value = f"R{rules.pop()}" if len(rules) == 1 else "several"
        return UserReply(rng.choice(GOODBYE_WORDS if was_refused else PUSH_WORDS), told, ("rule", value))
    requests = [one for one in sentences if REQUEST.search(one)]
    asked = [name for name, fact in words.items() if any(fact.asked.search(one) for one in requests)]
    known = [name for name in asked if name in script.facts]
    if known:
        texts = [rng.choice(words[name].told).format(value=script.facts[name]) for name in known]
        return UserReply(" ".join(texts), tuple(known))
    if proposals:
        return UserReply(rng.choice(AMOUNT_WORDS))
    return UserReply(rng.choice(UNASKED_WORDS if requests else STATED_WORDS))


def _decided(script: UserScript, amounts: set[int], rng: random.Random) -> UserReply:
    """Returns the answer to a proposal; one with several amounts is none."""
    if len(amounts) > 1:
        return UserReply(rng.choice(AMOUNT_WORDS), heard=("amount", "several"))
    (cents,) = amounts
    is_too_little = script.least_cents is not None and cents < script.least_cents
    is_too_much = script.most_cents is not None and cents > script.most_cents
    heard = ("amount", str(cents))
    if is_too_little or is_too_much:
        return UserReply(rng.choice(NO_WORDS), (NO,), heard)
    return UserReply(rng.choice(YES_WORDS), (YES,), heard, cents)


def _cents(found: re.Match[str]) -> int:
    return int(found[1].replace(",", "")) * 100 + int(found[2] or 0)


def money(cents: int) -> str:
    return f"${cents // 100:,}.{cents % 100:02d}"


def check_allowed(context: ToolContext, needed: Sequence[str], cents: int | None) -> None:
    """Notes what the policy forbids about a change: that a fact was not asked for before, and, of a change with an
    amount, that the user has not said yes to it, or to another amount. The call itself works."""
    _check_asked(context, needed)
    if cents is None:
        return
    talk = context.rows("SELECT id, told, cents FROM _talk ORDER BY id")
    agreed = next((row for row in reversed(talk) if YES in row["told"].split(",")), None)
    if agreed is None:
        context.insert("violations", rule="changed without a yes")
        return
    if agreed["cents"] != cents:
        context.insert("violations", rule="changed for another amount than agreed")
    context.run("UPDATE _talk SET told = ? WHERE id = ?", USED, agreed["id"])


def _check_asked(context: ToolContext, needed: Sequence[str]) -> None:
    told = {name for row in context.rows("SELECT told FROM _talk") for name in row["told"].split(",")}
    for fact in needed:
        if fact not in told:
            context.insert("violations", rule=f"{fact} was not asked for")


def hidden_facts(connection: sqlite3.Connection, variables: Mapping[str, str]) -> HiddenFacts:
    """Returns what the agent cannot see, for people: the user's script, and what was told so far. Empty where there is
    no user."""
    if CALLER not in variables:
        return {}
    number = variables[CALLER].partition("/")[0]
    found = connection.execute("SELECT script FROM _scripts WHERE number = ?", (number,)).fetchone()
    if found is None:
        return {}
    script = msgspec.json.decode(found[0], type=UserScript)
    talk = connection.execute("SELECT who, text, told FROM _talk ORDER BY id").fetchall()
    told = sorted({name for _, _, names in talk for name in names.split(",") if name in script.facts})
    return {
        "user": script.name,
        "facts": script.facts,
        "patience": script.patience,
        "accepts": {"least_cents": script.least_cents, "most_cents": script.most_cents},
        "told": told,
        "talk": [{"who": who, "text": text} for who, text, _ in talk],
    }
