"""Scenes of pictures: drawn at random from a seed, with a question and its answer.

| kind | a picture of | the question |
| --- | --- | --- |
| count | circles, squares and triangles | how many there are of one of them |
| compare | three squares | which is the largest |
| chart | four bars | how high one of them is |
| maze | walls, a way in and three ways out | where the way leads |
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from palestra.environments.bundled.drawings.canvas import BLACK, COLOURS, Canvas
from palestra.environments.bundled.drawings.maze import draw_maze
from palestra.environments.bundled.seeded_random import SeededRandom
from palestra.environments.held_out import is_held_out

NUMBER, COLOUR = "Answer with a number.", "Answer with a colour."
SIDE = 64
"""Units of a picture's sides."""
CELL = 16
SHAPES = ("circle", "square", "triangle")
MOST, LEAST_OTHERS, MOST_OTHERS = 4, 1, 5
TALLEST = 6
BAR_UNIT, BAR_WIDTH, BAR_BASE = 9, 10, 60
LARGEST = 14


class Scene(Struct, frozen=True):
    question: str
    answer: str
    options: list[str]
    """What may be answered, each as likely as the others."""
    difficulty: int
    """1 to 3."""
    picture: Canvas
    description: str
    """The picture in words, for those who teach a model to see."""

    @property
    def file(self) -> bytes:
        return self.picture.png()


def count(rng: SeededRandom, scale: int) -> Scene:
    asked, number = rng.pick(SHAPES), rng.between(1, MOST)
    others = [one for one in SHAPES if one != asked]
    shapes = [asked] * number + [rng.pick(others) for _ in range(rng.between(LEAST_OTHERS, MOST_OTHERS))]
    canvas, per_row = Canvas(SIDE, scale), SIDE // CELL
    for shape, cell in zip(shapes, rng.sample(range(per_row**2), len(shapes)), strict=True):
        x, y = (CELL * place + CELL // 2 + rng.between(-1, 1) for place in (cell % per_row, cell // per_row))
        getattr(canvas, shape)(x, y, rng.between(4, 6), COLOURS[rng.pick(list(COLOURS))])
    options = [str(one) for one in range(1, MOST + 1)]
    description = ", ".join(f"{shapes.count(shape)} {shape}s" for shape in SHAPES)
    difficulty = 1 + (len(shapes) - 2) // 3
    return Scene(f"How many {asked}s are there? {NUMBER}", str(number), options, difficulty, canvas, description)


def compare(rng: SeededRandom, scale: int) -> Scene:
    colours = rng.sample(list(COLOURS), 3)
    gap = rng.between(1, 3)
    largest = rng.between(9, LARGEST)
    radii = [largest, *(rng.between(5, largest - gap - 1) for _ in colours[1:])]
    canvas = Canvas(SIDE, scale)
    quarters = rng.sample(range(4), 3)
    for colour, radius, quarter in zip(colours, radii, quarters, strict=True):
        x, y = (SIDE // 4 + SIDE // 2 * place for place in (quarter % 2, quarter // 2))
        canvas.square(x, y, radius, COLOURS[colour])
    by_size = [colour for _, colour in sorted(zip(radii, colours, strict=True), reverse=True)]
    description = f"{by_size[0]}, then {by_size[1]}, then {by_size[2]}"
    return Scene(f"Which square is the largest? {COLOUR}", colours[0], sorted(colours), 4 - gap, canvas, description)


def chart(rng: SeededRandom, scale: int) -> Scene:
    colours = rng.sample(list(COLOURS), 4)
    heights = [rng.between(1, TALLEST) for _ in colours]
    canvas, asked = Canvas(SIDE, scale), rng.below(4)
    canvas.rectangle(2, BAR_BASE, SIDE - 2, BAR_BASE + 2, BLACK)
    for height in range(1, TALLEST + 1):  # lines to count by
        canvas.rectangle(0, BAR_BASE - BAR_UNIT * height, 3, BAR_BASE - BAR_UNIT * height + 1, BLACK)
    for place, (colour, height) in enumerate(zip(colours, heights, strict=True)):
        left = 6 + 15 * place
        canvas.rectangle(left, BAR_BASE - BAR_UNIT * height, left + BAR_WIDTH, BAR_BASE, COLOURS[colour])
    options = [str(one) for one in range(1, TALLEST + 1)]
    difficulty = 1 + (heights[asked] - 1) // 2
    description = ", ".join(f"{colour} {height}" for colour, height in zip(colours, heights, strict=True))
    return Scene(
        f"How high is the {colours[asked]} bar? {NUMBER}", str(heights[asked]), options, difficulty, canvas, description
    )


def maze(rng: SeededRandom, scale: int) -> Scene:
    canvas, colours = Canvas(SIDE, scale), rng.sample(list(COLOURS), 3)
    length = draw_maze(canvas, rng, colours)
    question, description = (
        f"To which colour does the way lead? {COLOUR}",
        f"a maze with {length} steps to {colours[0]}",
    )
    difficulty = 1 + (length > 12) + (length > 18)
    return Scene(question, colours[0], sorted(colours), difficulty, canvas, description)


KINDS: dict[str, Callable[[SeededRandom, int], Scene]] = {
    "count": count,
    "compare": compare,
    "chart": chart,
    "maze": maze,
}


def draw(kind: str, split: str, number: int, scale: int = 1) -> Scene:
    """The same for equal arguments, everywhere and for ever; `scale` changes the number of pixels and nothing else. A
    picture that is shown in one split is shown in no other."""
    attempt = 0
    while True:
        seed = f"{kind}/{split}/{number}/{attempt}"
        found = KINDS[kind](SeededRandom(seed), 1)
        if is_held_out(found.picture.digest) == (split == "eval"):
            return found if scale == 1 else KINDS[kind](SeededRandom(seed), scale)
        attempt += 1
