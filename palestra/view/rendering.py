"""Templates as pages: where they lie, how figures are written, addresses that work behind any prefix.

Owns: the environment of Jinja. Never touches: data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from palestra import __version__
from palestra.util.figures import duration_text, number_text, time_text
from palestra.util.safe_text import safe_text
from palestra.view.access import own_path

FOLDER = Path(__file__).parent
MAX_TEXT = 20_000


def render(request: Request, template: str, status: int = 200, **content: object) -> HTMLResponse:
    """`root` in a template is the relative way to the dashboard's own root."""
    path = own_path(request.scope)
    root = "../" * (path.count("/") - 1) or "./"
    known = {"root": root, "path": path, "version": __version__, "folder": str(request.app.state.catalogue.root)}
    return HTMLResponse(TEMPLATES.get_template(template).render(**known, **content), status_code=status)


def curve_points(values: Sequence[float], width: int, height: int) -> str:
    """The points of a small curve, for an SVG's polyline."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (height - 3) / (high - low) if high > low else 0.0
    across = (width - 2) / (len(values) - 1)
    return " ".join(f"{1 + i * across:.1f},{height - 1.5 - (v - low) * scale:.1f}" for i, v in enumerate(values))


def age_text(seconds: float | None) -> str:
    """How long ago a time was, roughly."""
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


def with_code(text: str) -> Markup:
    """Words of the documentation: what is between backticks becomes code."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))


def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "number": lambda value: "–" if value is None else number_text(value),
        "moment": lambda value: "–" if value is None else time_text(value),
        "duration": duration_text,
        "age": age_text,
        "text": model_text,
        "line": lambda value: safe_text(str(value), keep=""),
        "curve": curve_points,
        "code": with_code,
    }
    return found


TEMPLATES = _templates()
