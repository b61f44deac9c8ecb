"""The page that browsers see while the server starts or stands by: how long it has been at it, and how far it is."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping

from palestra.util.figures import duration_text

REFRESH_S = 2
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="{refresh_s}">
<title>Palestra is not ready yet</title>
<style>
body {{ font: 1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd }} }}
</style>
<h1>Palestra is not ready yet</h1>
<p>{reason}, for {elapsed} so far.</p>
<p>{progress}</p>
<p>This page looks again every {refresh_s} seconds.</p>
</html>
"""


def starting_page(reason: str, begin: float, engines: Mapping[str, str | None] | None) -> str:
    """`begin`: by the monotonic clock. `engines`: what each base model waits for, None for those that are ready; None
    before it is known which there are."""
    if engines is None:
        progress = "The database and the journal are being opened; the models come next."
    else:
        waiting = [f"{html.escape(name)} ({html.escape(why)})" for name, why in engines.items() if why is not None]
        progress = f"{len(engines) - len(waiting)} of {len(engines)} models are ready"
        progress += f"; waiting for {', '.join(waiting)}." if waiting else "."
    return PAGE.format(
        reason=html.escape(reason[:1].upper() + reason[1:]),
        elapsed=duration_text(time.monotonic() - begin),
        progress=progress,
        refresh_s=REFRESH_S,
    )
