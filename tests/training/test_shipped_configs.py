"""Every config that ships can be started as it is, and learns within its own steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.coding.warm_up import write_warm_up
from palestra.config.bundled import BUNDLED
from palestra.config.train import GrpoConfig, load_train_config
from palestra.runs.reader import RunReader
from palestra.training.launch import check
from tests.sandbox.needs import needs_local
from tests.training.trainers import start

ROOT = Path(__file__).parents[2]
STEPS = 3
WARM_UP = {"shell_agent"}
"""Configs whose tasks are made by a command that stands in them, and played by an agent in a sandbox."""
OF_PACKAGES = {"reasoning-gym", "textarena", "verifiers"}
"""Configs whose environments are in packages of others: tests/environments/test_packages.py has them."""
SHIPPED = [
    pytest.param(file, id=file.stem, marks=[needs_local] if file.stem in WARM_UP else [])
    for file in sorted([*(BUNDLED / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
    if file.stem not in OF_PACKAGES
]


def made_tasks(file: Path, folder: Path) -> list[str]:
    """Settings that name the tasks which have to be made first."""
    if file.stem not in WARM_UP:
        return []
    write_warm_up(folder / "tasks", 12 * STEPS)
    entry = {"name": "coding", "tasks": str(folder / "tasks"), "eval_tasks": str(folder / "tasks"), "shuffle": False}
    return [f"environments=[{entry}]"]


@pytest.mark.parametrize("file", SHIPPED)
def test_nothing_is_missing_that_a_shipped_config_names(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Data, tasks, templates: all that `--dry-run` looks at."""
    monkeypatch.chdir(ROOT)
    check(load_train_config([file], made_tasks(file, tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", SHIPPED)
def test_a_shipped_config_has_something_to_learn_in_its_first_steps(file: Path, tmp_path: Path):
    """With all its settings but for the number of steps; GRPO without its evaluations."""
    is_grpo = isinstance(load_train_config([file], []), GrpoConfig)
    fewer = [f"steps={STEPS}", f"runs={tmp_path}", *(["eval.every=0", "early_stop=null"] if is_grpo else [])]
    process = start(ROOT, str(file), "--name", "few", *made_tasks(file, tmp_path), *fewer)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    rows = [row for row in RunReader(tmp_path / "few").read_metrics() if row["step"]]
    assert len(rows) == STEPS
    assert [row.get("optim/grad_norm", 0) > 0 for row in rows] == [True] * STEPS, said
    assert "nothing to train on" not in said
