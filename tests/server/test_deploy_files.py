"""Files of `deploy/` that speak of our server: its metrics and settings, and alerts that are explained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from palestra.config.serve import load_serve_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONFIGS = (
    "serve.yaml",
    "k8s/base/serve.yaml",
    "k8s/one-gpu/serve.yaml",
    "k8s/eight-gpus/serve.yaml",
    "k8s/ray/serve.yaml",
)
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def metrics() -> dict[str, set[str]]:
    """Names and labels, which another test compares with those of the server."""
    rows = re.findall(r"^\| `(palestra_\w+)` \| ([\w, ]*)\|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    return {name: {label.strip() for label in labels.split(",")} - {""} for name, labels in rows}


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return group["rules"]


def queries() -> list[str]:
    panels = json.loads((DEPLOY / "grafana/palestra.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in alerts()]


def labels_in(query: str) -> set[str]:
    grouped = re.findall(r"by \(([^)]*)\)", query)
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    return {label.strip() for group in grouped for label in group.split(",")} | set(selected)


@pytest.mark.parametrize("query", queries())
def test_queries_name_metrics_and_labels_that_the_server_has(query):
    known = metrics()
    if "palestra_" not in query:
        assert query == 'up{job="palestra"} == 0'
        return
    found = re.findall(r"palestra_\w+", query)
    names = [name if name in known else HISTOGRAM.sub("", name) for name in found]
    assert [name for name in names if name not in known] == []
    for name in names:
        assert labels_in(query) - {"le"} <= known[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_taken_by_the_server(name):
    config = load_serve_config([DEPLOY / name], [])
    assert (config.host, config.is_loopback, str(config.state)) == ("0.0.0.0", False, "/var/lib/palestra")


def test_every_alert_is_explained():
    rows = re.findall(r"^\| `(Palestra\w+)` \|", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE)
    assert rows == [rule["alert"] for rule in alerts()]
