"""Scripts of others: exactly the published files, with their licences, and nothing from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

VIEW = Path(__file__).parents[2] / "palestra" / "view"
VENDOR = VIEW / "static" / "vendor"
ROWS = json.loads((VENDOR / "vendored.json").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_each_file_is_the_published_one(row):
    assert hashlib.sha256((VENDOR / row["file"]).read_bytes()).hexdigest() == row["sha256"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", row["version"])


def test_every_file_is_recorded_and_has_a_licence():
    files = {file.name for file in VENDOR.iterdir()}
    licences = {f"{row['file'].split('.')[0]}.LICENSE" for row in ROWS}
    assert files == {row["file"] for row in ROWS} | licences | {"vendored.json"}


def test_pages_name_no_other_host_and_no_inline_script_or_style():
    own = [*(VIEW / "templates").glob("*.html"), *(VIEW / "static").glob("*.*")]
    for file in own:
        text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://", text), file.name
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", text), file.name
