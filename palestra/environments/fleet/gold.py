"""Gold conversations: the platform's own solutions in the words of `fleet_task`, to warm a model up with.

    python -m palestra.environments.fleet.gold "platform:keys?difficulty=0b,0c&count=2000" gold.jsonl --compact

`kind: sft` reads such files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from palestra.environments.fleet.env import FleetTaskEnv
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.event_loop import run_sync
from palestra.environments.fleet.platform_tasks import PLATFORM, PlatformTasks, gold_messages
from palestra.environments.fleet.prompts import PromptStyle
from palestra.environments.platform import TaskKey
from palestra.util.file_errors import file_error_text

MAX_TURNS = 100  # enough for every solution


def gold_lines(tasks_file: str, style: PromptStyle = PromptStyle.FULL) -> list[str]:
    """Returns a line of `messages` for each task of a `platform:…`."""
    found = run_sync(_conversations(PlatformTasks.parse(tasks_file).keys("train"), style))
    return [json.dumps({"messages": messages}, ensure_ascii=False) for messages in found]


async def gold_conversation(task_key: str, style: PromptStyle = PromptStyle.FULL) -> list[dict[str, str]]:
    """Returns a conversation with one call in each message, then `<done>`. Raises BackendError if the solution gets
    less than 1."""
    env = FleetTaskEnv({"tasks_file": PLATFORM, "prompt_style": style}, {"task_key": task_key, "max_turns": MAX_TURNS})
    try:
        await env.init_async([])
        steps = [await env.step_async(message) for message in gold_messages(task_key)]
    finally:
        await env.close_async()
    if (reward := steps[-1]["reward"]) != 1.0:
        raise BackendError(f"the solution of {task_key} gets reward {reward}, not 1")
    return env.chat_history[:-1]  # there is no answer to the last message


async def _conversations(keys: Iterable[TaskKey], style: PromptStyle) -> list[list[dict[str, str]]]:
    return [await gold_conversation(str(key), style) for key in keys]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the platform's solutions as conversations to train on.")
    parser.add_argument("tasks", help="platform:keys?difficulty=0b&count=2000")
    parser.add_argument("file", type=Path)
    parser.add_argument("--compact", action="store_true", help="with the short system message")
    given = parser.parse_args()
    try:
        lines = gold_lines(given.tasks, PromptStyle.COMPACT if given.compact else PromptStyle.FULL)
        given.file.write_text("".join(f"{line}\n" for line in lines))
    except (ValueError, BackendError, OSError) as error:
        parser.error(file_error_text(error) or f"{error}; tasks are named as in platform:keys?difficulty=0b&count=2000")


if __name__ == "__main__":
    main()
