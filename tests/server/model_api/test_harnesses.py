"""Evaluation harnesses of others, unmodified, as clients of the model endpoint: inspect_ai and lm-evaluation-harness.

`make clients` installs them in venvs of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.model_api.conftest import Ephebe

ROOT = Path(__file__).parents[3]
HARNESSES = Path(__file__).parent / "harnesses"
INSPECT = Path(os.environ.get("PALESTRA_INSPECT_PYTHON") or ROOT / ".venv-inspect" / "bin" / "python")
LM_EVAL = Path(os.environ.get("PALESTRA_LM_EVAL_PYTHON") or ROOT / ".venv-lm-eval" / "bin" / "python")
RUN_S = 400
SUMS = ((3, 4), (5, 2), (6, 3), (8, 1))

pytestmark = pytest.mark.e2e


def ran(folder: Path, *command: object, **environment: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "PYTHONPATH": ""}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **offline, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not INSPECT.exists(), reason="needs a venv with inspect_ai: make clients")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_inspect_evaluates_a_task(ephebe: Ephebe, tmp_path: Path, provider: str) -> None:
    shutil.copy(HARNESSES / "sums.py", tmp_path)
    url = {"openai": f"{ephebe.url}/v1", "anthropic": ephebe.url}[provider]
    command = [INSPECT.with_name("inspect"), "eval", "sums.py", "--model", f"{provider}/ephebe", "--seed", 1]
    options = ["--max-tokens", 32, "--log-format", "json", "--log-dir", "logs", "--display", "none"]
    keys = {f"{provider.upper()}_API_KEY": ephebe.key, f"{provider.upper()}_BASE_URL": url}
    ran(tmp_path, *command, *options, **keys)
    log = json.loads(next((tmp_path / "logs").glob("*.json")).read_text())
    assert (log["status"], log["results"]["completed_samples"]) == ("success", 4)
    assert log["stats"]["model_usage"][f"{provider}/ephebe"]["output_tokens"] > 4


@pytest.mark.skipif(not LM_EVAL.exists(), reason="needs a venv with lm_eval: make clients")
def test_lm_evaluation_harness_calls_chat_completions(ephebe: Ephebe, tmp_path: Path) -> None:
    results = lm_eval(ephebe, tmp_path, "local-chat-completions", "chat/completions", ["palestra_sums"])
    assert results["palestra_sums"]["exact_match,last-number"] > 0


@pytest.mark.skipif(not LM_EVAL.exists(), reason="needs a venv with lm_eval: make clients")
def test_lm_evaluation_harness_generates_and_scores_by_completions(ephebe: Ephebe, tmp_path: Path) -> None:
    tasks = ["palestra_sums", "palestra_choices"]
    results = lm_eval(ephebe, tmp_path, "local-completions", "completions", tasks, tokenizer=ephebe.model)
    assert 0 <= results["palestra_sums"]["exact_match,last-number"] <= 1
    assert 0 <= results["palestra_choices"]["acc,none"] <= 1


def lm_eval(
    ephebe: Ephebe, folder: Path, model: str, route: str, tasks: list[str], tokenizer: Path | None = None
) -> dict[str, dict[str, float]]:
    """Returns the metrics of each task."""
    rows = [{"a": a, "b": b, "total": a + b} for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in HARNESSES.glob("*.yaml"):
        shutil.copy(file, folder)
    arguments = {"model": "ephebe", "base_url": f"{ephebe.url}/v1/{route}", "num_concurrent": 2}
    if tokenizer is None:
        arguments |= {"tokenizer_backend": "None", "tokenized_requests": False}
    else:
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": tokenizer}
    command = [LM_EVAL, "-m", "lm_eval", "run", "--model", model, "--tasks", ",".join(tasks)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", folder, "--output_path", folder / "out"]
    command += ["--apply_chat_template"] if tokenizer is None else []
    ran(folder, *command, OPENAI_API_KEY=ephebe.key)
    found = json.loads(next((folder / "out").rglob("results_*.json")).read_text())
    assert all(found["n-samples"][task]["effective"] == len(SUMS) for task in tasks)
    return found["results"]
