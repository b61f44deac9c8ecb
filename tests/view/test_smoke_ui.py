"""Every day, where a browser is: from the list of runs to a token."""

from __future__ import annotations

import pytest

from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue
from tests.view.browser import opened_browser, opened_page, served, wait_for_charts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_one_clicks_from_the_runs_to_a_token(root):
    app = create_app(Catalogue(root))
    with served(app) as port, opened_browser() as browser, opened_page(browser, f"http://127.0.0.1:{port}") as page:
        page.goto("/")
        page.get_by_role("link", name="first").click()
        wait_for_charts(page)
        plot = page.locator('[data-chart="Reward"] .u-over')
        box = plot.bounding_box()
        plot.click(position={"x": box["width"] - 2, "y": 60})
        page.wait_for_url("**/rollouts?step=4")
        page.locator(".dot").first.click()
        page.locator("#strip span[data-token]").last.hover()
        assert "sampled, turn 2" in page.locator("#inspector").inner_text()
