"""Drawings are the same everywhere, show what their questions ask for, and nothing else tells the answer."""

from __future__ import annotations

import base64
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from palestra.environments import make
from palestra.environments.bundled.drawings.canvas import COLOURS
from palestra.environments.bundled.drawings.environment import Drawings, solve, tasks
from palestra.environments.bundled.drawings.scenes import KINDS, draw
from palestra.util.picture_parts import url_of


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def shown(task) -> bytes:
    picture, _ = task.prompt[0]["content"]
    return base64.b64decode(str(url_of(picture)).partition(",")[2])


def test_tasks_are_the_same_each_time_and_their_ids_unique():
    for split, number in (("train", 10_000), ("eval", 400)):
        found = tasks(split)
        assert len(found) == number
        assert list(found[:20]) == list(tasks(split)[:20])
        ids = [f"{kind}-{split}-{place}" for place in range(number // 4) for kind in KINDS]
        assert [task.id for task in found[:20]] == ids[:20]
    first = tasks("eval")[0]
    assert first.prompt[0]["content"][1]["text"] == "How many circles are there? Answer with a number."
    assert draw("count", "eval", 0).picture.digest == "99e6217adb57f4f727d01f96468f655e"


@pytest.mark.slow
def test_no_picture_of_the_evaluation_is_trained_on():
    request = {split: {shown(task) for task in tasks(split)} for split in ("train", "eval")}
    assert not request["train"] & request["eval"]


def test_scale_changes_the_number_of_pixels_and_nothing_else():
    for kind in KINDS:
        small, large = draw(kind, "train", 3), draw(kind, "train", 3, scale=4)
        assert (small.question, small.answer) == (large.question, large.answer)
        assert pixels(large.file).shape == (256, 256, 3)
        same = pixels(large.file)[2::4, 2::4] == pixels(small.file)
        assert same.mean() > 0.97  # edges of circles are finer


def test_the_largest_square_and_the_height_of_a_bar_can_be_measured():
    for number in range(40):
        scene = draw("compare", "train", number)
        found = pixels(scene.file)
        areas = {name: (found == COLOURS[name]).all(-1).sum() for name in scene.options}
        assert max(areas, key=lambda name: areas[name]) == scene.answer
        scene = draw("chart", "train", number)
        (asked,) = [name for name in COLOURS if f" {name} " in scene.question]
        lines = (pixels(scene.file) == COLOURS[asked]).all(-1).any(1).sum()
        assert str(lines // 9) == scene.answer


def test_a_way_leads_to_one_exit_only():
    for number in range(20):
        scene = draw("maze", "train", number)
        walls = (pixels(scene.file) == 0).all(-1)
        reached = {(int(np.argwhere((pixels(scene.file)[:, 1] == 150).all(-1))[1][0]), 3)}
        border = list(reached)
        while border:
            y, x = border.pop()
            for place in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if 2 <= place[0] < 60 and 2 <= place[1] < 58 and not walls[place] and place not in reached:
                    reached.add(place)
                    border.append(place)
        ends = {tuple(pixels(scene.file)[y, 61]) for y, x in reached if x == 57} - {(255, 255, 255)}
        assert ends == {COLOURS[scene.answer]}


def test_the_answer_alone_wins():
    for task in tasks("eval")[:40]:
        replies = {solve(task): 1.0, f" {solve(task).upper()}.\n": 1.0, ", ".join(task.extras["options"]): 0.0, "": 0.0}
        for reply, reward in replies.items():
            env = Drawings({}, task.extras)
            assert env.step(reply)["reward"] == reward
            assert env.get_metrics() == {"parse_error": 0.0 if reward else 1.0}


def test_options_are_about_equally_likely():
    found = Counter((task.extras["level"], task.extras["answer"]) for task in tasks("train")[:800])
    for kind, options in (("count", 4), ("compare", 4), ("chart", 6), ("maze", 4)):
        numbers = [number for (level, _), number in found.items() if level == kind]
        assert len(numbers) == options
        assert max(numbers) < 1.6 * 200 / options


def test_the_control_shows_pictures_of_other_tasks():
    own, other = tasks("eval", {"kinds": ["chart"]}), tasks("eval", {"kinds": ["chart"], "other_picture": True})
    assert [task.extras for task in own[:50]] == [task.extras for task in other[:50]]
    assert all(shown(one) != shown(another) for one, another in zip(own[:50], other[:50], strict=True))


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"unknown kind 'counts'; did you mean"):
        tasks("train", {"kinds": ["counts"]})
    with pytest.raises(ValueError, match="scale should be a whole number from 1 to 32"):
        tasks("train", {"scale": 0})
    with pytest.raises(ValueError, match="a task needs 'answer'"):
        make("drawings", extras={})
