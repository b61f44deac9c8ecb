"""The process that hosts environments of verifiers: it may end, and what cannot be loaded is named."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import TaskFileError
from palestra.environments.verifiers.tasks import verifiers_tasks
from palestra.net.chat_apis import ModelEndpoint, OpenAIChat
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import blank_rollout
from palestra.rollouts.verifiers.evaluation_player import open_verifiers_evaluation
from palestra.types.rollouts import GroupRequest, RolloutStop
from tests.environments.verifiers.test_parity import DIRECT, PACKAGES, V1, every_task, needs_verifiers, sums
from tests.scripted_endpoint import scripted_endpoint


def entry_of(name: str, python: Path | str = V1, **config: Any) -> EnvironmentEntry:
    return EnvironmentEntry.model_validate({"verifiers": name, "config": {"python": str(python), **config}})


@pytest.mark.e2e
@needs_verifiers
def test_a_process_that_ends_fails_its_rollout_and_the_next_one_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    entry, logs = entry_of("v1_dying", env=DIRECT), tmp_path / "logs"

    async def one_by_one(url: str) -> list[tuple[RolloutStop, float | None, str | None]]:
        endpoint = ModelEndpoint(base_url=url, api_key="x", model="scripted", api=OpenAIChat())
        settings = RolloutSettings(max_tokens=64, max_context=1024)
        found = []
        async with open_verifiers_evaluation([entry], endpoint, settings, logs) as players:
            for task in every_task(entry):
                request = GroupRequest(id=task.id, task=task, step=0, seeds=(0,))
                rollout = await players[entry.name].play(request, blank_rollout(request, 0, 0))
                found.append((rollout.stop, rollout.reward, rollout.error))
        return found

    with scripted_endpoint(sums) as url:
        first, second, third = asyncio.run(one_by_one(url))
    assert first[:2] == third[:2] == (RolloutStop.DONE, 1.0)
    assert second[:2] == (RolloutStop.ENV_FAILED, None)
    assert "the process of verifiers:v1_dying has ended" in str(second[2])


@pytest.mark.e2e
@needs_verifiers
def test_what_cannot_be_loaded_is_named():
    with pytest.raises(TaskFileError, match="there is no package 'nowhere'"):
        verifiers_tasks(entry_of("nowhere"), "train")


@pytest.mark.parametrize(
    ("config", "message"),
    [({"pithon": "x"}, "pithon"), ({"python": "/nowhere/python"}, "cannot be started")],
    ids=["a setting that does not exist", "a Python that does not exist"],
)
def test_a_wrong_setting_is_named(config: dict[str, Any], message: str):
    entry = EnvironmentEntry.model_validate({"verifiers": "any", "config": config})
    with pytest.raises(ValueError, match=message):
        verifiers_tasks(entry, "train")


def test_a_python_without_verifiers_is_a_sentence():
    entry = entry_of("json", sys.executable)
    with pytest.raises(TaskFileError, match="verifiers"):
        verifiers_tasks(entry, "train")
