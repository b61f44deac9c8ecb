"""The top of the command line: which commands there are."""

from __future__ import annotations

import rich_click as click

from palestra import __version__
from palestra.cli.lazy import LazyCommand, LazyGroup

COMMANDS = [
    LazyCommand(
        "agent", "palestra.cli.agent.commands:agent", "Let command-line agents play coding tasks, or list the agents."
    ),
    LazyCommand("alias", "palestra.cli.server.alias:alias", "Name models of a running server, and move the names."),
    LazyCommand("backup", "palestra.cli.server.backup:backup", "Write a stopped server's state to one file."),
    LazyCommand("chat", "palestra.cli.chat.command:chat", "Talk to a model in the terminal."),
    LazyCommand(
        "checkpoint",
        "palestra.cli.checkpoint.commands:checkpoint",
        "List, look at, export, publish, import and delete checkpoints of runs and servers.",
    ),
    LazyCommand("config", "palestra.cli.config:config", "Show a command's resolved config, or every key it knows."),
    LazyCommand("data", "palestra.cli.data:data", "Check, measure, split and convert datasets."),
    LazyCommand(
        "doctor", "palestra.cli.doctor:doctor", "Show what works on this machine and what to install for the rest."
    ),
    LazyCommand("env", "palestra.cli.env:env", "List environments, or play one yourself."),
    LazyCommand(
        "episode",
        "palestra.cli.episode.commands:episode",
        "Play, list, requeue and cancel the episodes of a running server.",
    ),
    LazyCommand("eval", "palestra.cli.evaluate:evaluate", "Evaluate a model, anywhere, on the tasks of environments."),
    LazyCommand("gym", "palestra.cli.gym.commands:gym", "Start the servers of a gym and collect rollouts with them."),
    LazyCommand("judge", "palestra.cli.judge:judge", "Check how far a judge agrees with people."),
    LazyCommand("key", "palestra.cli.server.key:key", "Make, list, rotate and revoke API keys."),
    LazyCommand("model", "palestra.cli.model.commands:model", "Make random models, or inspect model folders."),
    LazyCommand(
        "platform", "palestra.cli.platform.commands:platform", "Serve local task apps, list them, make tasks, play one."
    ),
    LazyCommand("quota", "palestra.cli.server.quota:quota", "Limit what each owner may use of a server."),
    LazyCommand(
        "replica", "palestra.cli.server.replica:replica", "Sample for a running server, on this machine or another."
    ),
    LazyCommand("restore", "palestra.cli.server.backup:restore", "Restore a server's state from a backup."),
    LazyCommand("rollout", "palestra.cli.run.rollout:rollout", "List and read the rollouts of training runs."),
    LazyCommand(
        "run",
        "palestra.cli.run.commands:run",
        "List, look at, compare, export, plot, stop, fork, replay, label and delete training runs.",
    ),
    LazyCommand("sandbox", "palestra.cli.sandbox:sandbox", "Run commands behind a wall, or list what holds one here."),
    LazyCommand("serve", "palestra.cli.server.serve:serve", "Serve models: training and sampling by Tinker's API."),
    LazyCommand(
        "sweep", "palestra.cli.sweep.commands:sweep", "Run a population of training runs at one server; what it found."
    ),
    LazyCommand("train", "palestra.cli.train:train", "Train a model: GRPO, distillation, SFT, DPO."),
    LazyCommand("usage", "palestra.cli.server.usage:usage", "Show what owners and runs have used of a server."),
    LazyCommand("view", "palestra.cli.view:view", "Show runs in the browser: curves, rollouts, tokens, live."),
]


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    aliases={"episodes": "episode"},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="palestra")
def main() -> None:
    """Train LLM agents by reinforcement learning on machines you own."""
