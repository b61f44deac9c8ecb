"""Times as models write them."""

from __future__ import annotations

import pytest

from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.times import moment, span


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("2026-03-04", "2026-03-04T00:00:00"),
        (" 2026-03-04T14:30 ", "2026-03-04T14:30:00"),
        ("2026-03-04 14:30", "2026-03-04T14:30:00"),
        ("2026-03-04T14:30:15.25", "2026-03-04T14:30:15"),
    ],
)
def test_times_are_kept_in_one_form(written: str, kept: str):
    assert moment(written, "start") == kept


@pytest.mark.parametrize(
    "written", ["", "soon", "04.03.2026", "2026-02-30", "2026-03-04T14:30+01:00", "0001-01-01", "9999-12-31"]
)
def test_anything_else_is_refused_with_a_way_to_write_it(written: str):
    with pytest.raises(ToolError) as response:
        moment(written, "start", at_end=True)
    assert response.value.code == "bad_date"
    assert "2026-03-04" in response.value.hint


def test_a_day_at_the_end_is_in_the_span_and_midnight_is_not():
    assert span("2026-03-04", "2026-03-04") == ("2026-03-04T00:00:00", "2026-03-05T00:00:00")
    assert span("2026-03-04", "2026-03-05T00:00") == ("2026-03-04T00:00:00", "2026-03-05T00:00:00")
    with pytest.raises(ToolError):
        span("2026-03-04T00:00", "2026-03-04T00:00")
