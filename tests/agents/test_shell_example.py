"""`examples/shell_agent.py`, as anyone would run it, and the bundled model that it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.agents import shell_agent
from palestra.chat import ChatTokenizer
from palestra.chat.tool_calls import ParsedCall, parse_tool_call
from palestra.coding.warm_up import KINDS, warm_up_task
from palestra.config.bundled import BUNDLED, EPHEBE_SHELL
from palestra.types import SampleRequest, SamplingParams
from tests.sandbox.needs import needs_local

EXAMPLE = Path(__file__).parents[2] / "examples" / "shell_agent.py"


def test_the_bundled_model_calls_the_tool_and_names_the_files_of_held_out_tasks() -> None:
    from palestra.model import AdapterPool, Sampler, load_model

    folder = BUNDLED / EPHEBE_SHELL
    model, tokenizer = load_model(folder), ChatTokenizer.load(folder)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=model.decoder.device)
    tasks = [warm_up_task(number, held_out=True) for number in range(len(KINDS))]
    asked = [
        [{"role": "system", "content": shell_agent.SYSTEM}, {"role": "user", "content": task.instruction}]
        for task in tasks
    ]
    params = SamplingParams(temperature=0, max_tokens=64, seed=0)
    requests = [
        SampleRequest(prompt=tuple(tokenizer.encode_chat(messages, [shell_agent.TOOL])), params=params)
        for messages in asked
    ]
    results = Sampler(model.decoder, pool, tokenizer=model.tokenizer).generate(requests, None)
    calls = [parse_tool_call(tokenizer.decode(result.sequences[0].tokens)) for result in results]
    commands = [call.arguments["command"] for call in calls if isinstance(call, ParsedCall) and call.name == "bash"]
    assert len(commands) == len(KINDS)
    assert all(task.slots[0] in command for task, command in zip(tasks, commands, strict=True)), commands


@needs_local
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_small_model_in_the_shell_agent_learns_from_hidden_tests(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--folder", "learned"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "It has learned" in done.stdout
    (metrics,) = tmp_path.glob("learned/runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    before, after = (row["eval/success"] for row in rows if "eval/success" in row)
    assert before < 0.2
    assert after > 0.7
