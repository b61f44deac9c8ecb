"""Fewer points of a curve that look the same: LTTB (largest triangle three buckets; Steinarsson 2013)."""

from __future__ import annotations

from collections.abc import Sequence


def pick_points(xs: Sequence[float], ys: Sequence[float], count: int) -> list[int]:
    """Positions of at most `count` points, the first and the last among them. Of each bucket it keeps the point that
    spans the largest triangle with the point kept before and the mean of the next bucket."""
    length = len(xs)
    if count >= length or count < 3:
        return list(range(length))
    kept, size = [0], (length - 2) / (count - 2)
    for bucket in range(count - 2):
        begin, end = int(bucket * size) + 1, int((bucket + 1) * size) + 1
        next_end = min(int((bucket + 2) * size) + 1, length)
        width = next_end - end
        mean_x, mean_y = sum(xs[end:next_end]) / width, sum(ys[end:next_end]) / width
        at_x, at_y = xs[kept[-1]], ys[kept[-1]]
        left, up = at_x - mean_x, mean_y - at_y
        largest, best = -1.0, begin
        for place in range(begin, end):
            area = abs(left * (ys[place] - at_y) - (at_x - xs[place]) * up)
            if area > largest:
                largest, best = area, place
        kept.append(best)
    kept.append(length - 1)
    return kept
