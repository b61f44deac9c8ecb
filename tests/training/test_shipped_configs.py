"""Every config that ships can be started as it is, and learns within its own steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.config.bundled import BUNDLED
from palestra.config.train import GrpoConfig, load_train_config
from palestra.runs.reader import RunReader
from palestra.training.launch import check
from tests.training.trainers import start

ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*(BUNDLED / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
STEPS = 3


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_nothing_is_missing_that_a_shipped_config_names(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Data, tasks, templates: all that `--dry-run` looks at."""
    monkeypatch.chdir(ROOT)
    check(load_train_config([file], []))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_config_has_something_to_learn_in_its_first_steps(file: Path, tmp_path: Path):
    """With all its settings but for the number of steps; GRPO without its evaluations."""
    is_grpo = isinstance(load_train_config([file], []), GrpoConfig)
    fewer = [f"steps={STEPS}", f"runs={tmp_path}", *(["eval.every=0", "early_stop=null"] if is_grpo else [])]
    process = start(ROOT, str(file), "--name", "few", *fewer)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    rows = [row for row in RunReader(tmp_path / "few").read_metrics() if row["step"]]
    assert len(rows) == STEPS
    assert [row.get("optim/grad_norm", 0) > 0 for row in rows] == [True] * STEPS, said
    assert "nothing to train on" not in said
