"""Knobs: what they add to a prompt, and that they change nothing else."""

from __future__ import annotations

import re

import pytest

from palestra.environments.fleet.platform_tasks import PlatformTasks
from palestra.environments.platform import APPS, Instance, PlatformError, TaskKey, TaskTemplate, make_task, verify
from palestra.environments.platform.difficulty import APP_NOISE, NOISE
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.task_records import DifficultyKnob
from palestra.environments.platform.verifiers.source import verifier_source
from tests.environments.platform.conftest import NAMES, TEMPLATES

SENTENCES = {*NOISE, *(one for some in APP_NOISE.values() for one in some)}


@pytest.mark.parametrize(
    ("app", "template"),
    [
        pytest.param(app, template, id=name, marks=() if template is APPS[app].templates[-1] else pytest.mark.slow)
        for name, (app, template) in zip(NAMES, TEMPLATES, strict=True)
    ],
)
def test_only_the_prompt_changes(app: str, template: TaskTemplate):
    key = f"{app}-{template.name}-{template.difficulty}-2"
    plain, hinted, noisy, both = (make_task(key + knobs) for knobs in ("", ".hint", ".noise", ".hint.noise"))
    for task in (hinted, noisy, both):
        assert (task.params, task.seed.digest, task.variables) == (plain.params, plain.seed.digest, plain.variables)
        assert make_task(str(task.key)).prompt == task.prompt
        renamed = verifier_source(task).partition("\n")[2]
        assert renamed == verifier_source(plain).partition("\n")[2]
    instance = Instance(both.seed, variables=both.variables)
    played = play_golden(both, instance)
    assert verify(both, instance, played.answer).score == 1.0
    assert verify(both, Instance(both.seed, variables=both.variables)).score == 0.0
    assert hinted.prompt.startswith(f"{plain.prompt}\n\nHint: use ")
    assert all(call.tool in hinted.prompt for call, _ in played.steps)
    added = noisy.prompt.split("\n\n")
    added.remove(plain.prompt)
    assert len(added) == 2
    assert SENTENCES.issuperset(added)
    assert both.prompt == noisy.prompt.replace(plain.prompt, hinted.prompt)


def test_noise_asks_for_nothing_and_names_nothing():
    assert len(SENTENCES) == len(NOISE) + sum(map(len, APP_NOISE.values()))
    assert APP_NOISE.keys() == {key for key, app in APPS.items() if not app.parts} - {"keys"}
    assert not [one for one in SENTENCES if re.search(r'[?"\d]|please', one, re.IGNORECASE)]


def test_noise_differs_by_task():
    prompts = [make_task(f"keys-put_number-0b-{n}.noise").prompt for n in range(30)]
    assert len({re.sub(r"\d+", "", prompt) for prompt in prompts}) > 25
    assert len({prompt.split("\n\n")[0] in SENTENCES for prompt in prompts}) == 2  # before the task, or after it


@pytest.mark.parametrize("knobs", [".noise.hint", ".hint.hint", ".loud", ".", ".Hint", ".hint.", ".hint.noise.hint"])
def test_a_knob_that_is_not_there_is_told(knobs: str):
    with pytest.raises(PlatformError, match=r"not difficulty knobs of a task|not a task key"):
        make_task(f"keys-put_number-0b-1{knobs}")


def test_a_key_with_knobs_is_read_as_it_is_written():
    key = TaskKey("keys", "put_number", "0b", 2**31 + 1, (DifficultyKnob.HINT, DifficultyKnob.NOISE))
    assert TaskKey.parse(str(key)) == key
    assert (key.split, str(key.plain)) == ("eval", f"keys-put_number-0b-{2**31 + 1}")


def test_a_run_may_turn_them_for_all_its_tasks():
    chosen = PlatformTasks.parse("platform:keys?difficulty=0b&count=3&knobs=hint")
    assert [str(key) for key in chosen.keys("train")] == [f"keys-put_number-0b-{n}.hint" for n in range(3)]
    assert "Hint: use put." in chosen.tasks("train")[0].prompt[0]["content"]
    assert chosen.find("keys-put_number-0b-7.noise").task_key == "keys-put_number-0b-7.noise"
    with pytest.raises(ValueError, match=r"platform:keys\?knobs=loud: .*there are hint, noise"):
        PlatformTasks.parse("platform:keys?knobs=loud")
