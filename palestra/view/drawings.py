"""Small drawings within tables, as SVG that needs no script and no style of its own."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from palestra.runs.rollout_records import RolloutRecord
from palestra.util.figures import number_text
from palestra.view.rollouts.rollout_records import ListedRecord

RAMP = 10
HEIGHT = 22
BAR = 7
WIDTH = 420
MAX_HEIGHT = 240  # of a waterfall of many turns


def curve_points(values: Sequence[float], width: int, height: int) -> str:
    """The points of a small curve, for an SVG's polyline."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (height - 3) / (high - low) if high > low else 0.0
    across = (width - 2) / (len(values) - 1)
    return " ".join(f"{1 + i * across:.1f},{height - 1.5 - (v - low) * scale:.1f}" for i, v in enumerate(values))


def reward_class(reward: float | None, low: float, high: float) -> str:
    """The class of a reward's colour, between the lowest and the highest shown."""
    if reward is None:
        return "failed"
    share = (reward - low) / (high - low) if high > low else float(reward > 0)
    return f"r{round(RAMP * min(1.0, max(0.0, share)))}"


def advantage_bars(rollouts: Sequence[ListedRecord]) -> Markup:
    """A bar for each rollout: up if it was better than its group, down if it was worse."""
    values = [one.get("advantage") for one in rollouts]
    largest = max((abs(value) for value in values if value), default=0.0)
    if not any(value is not None for value in values):
        return Markup('<span class="muted">–</span>')
    middle, scale = HEIGHT / 2, (HEIGHT / 2 - 1) / largest if largest else 0.0
    bars = Markup("").join(_bar(place, value or 0.0, middle, scale) for place, value in enumerate(values))
    numbers = ", ".join(number_text(value) for value in values)
    width = BAR * len(values)
    return Markup(
        '<svg class="bars" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" aria-label="advantages {n}">'
        '<title>advantages {n}</title><line x1="0" x2="{w}" y1="{m}" y2="{m}"/>{bars}</svg>'
    ).format(w=width, h=HEIGHT, n=numbers, m=middle, bars=bars)


def _bar(place: int, value: float, middle: float, scale: float) -> Markup:
    height = abs(value) * scale
    top = middle - height if value > 0 else middle
    kind = "up" if value > 0 else "down"
    return Markup('<rect class="{}" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(
        kind, place * BAR + 1, top, BAR - 2, height
    )


def waterfall(record: RolloutRecord) -> Markup:
    """Draws where the seconds of a rollout went: sampling, the environment, and waiting for either."""
    total = float(record.get("seconds") or 0.0)
    sampling, environment = float(record.get("sample_s") or 0.0), float(record.get("env_s") or 0.0)
    rest = max(0.0, total - sampling - environment)
    whole = max(total, sampling + environment) or 1.0
    at, bars, words = 0.0, Markup(""), []
    for name, seconds in (("sampling", sampling), ("environment", environment), ("waiting", rest)):
        width = WIDTH * seconds / whole
        bars += Markup('<rect class="time-{}" x="{:.1f}" y="0" width="{:.1f}" height="12"/>').format(name, at, width)
        at += width
        words.append(Markup('<span class="time time-{}">{} {} s</span>').format(name, name, number_text(seconds)))
    return Markup(
        '<svg class="waterfall" viewBox="0 0 {w} 12" preserveAspectRatio="none" role="img" aria-label="{t} seconds">'
        "{bars}</svg>"
        '<p class="small muted">{words} of {t} s</p>'
    ).format(w=WIDTH, t=number_text(total), bars=bars, words=Markup(" ").join(words))


def turn_waterfall(times: Sequence[Sequence[float]]) -> Markup:
    """Draws when each turn was sampled and when the environment answered: a line for each turn, one after the other."""
    total = sum(map(sum, times)) or 1.0
    height = max(1.0, min(10.0, MAX_HEIGHT / len(times)))
    at, bars = 0.0, Markup("")
    for number, seconds in enumerate(times):
        for name, spent in zip(("sampling", "environment"), seconds, strict=True):
            bars += Markup(
                '<rect class="time-{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                "<title>turn {}: {} {} s</title></rect>"
            ).format(
                name,
                WIDTH * at / total,
                number * height,
                max(0.5, WIDTH * spent / total),
                height,
                number + 1,
                name,
                number_text(spent),
            )
            at += spent
    return Markup(
        '<svg class="waterfall turns" viewBox="0 0 {w} {h:.0f}" height="{h:.0f}" preserveAspectRatio="none" role="img" '
        'aria-label="{n} turns, one below the other">{bars}</svg>'
    ).format(w=WIDTH, h=height * len(times), n=len(times), bars=bars)


def span_text(rollouts: Sequence[ListedRecord], field: str) -> str:
    """The lowest and the highest value of a field."""
    values = [one[field] for one in rollouts if isinstance(one.get(field), int | float)]
    if not values:
        return "–"
    low, high = number_text(min(values)), number_text(max(values))
    return low if low == high else f"{low}–{high}"
