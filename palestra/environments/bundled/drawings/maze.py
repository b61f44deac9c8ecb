"""A maze of square cells: one way in on the left, three ways out on the right, of which one can be reached.

It is a spanning tree of the cells, from which passages are taken out that lead to the two other ways out.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.environments.bundled.drawings.canvas import BLACK, COLOURS, Canvas
from palestra.environments.bundled.seeded_random import SeededRandom

CELLS = 7
EXITS = (0, 3, 6)
"""Rows of the ways out."""
CORNER, CELL, MARK = 2, 8, 6
ENTRANCE = (150, 150, 150)

Place = tuple[int, int]
"""Column and row."""
Parents = dict[Place, Place | None]


def draw_maze(canvas: Canvas, rng: SeededRandom, colours: Sequence[str]) -> int:
    """Draws one. The first colour is that of the way out that can be reached; returns the number of steps to it."""
    start = (0, rng.below(CELLS))
    rows = rng.sample(EXITS, len(colours))
    while True:
        parents = _tree(rng, start)
        ways = [_way(parents, (CELLS - 1, row)) for row in rows]
        own = set(ways[0])
        closed = [[place for place in way if place not in own] for way in ways[1:]]
        if all(closed) and not any(set(ways[0]) & {(CELLS - 1, row)} for row in rows[1:]):
            break
    cut = {rng.pick(places) for places in closed}
    open_walls = {frozenset((place, parent)) for place, parent in parents.items() if parent and place not in cut}
    _draw(canvas, open_walls)
    canvas.rectangle(0, _at(start[1]) + 1, CORNER, _at(start[1] + 1), ENTRANCE)
    for row, colour in zip(rows, colours, strict=True):
        right = _at(CELLS)
        canvas.rectangle(right, _at(row) + 1, right + MARK, _at(row + 1), COLOURS[colour])
    return len(ways[0]) - 1


def _tree(rng: SeededRandom, start: Place) -> Parents:
    """Each cell with the one before it, by a random walk that goes back where it is stuck."""
    parents: Parents = {start: None}
    path = [start]
    while path:
        column, row = path[-1]
        beside = [(column + 1, row), (column - 1, row), (column, row + 1), (column, row - 1)]
        free = [one for one in beside if one not in parents and min(one) >= 0 and max(one) < CELLS]
        if not free:
            path.pop()
            continue
        chosen = rng.pick(free)
        parents[chosen] = path[-1]
        path.append(chosen)
    return parents


def _way(parents: Parents, end: Place) -> list[Place]:
    way: list[Place] = []
    place: Place | None = end
    while place is not None:
        way.append(place)
        place = parents[place]
    return way


def _draw(canvas: Canvas, open_walls: set[frozenset[Place]]) -> None:
    """All walls but those between cells that are joined."""
    end = _at(CELLS)
    for row in range(CELLS):
        for column in range(CELLS):
            left, top = _at(column), _at(row)
            if not row or frozenset(((column, row), (column, row - 1))) not in open_walls:
                canvas.rectangle(left, top, left + CELL + 1, top + 1, BLACK)
            if not column or frozenset(((column, row), (column - 1, row))) not in open_walls:
                canvas.rectangle(left, top, left + 1, top + CELL + 1, BLACK)
    canvas.rectangle(end, CORNER, end + 1, end + 1, BLACK)
    canvas.rectangle(CORNER, end, end + 1, end + 1, BLACK)


def _at(place: int) -> int:
    return CORNER + CELL * place
