"""The dashboard in a real browser: a server in a thread, Debian's Chromium, and whatever the page complains about."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from palestra.net.serving import HttpServer
from palestra.util.programs import PROGRAMS, missing
from tests.waiting import until

AXE = Path(__file__).parents[2] / ".ui" / "node_modules" / "axe-core" / "axe.min.js"


def why_not() -> str | None:
    """Why no browser can be used here."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return "needs playwright: pip install -e '.[ui]'"
    return missing("chromium")


def find_browser() -> str | None:
    return PROGRAMS["chromium"].find()


@contextmanager
def served(app: Any, port: int = 0) -> Iterator[int]:
    """Serves an application in a thread; its port."""
    listener = socket.create_server(("127.0.0.1", port))
    server = HttpServer(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@contextmanager
def opened_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_page(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A page of its own context. Afterwards it must have complained about nothing: no error of a script, nothing
    refused by the Content-Security-Policy, nothing asked of another host."""
    context = browser.new_context(base_url=address, viewport={"width": 1300, "height": 850}, **options)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(f"script: {error}"))
    page.on("console", lambda said: complaints.append(said.text) if _is_complaint(said) else None)
    page.on("request", lambda asked: None if asked.url.startswith((address, "data:")) else complaints.append(asked.url))
    try:
        yield page
    finally:
        context.close()
    assert complaints == []


def _is_complaint(said: Any) -> bool:
    """An answer with an error is what some tests ask for."""
    return said.type == "error" and not any(text in said.text for text in ("Failed to load", "Response Status Error"))


def wait_for_charts(page: Any) -> None:
    page.locator('#board[aria-busy="false"] .chart canvas').first.wait_for()


def serious_findings(page: Any) -> dict[str, list[str]]:
    """What axe finds wrong with a page for people with disabilities, with the places; the page needs `bypass_csp`."""
    if not AXE.is_file():
        pytest.skip("needs axe-core: make test-ui installs it")
    page.add_script_tag(path=str(AXE))
    found = page.evaluate("axe.run()")["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    return {one["id"]: [node["html"][:200] for node in one["nodes"]][:3] for one in serious}


def is_too_wide(page: Any) -> bool:
    """Whether one has to scroll to the side."""
    return page.evaluate("document.scrollingElement.scrollWidth > innerWidth")
