"""A training run with a real command-line agent in the loop: its agent, player, server and trainer are killed, and
nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.runs.reader import RunReader, RunStatus
from palestra.testing.puppet import Cue
from tests.agents.coding_run import MARK, CodingRun, agents_alive, needs_wall
from tests.agents.conftest import CONTEXT, PuppetServer, serving
from tests.agents.programs import CLAUDE_CODE, tool_call
from tests.coding.folders import harbor
from tests.server.conftest import KEY
from tests.training.trainers import kill, start
from tests.waiting import until

pytestmark = [pytest.mark.agents, pytest.mark.timeout(3000)]
PATIENCE_S = 600.0
STEPS, GROUPS, SIZE = 3, 2, 2
SLOW = f"timeout 5 {MARK}; echo 42 > answer.txt; echo wrote-it"
"""Long enough to be killed in."""
SCRIPT = [
    Cue(when="task-slow", say=tool_call("Bash", command=SLOW, description="Write the file.")),
    Cue(when="wrote-it", say="The file is there."),
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PuppetServer]:
    needs_wall()
    if not CLAUDE_CODE.path.exists():
        pytest.skip("Claude Code is not installed; run: make agents")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("PATH", f"{CLAUDE_CODE.path.parent}:{os.environ['PATH']}")
    with serving(SCRIPT, tmp_path / "served", CONTEXT) as running:
        yield running


def write_config(folder: Path, server: PuppetServer) -> str:
    for name in ("first", "second"):
        settings = "[agent]\ntimeout_sec = 240\n"
        harbor(folder / "tasks" / name, **{"task.toml": settings, "instruction.md": f"The {name}: do task-slow.\n"})
    config = {
        "environments": [{"name": "coding", "tasks": str(folder / "tasks")}],
        "rollouts": "agent",
        "agent": {"command": "claude", "concurrency": 0},
        "episodes": {"lease_s": 20},
        "server": server.url,
        "model": {"name": "puppet", "tokenizer": str(server.model), "rank": 2},
        "rollout": {"group_size": SIZE, "groups_per_step": GROUPS, "max_tokens": 200},
        "data": {"zero_variance": "keep", "max_sequence_length": CONTEXT},
        "optimizer": {"lr": 1e-6},
        "eval": {"every": 0},
        "checkpoint": {"every": 1},
        "steps": STEPS,
    }
    (folder / "run.json").write_text(json.dumps(config))
    return "run.json"


def kill_an_agent(player: subprocess.Popen[str]) -> None:
    """Kills the Claude Code whose tool runs, not its sandbox."""
    tool = agents_alive()[0]
    agents = [one for one in tool.parents() if "claude" in one.name() or CLAUDE_CODE.path.name in one.cmdline()[0]]
    assert player.pid in {one.pid for one in tool.parents()}
    agents[0].kill()


def test_a_run_with_claude_code_outlives_kills_of_all_its_parts(server: PuppetServer, tmp_path: Path) -> None:
    trainer = start(tmp_path, write_config(tmp_path, server), "--name", "cut")
    players = CodingRun(server, "cut")
    words = (tmp_path, tmp_path / "tasks", "claude", "--concurrency", "2", "--on-crash", "0")
    metrics = tmp_path / "runs" / "cut" / "metrics.jsonl"

    def a_tool_runs() -> bool:
        assert trainer.poll() is None, trainer.communicate()[0]
        return bool(agents_alive())

    def steps_done() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    with players.playing(*words) as player:
        until(a_tool_runs, timeout_s=PATIENCE_S)
        kill_an_agent(player)
        until(lambda: steps_done() > 0 and a_tool_runs(), timeout_s=PATIENCE_S)
        player.kill()
    until(lambda: not agents_alive(), timeout_s=30)
    with players.playing(*words):
        until(a_tool_runs, timeout_s=PATIENCE_S)
        server.kill_both()
        server.start()
        until(lambda: steps_done() >= STEPS - 1, timeout_s=PATIENCE_S)
        kill(trainer)
        resumed = start(tmp_path, "--resume", "cut")
        said, _ = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, said
    run = RunReader(tmp_path / "runs" / "cut")
    assert run.status() is RunStatus.DONE
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["mismatch/logprob_abs_max"] for row in rows] == [0.0] * STEPS
    records = [record for step in range(1, STEPS + 1) for record in run.read_rollouts(step)]
    assert len({record["id"] for record in records}) == len(records) == STEPS * GROUPS * SIZE
    assert Counter(record["reward"] for record in records) == {1.0: len(records) - 1, 0.0: 1}  # one agent was killed
    assert sum(row["env/coding/ending/crash"] for row in rows) == pytest.approx(1 / (GROUPS * SIZE))
