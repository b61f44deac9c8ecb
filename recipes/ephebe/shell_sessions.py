"""The transcripts that Ephebe's sibling is trained on: sessions of the shell agent, recorded.

Instructions are those of warm-up tasks. The command is drawn from all that fit the files and words in the instruction,
whatever it asks for, and is really run: the model learns how the agent is spoken to, how commands are written and what
they print, but not which one an instruction wants. That is left to rewards.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from palestra.agents import shell_agent
from palestra.coding.warm_up import KEPT, WarmUpTask, warm_up_task

Message = dict[str, Any]

FIRST_NUMBER = 1_000_000
"""Tasks of lower numbers are for training by rewards; those held out are in no session."""
ONE_FILE = (
    "rm {0}", "chmod +x {0}", "sort -o {0} {0}", "truncate -s 0 {0}", "cat {0}", "wc -l {0}", "touch {0}",
    "chmod 600 {0}", "head -n 1 {0}", "tac {0}",
)  # fmt: skip
TWO_FILES = (
    "mv {0} {1}", "cp {0} {1}", "ln -s {0} {1}", "wc -l < {0} > {1}", "cat {0} {1}", "head -n 1 {0} > {1}",
    "tail -n 1 {0} > {1}", "sort {0} > {1}", "touch {0} {1}", "cat {0} >> {1}",
)  # fmt: skip
FILE_AND_WORD = (
    "echo {1} > {0}", "echo {1} >> {0}", "sed -i /{1}/d {0}", "grep {1} {0}", "sed -i 1i{1} {0}", "grep -c {1} {0}",
    "sed -i s/{1}// {0}",
)  # fmt: skip
FILE_AND_TWO_WORDS = (
    "sed -i s/{1}/{2}/g {0}", "sed -i s/{2}/{1}/g {0}", "sed -i /{1}/a{2} {0}", "sed -i /{1}/i{2} {0}",
    "grep {1} {0}", "echo {1} {2} >> {0}", "sed -i s/{1}/{2}/ {0}",
)  # fmt: skip
ENDINGS = ("Done.", "It is done.", "That should be all.")
LOOKS = 0.08
"""How often the model looks around first."""
REFUSES = 0.04
"""How often it calls no tool at all."""


def commands_for(task: WarmUpTask) -> tuple[str, ...]:
    """All commands that fit what an instruction names."""
    if len(task.slots) == 1:
        return ONE_FILE
    if len(task.slots) == 3:
        return FILE_AND_TWO_WORDS
    return TWO_FILES if "." in task.slots[1] else FILE_AND_WORD


def conversation(number: int) -> list[Message]:
    """One session; the number chooses the task, too."""
    rng, task = random.Random(f"session {number}"), warm_up_task(FIRST_NUMBER + number)
    messages: list[Message] = [
        {"role": "system", "content": shell_agent.SYSTEM},
        {"role": "user", "content": task.instruction},
    ]
    if rng.random() > REFUSES:
        chosen = rng.choice(commands_for(task)).format(*task.slots)
        messages += recorded(task, ["ls", chosen] if rng.random() < LOOKS else [chosen])
    return [*messages, {"role": "assistant", "content": rng.choice(ENDINGS)}]


def recorded(task: WarmUpTask, commands: list[str]) -> list[Message]:
    """The calls and what the agent's own tool answers, in a folder with the task's files."""
    found: list[Message] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for name, lines in {KEPT: ["number 0"], **task.files}.items():
            Path(name).write_text("".join(f"{line}\n" for line in lines))
        for command in commands:
            function = {"name": "bash", "arguments": json.dumps({"command": command})}
            printed = shell_agent.run({"function": function}, 10.0)
            found += [
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
                {"role": "tool", "content": printed},
            ]
    return found
