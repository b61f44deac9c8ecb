"""Fewer points of a curve that look the same: LTTB (largest triangle three buckets; Steinarsson 2013)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DENSE = 4  # points of a bucket of which one is chosen; of more, only the lowest and the highest are looked at


def pick_points(xs: Floats, ys: Floats, count: int) -> NDArray[np.intp]:
    """Positions of at most `count` points, the first and the last among them. Of each bucket it keeps the point that
    spans the largest triangle with the point kept before and the mean of the next bucket."""
    length = len(xs)
    if count >= length or count < 3:
        return np.arange(length)
    if length > DENSE * count:
        places = _extremes(ys, DENSE * count // 2)
        return places[_largest_triangles(xs[places], ys[places], count)]
    return _largest_triangles(xs, ys, count)


def _extremes(ys: Floats, parts: int) -> NDArray[np.intp]:
    """Places of the lowest and the highest value of each part, of both ends, and of what is left over."""
    width = len(ys) // parts
    cut = ys[: parts * width].reshape(parts, width)
    begins = np.arange(parts) * width
    rest = np.arange(parts * width, len(ys))
    return np.unique(np.concatenate([[0], begins + cut.argmin(1), begins + cut.argmax(1), rest, [len(ys) - 1]]))


def _largest_triangles(xs: Floats, ys: Floats, count: int) -> NDArray[np.intp]:
    length = len(xs)
    edges = (np.arange(count - 1) * ((length - 2) / (count - 2))).astype(int) + 1  # the last bucket is the last point
    with np.errstate(over="ignore", invalid="ignore"):  # areas of huge values are infinite
        widths = np.diff(edges, append=length)
        means_x, means_y = np.add.reduceat(xs, edges) / widths, np.add.reduceat(ys, edges) / widths
    means = zip(means_x.tolist()[1:], means_y.tolist()[1:], strict=True)
    points = list(zip(xs.tolist(), ys.tolist(), strict=True))  # one by one, plain floats are faster than numpy's
    kept = [0]
    (at_x, at_y), begin = points[0], 1
    for end, (mean_x, mean_y) in zip(edges.tolist()[1:], means, strict=True):
        left, up = at_x - mean_x, mean_y - at_y
        areas = [abs(left * (y - at_y) - (at_x - x) * up) for x, y in points[begin:end]]
        kept.append(begin + areas.index(max(areas)))
        (at_x, at_y), begin = points[kept[-1]], end
    return np.array([*kept, length - 1])
