"""The description of each training metric, for the dashboard: `docs/metrics.md` as JSON.

python -m scripts.reference.metric_descriptions   # writes palestra/view/runs/metric_descriptions.json anew
"""

from __future__ import annotations

import json
import re

from palestra.view.runs.metric_descriptions import FILE
from scripts.reference.links import ROOT
from scripts.reference.metrics import PAGE


def metric_descriptions() -> str:
    """The JSON file's content, as the page wants it."""
    rows: dict[str, dict[str, str]] = {}
    for line in (ROOT / PAGE).read_text(encoding="utf-8").splitlines():
        cells = [_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name in re.findall(r"`([\w/<>@.-]+/[\w/<>@.-]+)`", cells[0]) if len(cells) == 3 else []:
            rows.setdefault(name, {"name": name, "meaning": cells[1], "healthy": cells[2]})
    return json.dumps(list(rows.values()), indent=1, ensure_ascii=False) + "\n"


def _plain(cell: str) -> str:
    """A table's cell without links and escapes; code stays between its backticks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("\\|", "|").strip()


if __name__ == "__main__":
    FILE.write_text(metric_descriptions(), encoding="utf-8")
