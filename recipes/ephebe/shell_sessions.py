"""Records the sessions that Ephebe's sibling is trained on: the shell agent at warm-up tasks. Minutes on two cores.

python recipes/ephebe/shell_sessions.py --out sessions.xz

Instructions are those of warm-up tasks. The command is drawn from all that fit the files and words in the instruction,
whatever it asks for, and is really run: the model learns how the agent is spoken to, how commands are written and what
they print, but not which one an instruction wants. That is left to rewards. (`train_shell.py --asked-share` may draw
the wanted one more often than the others.)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from model_files import log  # noqa: E402
from train import chat_template, render  # noqa: E402

from palestra.agents import shell_agent  # noqa: E402
from palestra.coding.warm_up import KEPT, WarmUpTask, warm_up_task  # noqa: E402

Message = dict[str, Any]
Row = dict[str, Any]

FIRST_NUMBER = 1_000_000
"""Tasks of lower numbers are for training by rewards; those held out are in no session."""
HELD_OUT = 96
"""How many held-out tasks go into the file, to measure the model with."""
ONE_FILE = (
    "rm {0}", "chmod +x {0}", "sort -o {0} {0}", "truncate -s 0 {0}", "cat {0}", "wc -l {0}", "touch {0}",
    "chmod 600 {0}", "head -n 1 {0}", "tac {0}", "tail -n 1 {0}", "wc -c {0}",
)  # fmt: skip
TWO_FILES = (
    "mv {0} {1}", "cp {0} {1}", "ln -s {0} {1}", "wc -l < {0} > {1}", "cat {0} {1}", "head -n 1 {0} > {1}",
    "tail -n 1 {0} > {1}", "sort {0} > {1}", "touch {0} {1}", "cat {0} >> {1}", "tac {0} > {1}", "wc -c < {0} > {1}",
)  # fmt: skip
FILE_AND_WORD = (
    "echo {1} > {0}", "echo {1} >> {0}", "sed -i /{1}/d {0}", "grep {1} {0}", "sed -i '1i {1}' {0}", "grep -c {1} {0}",
    "sed -i s/{1}// {0}", "grep -v {1} {0}", "grep -n {1} {0}", "grep -i {1} {0}", "sed /{1}/d {0}",
    "sed -n /{1}/p {0}",
)  # fmt: skip
FILE_AND_TWO_WORDS = (
    "sed -i s/{1}/{2}/g {0}", "sed -i s/{2}/{1}/g {0}", "sed -i '/{1}/a {2}' {0}", "sed -i '/{1}/i {2}' {0}",
    "grep {1} {0}", "grep {2} {0}", "echo {1} {2} >> {0}", "echo {1} {2} > {0}", "echo {2} > {0}",
    "sed -i s/{1}/{2}/ {0}", "sed s/{1}/{2}/ {0}", "grep -c {1} {0}",
)  # fmt: skip
ENDINGS = ("Done.", "It is done.", "That should be all.")
LOOK = "ls"
LOOKS = 0.08
"""How often the model looks around first."""
REFUSES = 0.04
"""How often it calls no tool at all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=100_000)
    args = parser.parse_args()
    begin = time.monotonic()
    with ProcessPoolExecutor() as pool, lzma.open(args.out, "wt", encoding="utf-8") as file:
        file.write(json.dumps(header()) + "\n")
        for row in pool.map(session_row, range(args.sessions), chunksize=500):
            file.write(json.dumps(row) + "\n")
    log(begin, f"{args.sessions} sessions are recorded, {args.out.stat().st_size / 1e6:.1f} MB")


def header() -> Row:
    """The system prompt, which all sessions share, and the held-out tasks."""
    tasks = [warm_up_task(number, held_out=True) for number in range(HELD_OUT)]
    prompt, _ = split_at_prompt(rendered(opening(tasks[0])))
    return {"prompt": prompt, "held_out": [held_out_row(task) for task in tasks]}


def held_out_row(task: WarmUpTask) -> Row:
    return {
        "instruction": split_at_prompt(rendered(opening(task)))[1],
        "names": names_in(task),
        "commands": [one.format(*task.slots) for one in commands_for(task)],
        "solution": task.solution,
    }


def session_row(number: int) -> Row:
    """One session. `names`: the files that may be called otherwise. `is_asked`: whether the command is the one that the
    instruction asks for."""
    rng, task = random.Random(f"session {number}"), warm_up_task(FIRST_NUMBER + number)
    commands = [rng.choice(commands_for(task)).format(*task.slots)] if rng.random() > REFUSES else []
    looks = bool(commands) and rng.random() < LOOKS
    ending = {"role": "assistant", "content": rng.choice(ENDINGS)}
    messages = [*opening(task), *recorded(task, [LOOK, *commands] if looks else commands), ending]
    return {
        "text": split_at_prompt(rendered(messages).removesuffix("\n"))[1],
        "names": [] if looks else names_in(task),  # what `ls` prints is sorted
        "is_asked": commands == [task.solution],
    }


def commands_for(task: WarmUpTask) -> tuple[str, ...]:
    """All commands that fit what an instruction names."""
    if len(task.slots) == 1:
        return ONE_FILE
    if len(task.slots) == 3:
        return FILE_AND_TWO_WORDS
    return TWO_FILES if "." in task.slots[1] else FILE_AND_WORD


def names_in(task: WarmUpTask) -> list[str]:
    return [slot for slot in task.slots if "." in slot]


def opening(task: WarmUpTask) -> list[Message]:
    return [{"role": "system", "content": shell_agent.SYSTEM}, {"role": "user", "content": task.instruction}]


def rendered(messages: list[Message]) -> str:
    return render(chat_template(), (messages, [shell_agent.TOOL]))


def split_at_prompt(text: str) -> tuple[str, str]:
    prompt, mark, session = text.partition("<|im_start|>user")
    return prompt, mark + session


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


if __name__ == "__main__":
    main()
