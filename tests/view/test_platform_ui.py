"""A task of the platform in a browser: chosen from the list, played by forms, judged beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue
from tests.view.browser import is_too_wide, opened_browser, opened_page, serious_findings, served, why_not

pytestmark = [pytest.mark.ui, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture
def page(root: Path):
    with (
        served(create_app(Catalogue(root))) as port,
        opened_browser() as browser,
        opened_page(browser, f"http://127.0.0.1:{port}", bypass_csp=True) as found,
    ):
        yield found


def test_a_person_solves_a_task_by_forms_and_sees_diff_and_verdict(page):
    page.goto("/")
    page.get_by_role("link", name="Platform").click()
    page.get_by_role("link", name="Mail 16 tools").click()
    page.get_by_label("Number of the task of mark_read").fill("17")
    page.get_by_role("button", name="Play mark_read").click()
    page.wait_for_url("**/platform/*")
    number = "".join(char for char in page.locator(".asked").inner_text() if char.isdigit())
    verdict = page.get_by_role("region", name="Verdict")
    assert "0" in verdict.locator("b").inner_text()
    tool = page.locator("details", has=page.get_by_text("Call set_flags", exact=True))
    tool.locator("summary").click()
    tool.get_by_label("id").fill(number)
    tool.get_by_label("read").select_option("true")
    tool.get_by_role("button", name="Call set_flags").click()
    page.locator(".verdict b.passed").wait_for()
    assert page.locator(".changes tbody tr").count() == 1
    assert number in page.locator(".changes").inner_text()
    assert page.locator("#play .piece-call").count() == 1
    page.get_by_role("button", name="Begin again").click()
    page.locator(".verdict b.lost").wait_for()
    assert page.locator("#play .piece-call").count() == 0


def test_its_pages_fit_narrow_windows_and_readers_of_screens(page):
    page.goto("/platform?app=mail")
    assert serious_findings(page) == {}
    page.get_by_label("Task", exact=True).fill("travel")
    page.get_by_role("button", name="Play", exact=True).click()
    page.get_by_role("alert").wait_for()
    page.get_by_label("Task", exact=True).fill("mail-mark_read-0-17")
    page.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_url("**/platform/*")
    page.locator("details").first.locator("summary").click()
    assert serious_findings(page) == {}
    page.set_viewport_size({"width": 390, "height": 800})
    assert not is_too_wide(page)
