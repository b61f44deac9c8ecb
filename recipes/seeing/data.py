"""What the small model that sees is taught before reinforcement learning: to describe drawings, and how an answer
looks, but not which one is right.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from palestra.environments.bundled.drawings.scenes import SIDE, Scene, draw

KINDS = ("count", "compare", "chart")
DESCRIBE = {
    "count": "What is in the picture?",
    "compare": "Which squares are there?",
    "chart": "Which bars are there?",
}
FIRST = 1_000_000
"""Numbers of scenes from here on are no tasks of the environment."""


class Example(NamedTuple):
    pixels: np.ndarray
    """[height, width, 3], from -1 to 1."""
    question: str
    answer: str


def example(rng: random.Random, described: float) -> Example:
    """`described`: how often the answer is a description; otherwise it is one of the options, at random."""
    kind = rng.choice(KINDS)
    scene = draw(kind, "train", FIRST + rng.randrange(10_000_000))
    if rng.random() < described:
        return Example(pixels_of(scene), DESCRIBE[kind], scene.description)
    return Example(pixels_of(scene), scene.question, rng.choice(scene.options))


def pixels_of(scene: Scene) -> np.ndarray:
    pixels = np.frombuffer(scene.picture.pixels, np.uint8).reshape(SIDE, SIDE, 3)
    return pixels.astype(np.float32) / 127.5 - 1


def texts() -> list[str]:
    """What the tokenizer is trained on."""
    rng = random.Random("texts")
    found = []
    for kind in KINDS:
        for number in range(300):
            scene = draw(kind, "train", FIRST + number)
            found += [scene.question, scene.description, rng.choice(scene.options), DESCRIBE[kind]]
    return [f"user\n{text}" for text in found] + ["assistant\n", "system\n"] * 100
