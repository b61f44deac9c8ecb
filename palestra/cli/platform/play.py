"""A person plays in place of the agent: lines become tool calls, and the end brings a verdict."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Iterator

import msgspec
import rich_click as click

from palestra.cli.output import print_json
from palestra.environments.platform import (
    Instance,
    PlatformTask,
    PlatformTool,
    ToolResult,
    make_task,
    verify,
)
from palestra.environments.platform.expectations import change_text
from palestra.environments.platform.tasks import draw_task_key
from palestra.util.json_types import JsonObject
from palestra.util.safe_text import safe_text

HELP = """a tool      put value=3   or   send_message to=["ann@x.org"] subject="a few words"   or   put {"value": 3}
tools       what can be called
task        what was asked for
diff        what has changed so far
reset       from the beginning
done        the end, with an answer where one is asked for: done 42
quit        the end, without a verdict"""
COMMANDS = ("tools", "task", "diff", "reset", "done", "quit", "help")


def play_task(key: str, *, as_json: bool) -> None:
    task = make_task(key if "-" in key else draw_task_key(key))
    game = HumanPlay(task, is_silent=as_json)
    try:
        game.play(lines(is_silent=as_json))
        if as_json:
            print_json(game.facts())
    finally:
        game.instance.close()


def lines(*, is_silent: bool) -> Iterator[str]:
    """The lines that were typed; the end of the input means done."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            yield click.prompt("", prompt_suffix="> ", default="", show_default=False, err=is_silent)
        except click.Abort:
            return


class HumanPlay:
    def __init__(self, task: PlatformTask, *, is_silent: bool) -> None:
        self.task, self._is_silent = task, is_silent
        self.instance = Instance(task.seed, variables=task.variables)
        self.calls: list[JsonObject] = []
        self.verdict: JsonObject | None = None

    def play(self, lines: Iterator[str]) -> None:
        self._show_task()
        for line in lines:
            if line.strip() and self._is_over(line.strip()):
                return
        self._judge(None)

    def facts(self) -> JsonObject:
        changes = msgspec.to_builtins(self.instance.changes())
        summary_fields = {
            "key": str(self.task.key),
            "prompt": self.task.prompt,
            "calls": self.calls,
            "changes": changes,
        }
        return {**summary_fields, "verdict": self.verdict}

    def _is_over(self, line: str) -> bool:
        word, _, rest = line.removeprefix("/").partition(" ")
        is_tool = not line.startswith("/") and self.task.app.tool(word) is not None
        match word if word in COMMANDS and not is_tool else "":
            case "done":
                self._judge(rest.strip() or None)
                return True
            case "quit":
                return True
            case "tools":
                self._say("\n".join(f"{tool.usage}  {tool.description}" for tool in self.task.app.tools))
            case "task":
                self._show_task()
            case "diff":
                self._show_diff()
            case "reset":
                self.instance.reset()
                self.calls.clear()
                self._say("as it was in the beginning")
            case "help":
                self._say(HELP)
            case _:
                self._call(word, rest)
        return False

    def _call(self, name: str, rest: str) -> None:
        tool = self.task.app.tool(name)
        try:
            arguments = {} if tool is None else arguments_of(tool, rest)
        except ValueError as e:
            self._say(f"this line cannot be read: {e}")
            return
        result = self.instance.call(name, arguments)
        self.calls.append({"tool": name, "arguments": arguments, "is_error": result.is_error, "result": result.text})
        self._say(shown(result) + ("" if tool else "\nto see what can be typed: help"))

    def _judge(self, answer: str | None) -> None:
        verdict = verify(self.task, self.instance, answer)
        self.verdict = {"score": verdict.score, "answer": answer, "met": verdict.met, "failed": verdict.failed}
        self._show_diff()
        self._say("\n".join([f"score {verdict.score}", *(f"  {reason}" for reason in verdict.failed)]))

    def _show_task(self) -> None:
        today, who = (self.task.variables[name] for name in ("CURRENT_DATE", "LOGGED_IN_NAME"))
        self._say(f"{self.task.key} ({self.task.app.title}; today is {today}, you are {who})\n{self.task.prompt}")

    def _show_diff(self) -> None:
        changes = self.instance.changes()
        self._say("\n".join(f"  {change.kind}: {change_text(change)}" for change in changes) or "  nothing changed")

    def _say(self, text: str) -> None:
        if not self._is_silent:
            click.echo(safe_text(text))


def arguments_of(tool: PlatformTool, text: str) -> object:
    """`name=value …` or one JSON object. A value is text where the tool takes text, JSON elsewhere."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as e:
            raise ValueError(str(e)) from None
    found: JsonObject = {}
    for word in split(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not name=value; {tool.usage}")
        found[name] = value_of(tool.parameters["properties"].get(name, {}), value)
    return found


def split(text: str) -> list[str]:
    """Splits a line into words as a shell does, but keeps text in brackets unchanged: to=["a b", "c"]."""
    texts: list[str] = []
    rest = text.strip()
    while rest:
        name, equals, value = rest.partition("=")
        if equals and name.isidentifier() and value[:1] == "[":
            length = list_length(value)
            texts.append(f"{name}={value[:length]}")
            rest = value[length:].strip()
        else:
            source = io.StringIO(rest)
            lexer = shlex.shlex(source, posix=True)
            lexer.whitespace_split, lexer.commenters = True, ""
            texts.append(lexer.get_token() or "")
            rest = source.read().strip()
    return texts


def list_length(text: str) -> int:
    """Number of characters of the JSON list at the beginning of the text."""
    for end in (n + 1 for n, char in enumerate(text) if char == "]"):
        try:
            msgspec.json.decode(text[:end])
        except msgspec.DecodeError:
            continue
        return end
    raise ValueError(f'{text!r} is not a JSON list such as ["a", "b"]')


def value_of(schema: JsonObject, text: str) -> object:
    if schema.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text  # the tool reports what is wrong with it


def shown(result: ToolResult) -> str:
    """A value in a form that is easy to read."""
    return msgspec.json.format(result.text, indent=2)
