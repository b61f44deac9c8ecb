"""`palestra agent`: command-line agents and the coding tasks that they play."""

from __future__ import annotations

import rich_click as click

from palestra.cli.lazy import LazyCommand, LazyGroup


@click.group(
    cls=LazyGroup,
    lazy=[
        LazyCommand("convert", "palestra.cli.agent.tasks:convert", "Make coding tasks of SWE-style rows."),
        LazyCommand("list", "palestra.cli.agent.play:list_", "List the agents known by name, and which are installed."),
        LazyCommand("play", "palestra.cli.agent.play:play", "Play the coding tasks of a training run with an agent."),
        LazyCommand("task", "palestra.cli.agent.tasks:task", "List coding tasks."),
        LazyCommand("warm-up", "palestra.cli.agent.tasks:warm_up", "Make warm-up tasks, the easiest level."),
        LazyCommand("verify", "palestra.cli.agent.tasks:verify", "Play the solution of coding tasks, and judge it."),
    ],
    old_names={"tasks": "task list"},
)
def agent() -> None:
    """Let command-line agents play coding tasks, or list the agents."""
