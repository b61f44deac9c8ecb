"""`palestra chat`: arguments, and what is opened for a conversation."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.options import server_options
from palestra.cli.output import FAILED, USAGE, fail, needs_extra, one_line_errors
from palestra.cli.run.common import runs_option
from palestra.net.chat_apis import API_NAMES, ApiName

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from palestra.endpoints.chat_environment import ChatEnvironment
    from palestra.endpoints.conversation import Conversation
    from palestra.endpoints.models import ModelPlace

ENV_TIMEOUT_S = 600.0
LOCAL = "http://127.0.0.1:8000"


@click.command()
@click.argument("model", metavar="MODEL|RUN|tinker://…")
@click.argument("message", required=False)
@click.option("--beside", metavar="OTHER", help="A second model, which gets the same messages; shown side by side.")
@click.option("--env", "environment", metavar="NAME", help="Environment whose system prompt and tools are used.")
@click.option("--task", metavar="ID", help="Task of the environment. [a random held-out task]")
@click.option("--system", metavar="TEXT", help="System prompt. [the environment's, or none]")
@click.option("--logprobs", is_flag=True, help="Show how probable each token was: by colour, or as a list.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=1.0, show_default=True, help="0 is greedy.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Maximum tokens of an answer. [what the context holds]")
@click.option("--seed", type=int, help="The same seed and conversation give the same answer, where it is supported.")
@server_options(
    help="Any model endpoint. [one at TINKER_BASE_URL or port 8000 that has MODEL, or one is started]",
    default=None,
    envvar=None,
    key_envvar="OPENAI_API_KEY",
    old="--url",
)
@click.option(
    "--api",
    type=click.Choice(API_NAMES),
    default="auto",
    show_default=True,
    help="OpenAI's chat completions or Anthropic's Messages.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="For a server to be started."
)
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Answer one MESSAGE, or stdin, and print the result as JSON.")
def chat(
    model: str,
    message: str | None,
    beside: str | None,
    environment: str | None,
    task: str | None,
    system: str | None,
    logprobs: bool,
    temperature: float,
    max_tokens: int | None,
    seed: int | None,
    server: str | None,
    key: str | None,
    api: ApiName,
    device: str,
    root: Path,
    as_json: bool,
) -> None:
    """Talk to a model in the terminal.

    MODEL is a model at the server, a model folder, a Hugging Face id, or the bundled ephebe; RUN, RUN@STEP, RUN@best
    or RUN@last is a checkpoint of a training run (RUN: the one that it has selected). With MESSAGE, or a message on
    stdin, it is answered once. In a conversation, /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the
    conversation.
    """
    if task is not None and environment is None:
        raise fail("--task is a task of an environment; name it with --env", USAGE)
    text = _given_text(message, as_json)
    if text == "" and environment is None:
        raise fail("there is no message; give one after the model, or on stdin", USAGE)
    options: dict[str, object] = {"temperature": temperature}
    options |= {name: value for name, value in (("max_tokens", max_tokens), ("seed", seed)) if value is not None}
    options |= {"logprobs": True} if logprobs else {}
    names = [model] if beside is None else [model, beside]
    with needs_extra("train"):
        from palestra.endpoints.models import ModelPlace
    place = ModelPlace(server=server, api=api, key=key, runs=root, device=device, may_run=_running_server())
    with _errors(), _conversations(names, place, environment, task, system, options) as (portal, conversations):
        from palestra.cli.chat.loop import ChatLoop

        loop = ChatLoop(portal, names, conversations, logprobs)
        if text is None:
            loop.run()
        elif as_json:
            loop.once_as_json(text)
        else:
            loop.once(text)


def _given_text(message: str | None, as_json: bool) -> str | None:
    """The one message to answer; None if there is a person to talk to."""
    if message is not None:
        return message
    return None if sys.stdin.isatty() and not as_json else sys.stdin.read().strip()


def _running_server() -> str:
    return os.environ.get("TINKER_BASE_URL") or LOCAL


@contextmanager
def _errors() -> Iterator[None]:
    with needs_extra("train"):
        from palestra.checkpoints import CheckpointError
        from palestra.environments import EnvironmentFailure, TaskFileError, UnknownEnvironment
        from palestra.net.chat_apis.errors import EndpointError
        from palestra.rollouts.policy_sampler import PolicyError
    with (
        one_line_errors(EndpointError, CheckpointError, PolicyError, UnknownEnvironment),
        one_line_errors(TaskFileError, EnvironmentFailure, code=FAILED),
    ):
        yield


@contextmanager
def _conversations(
    names: Sequence[str],
    place: ModelPlace,
    environment: str | None,
    task: str | None,
    system: str | None,
    options: dict[str, object],
) -> Iterator[tuple[BlockingPortal, list[Conversation]]]:
    """Opens an environment for each model, and then the models, which takes longer."""
    from anyio.from_thread import start_blocking_portal

    from palestra.endpoints.conversation import Conversation
    from palestra.endpoints.models import open_models

    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        own = stack.enter_context(_environments(portal, environment, task, len(names)))
        state = Path(stack.enter_context(TemporaryDirectory(prefix="palestra-chat-")))
        opening = open_models(names, place, state, state / "server.log", _note)
        models = stack.enter_context(portal.wrap_async_context_manager(opening))
        if "logprobs" in options and not all(model.api.has_logprobs for model in models):
            raise fail("Anthropic's API has no log-probabilities; leave --logprobs out", USAGE)
        yield portal, [Conversation(model, options, system, env) for model, env in zip(models, own, strict=True)]


@contextmanager
def _environments(
    portal: BlockingPortal, name: str | None, task_id: str | None, count: int
) -> Iterator[list[ChatEnvironment | None]]:
    if name is None:
        yield [None] * count
        return
    from palestra.cli.env import find_task
    from palestra.config.environment_entries import EnvironmentEntry
    from palestra.endpoints.chat_environment import open_environment
    from palestra.environments import EnvironmentSet

    entry = EnvironmentEntry(name=name)
    with EnvironmentSet([entry], env_threads=count, env_timeout_s=ENV_TIMEOUT_S) as environments, ExitStack() as stack:
        task = find_task(environments, name, task_id, with_eval=True)
        _note(f"task {task.id} of {name}")
        yield [
            stack.enter_context(portal.wrap_async_context_manager(open_environment(environments, task)))
            for _ in range(count)
        ]


def _note(text: str) -> None:
    click.echo(text, err=True)
