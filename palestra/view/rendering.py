"""Templates as pages: where they lie, how figures are written, addresses that work behind any prefix.

Pages have no inline scripts or styles and only relative addresses; text of models goes through the filters `text` or
`line`.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from urllib.parse import urlencode

import msgspec
from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from palestra import __version__
from palestra.util.figures import duration_text, latency_text, number_text, size_text, time_text
from palestra.util.safe_text import safe_text
from palestra.view.access import own_path
from palestra.view.drawings import advantage_bars, curve_points, reward_class, span_text, turn_waterfall, waterfall
from palestra.view.rollouts.rollout_records import complete

FOLDER = Path(__file__).parent
MAX_TEXT = 20_000


def render(request: Request, template: str, status: int = 200, **content: object) -> HTMLResponse:
    """`root` in a template is the relative way to the dashboard's own root."""
    path = own_path(request.scope)
    root = "../" * (path.count("/") - 1) or "./"
    known = {"root": root, "path": path, "version": __version__, "folder": str(request.app.state.catalogue.root)}
    state = request.app.state
    page = state.templates.get_template(template).render(**known, **state.context(request), **content)
    return HTMLResponse(page, status_code=status)


def age_text(seconds: float | None) -> str:
    """Says roughly how long ago a time was."""
    if seconds is None:
        return "–"
    ago = max(0.0, time.time() - seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if ago >= size:
            return f"{ago / size:.0f} {unit} ago"
    return "just now"


def model_text(text: object, limit: int = MAX_TEXT) -> str:
    """Text of a model or an environment: control codes are written out, very long text is cut."""
    shown = str(text)
    cut = "" if len(shown) <= limit else f"\n… {len(shown) - limit} more characters; the raw JSON has them"
    return safe_text(shown[:limit]) + cut


def indented_json(value: object) -> str:
    """JSON in a form that is easy to read; text that is JSON already is parsed first."""
    try:
        return msgspec.json.format(value if isinstance(value, str) else msgspec.json.encode(value).decode(), indent=2)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return str(value)


def with_code(text: str) -> Markup:
    """Words of the documentation: what is between backticks becomes code."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))


def page_templates(*folders: Path) -> Environment:
    """The templates of the dashboard, and of what extends it."""
    found = Environment(
        loader=FileSystemLoader([*folders, FOLDER / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "number": lambda value: "–" if value is None else number_text(value),
        "moment": lambda value: "–" if value is None else time_text(value),
        "duration": duration_text,
        "seconds": lambda value: "–" if value is None else latency_text(value),
        "bytes": size_text,
        "age": age_text,
        "text": model_text,
        "json_text": lambda value: model_text(indented_json(value)),
        "complete": complete,
        "shell": lambda value: shlex.quote(safe_text(str(value), keep="")),
        "line": lambda value: safe_text(str(value), keep=""),
        "curve": curve_points,
        "ramp": lambda reward, bins: reward_class(reward, bins[0].low, bins[-1].high) if bins else "failed",
        "advantages": advantage_bars,
        "waterfall": waterfall,
        "turn_waterfall": turn_waterfall,
        "span": span_text,
        "query": lambda fields: urlencode({name: value for name, value in fields.items() if value != ""}, doseq=True),
        "code": with_code,
    }
    return found
