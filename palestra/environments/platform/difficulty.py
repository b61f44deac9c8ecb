"""Knobs on a task's difficulty: a hint that names the tools, or sentences that have nothing to do with it.

A knob is a suffix of a task's key:

    mail-move_only-0-17.hint          easier
    mail-move_only-0-17.noise         harder
    mail-move_only-0-17.hint.noise
"""

from __future__ import annotations

import random
from itertools import groupby

from palestra.environments.platform.golden import ANSWER_TOOL, play_golden
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import DifficultyKnob, PlatformTask

SENTENCES = 2  # of noise


NOISE = (
    "The coffee machine is broken again.",
    "It has rained here since Monday.",
    "I slept badly and my train was late.",
    "Somebody left an umbrella at the front desk.",
    "The new chairs are more comfortable than they look.",
    "My neighbour has taken up the trumpet.",
    "I still owe somebody a lunch from last month.",
    "The lift stops at every floor today.",
    "Next week is going to be quiet.",
    "I have twelve tabs open and no idea why.",
    "We used to have a plant in this office.",
    "The window does not close properly.",
)
APP_NOISE = {
    "mail": (
        "A friend of mine keeps every newsletter he ever got.",
        "I used to have a folder for everything and found nothing in it.",
        "Our old mail program lost a whole year once.",
        "People here love long meetings.",
    ),
    "forge": (
        "There was talk of renaming all branches, but that is off.",
        "The oldest repository I know is older than I am.",
        "Last year we had a label for almost everything.",
        "I never liked merge commits much.",
    ),
    "stay": (
        "On my last trip the sauna was closed.",
        "I once paid more for breakfast than for the room.",
        "My sister only books hotels with a pool.",
        "Prices were lower two years ago.",
    ),
    "forum": (
        "I once read a thread with four thousand comments.",
        "My first post ever got no votes at all.",
        "There used to be a community about lighthouses.",
        "Some people report everything.",
    ),
    "returns": (
        "The queue was longer before lunch.",
        "My headset makes a crackling noise.",
        "Last winter we had a shelf full of lost gloves.",
        "Nobody here likes the new wrapping paper.",
    ),
    "flights": (
        "The departure board was dark this morning.",
        "I have never liked window seats.",
        "There used to be a better café in the terminal.",
        "Somebody always forgets a jacket at the gate.",
    ),
}
"""None of this asks for anything, or is about a row that a task could mean."""


def turned(task: PlatformTask) -> str:
    """Returns the prompt with what the key's modifiers add, each in a paragraph of its own."""
    paragraphs = [task.prompt]
    if DifficultyKnob.HINT in task.key.knobs:
        paragraphs.append(_hint(task))
    if DifficultyKnob.NOISE in task.key.knobs:
        paragraphs = _among_noise(task, paragraphs)
    return "\n\n".join(paragraphs)


def _hint(task: PlatformTask) -> str:
    """Returns a hint with the tools of the task's own solution, in their order."""
    instance = Instance(task.seed, variables=task.variables)
    try:
        played = play_golden(task, instance)
    finally:
        instance.close()
    tools = [call.tool for call, _ in played.steps] + ([] if played.answer is None else [ANSWER_TOOL])
    return f"Hint: use {', then '.join(tool for tool, _ in groupby(tools))}."


def _among_noise(task: PlatformTask, paragraphs: list[str]) -> list[str]:
    """Adds noise before or after the prompt, never inside. The sentences are the same with a hint and without."""
    rng = random.Random(f"{task.key.plain}.{DifficultyKnob.NOISE}")
    apps = [part.key for part in task.app.parts] or [task.app.key]
    sentences = rng.sample([*NOISE, *(one for app in apps for one in APP_NOISE.get(app, ()))], SENTENCES)
    before = rng.randrange(SENTENCES + 1)
    return sentences[:before] + paragraphs + sentences[before:]
