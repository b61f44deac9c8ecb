"""The conversation in the terminal: lines that a person types, and the commands among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from rich.console import Console

from palestra.cli.chat.display import open_display
from palestra.cli.chat.exchange import exchange
from palestra.cli.output import print_json
from palestra.endpoints.conversation import ChatEvent, Conversation, EpisodeEnd
from palestra.environments import EnvironmentFailure
from palestra.net.chat_apis import StreamedAnswer
from palestra.net.chat_apis.errors import EndpointError
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

PROMPT, MORE = "> ", ". "
COMMANDS = {
    "/reset": "begin anew; an environment does, too",
    "/undo": "take back the last message and what came after it",
    "/save FILE": "append the conversation to FILE as a line of JSON, as SFT reads it",
    "/help": "this list",
    "/quit": "end; so does Ctrl-D",
}
HELP = "\n".join(
    [
        *(f"{name:<11} {what}" for name, what in COMMANDS.items()),
        "Ctrl-C stops an answer. A line that ends with \\ goes on in the next one; one that begins with // is text.",
        "Lines that are pasted together are one message.",
    ]
)
TASK_HELP = "an empty line asks the task's own question, and plays it to its end"


class ChatLoop:
    def __init__(
        self, portal: BlockingPortal, names: Sequence[str], conversations: Sequence[Conversation], with_logprobs: bool
    ) -> None:
        self._portal, self._names, self._conversations = portal, names, conversations
        self._with_logprobs = with_logprobs
        self._console = Console(highlight=False, markup=False)

    def once(self, text: str) -> None:
        """Answers one message, for people to read. Raises what went wrong."""
        display = open_display(self._names, self._console, with_logprobs=self._with_logprobs)
        with closing(display):
            exchange(self._portal, self._conversations, text or None, display.show)

    def once_as_json(self, text: str) -> None:
        """Answers one message, for programs to read. Raises what went wrong."""
        before = [len(one.messages) for one in self._conversations]
        events: list[list[ChatEvent]] = [[] for _ in self._names]

        def keep(index: int, event: ChatEvent | None) -> None:
            if event is not None:
                events[index].append(event)

        exchange(self._portal, self._conversations, text or None, keep)
        found = [
            _facts(name, conversation.messages[begin:], happened, self._with_logprobs)
            for name, conversation, begin, happened in zip(
                self._names, self._conversations, before, events, strict=True
            )
        ]
        print_json(found[0] if len(found) == 1 else found)

    def run(self) -> None:
        """Talks until the person ends it."""
        import readline  # `input` edits lines and remembers them with it

        readline.parse_and_bind("set enable-bracketed-paste on")  # several lines that are pasted are one message
        has_task = bool(self._conversations[0].question)
        click.echo(f"{' and '.join(self._names)}; /help lists the commands{f', {TASK_HELP}' if has_task else ''}")
        while (line := _read_line()) is not None:
            if line.startswith("/") and not line.startswith("//"):
                if not self._command(line.strip()):
                    return
            elif line.strip() or has_task:
                self._say(line.removeprefix("/") if line.startswith("//") else line.strip())

    def _say(self, text: str) -> None:
        try:
            self.once(text)
        except KeyboardInterrupt:
            click.echo("\n[stopped]")
        except (EndpointError, EnvironmentFailure) as error:
            click.echo(f"error: {error}", err=True)

    def _command(self, line: str) -> bool:
        """Returns whether the conversation goes on."""
        name, _, rest = line.partition(" ")
        match name:
            case "/quit":
                return False
            case "/help":
                click.echo(HELP)
            case "/reset":
                for one in self._conversations:
                    self._portal.call(one.reset)
                click.echo("[a new conversation]")
            case "/undo":
                undone = [one.undo() for one in self._conversations]
                click.echo("[taken back]" if any(undone) else "[there is nothing to take back]")
            case "/save":
                self._save(rest.strip())
            case _:
                known = [command.partition(" ")[0] for command in COMMANDS]
                click.echo(f"error: unknown command {name}; {did_you_mean(name, known)}", err=True)
        return True

    def _save(self, file: str) -> None:
        if not file:
            click.echo("error: name a file: /save FILE", err=True)
            return
        lines = [
            json.dumps({"model": name, "messages": conversation.messages}, ensure_ascii=False)
            for name, conversation in zip(self._names, self._conversations, strict=True)
        ]
        try:
            with Path(file).expanduser().open("a", encoding="utf-8") as out:
                out.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            click.echo(f"error: {file} cannot be written ({error.strerror})", err=True)
        else:
            click.echo(f"[saved to {file}]")


def _read_line() -> str | None:
    """A line, or several that end with a backslash; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input(MORE if lines else PROMPT)
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo("\n[Ctrl-D or /quit ends the conversation]")
            lines.clear()
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line.removesuffix("\\"))


def _facts(name: str, messages: Sequence[JsonObject], events: Sequence[ChatEvent], with_logprobs: bool) -> JsonObject:
    answers = [one for one in events if isinstance(one, StreamedAnswer)]
    facts: JsonObject = {
        "model": name,
        "text": answers[-1].text,
        "messages": list(messages),
        "stop": answers[-1].stop,
        "prompt_tokens": sum(one.prompt_tokens for one in answers),
        "sampled_tokens": sum(one.sampled_tokens for one in answers),
    }
    if with_logprobs:
        tokens = [token for one in answers for token in one.tokens]
        facts["logprobs"] = [{"token": one.token, "logprob": one.logprob} for one in tokens]
    for event in events:
        if isinstance(event, EpisodeEnd):
            facts["reward"] = event.reward
    return facts
