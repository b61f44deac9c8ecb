"""What a browser finds: a page that says where things are, and API documentation, both without the internet."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from palestra.util.programs import missing

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
LINKS = {"a": "href", "link": "href", "script": "src", "img": "src"}


class Addresses(HTMLParser):
    """All addresses that a page names, by the tag that names them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LINKS.get(tag, ""))
        if address:
            self.found.append((tag, address))


def test_the_root_links_to_docs_health_and_api(server):
    page = server.http(key=None).get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    links = {address for _, address in Addresses(page.text).found}
    files = {"ui/static/icon.svg", "ui/static/view.css"}
    assert links == {"ui/", "docs", "openapi.json", "healthz", "readyz", "metrics"} | files
    assert {server.http(key=None).get(f"/{one}").status_code for one in files} == {200}
    assert {server.http().get(f"/{one}").status_code for one in links} == {200}
    assert server.http(key=None).head("/").status_code == 200


def test_the_root_tells_strangers_nothing_about_this_server(server):
    page = server.http(key=None).get("/").raise_for_status().text
    version = server.http().get("/openapi.json").json()["info"]["version"]
    for known in (server.name, server.model.name, str(server.folder), version):
        assert known not in page


def test_everything_on_the_docs_page_is_served_here(server):
    page = server.http(key=None).get("/docs")
    found = Addresses(page.text).found
    assert {tag for tag, _ in found} == {"link", "script"}
    for _, address in found:
        whole = urljoin(f"{server.url}/docs", address)
        assert urlsplit(whole).netloc == urlsplit(server.url).netloc
        asset = server.http(key=None).get(whole)
        assert (asset.status_code, len(asset.content) > 500) == (200, True)
    assert "url: 'openapi.json'" in page.text
    assert "http" not in page.text.replace("http-equiv", "")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_browser_is_told_to_ask_nobody_else(server, path):
    policy = server.http().get(path).headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "http" not in policy


def test_no_page_is_left_that_needs_a_cdn(server):
    assert server.http().get("/redoc").status_code == 404


@pytest.mark.e2e
def test_pages_need_no_key_where_the_api_does(make_server):
    stranger = make_server(require_key="always").http(key=None)
    assert [stranger.get(path).status_code for path in ("/", "/docs", "/openapi.json")] == [200, 200, 200]
    assert [stranger.get(path).status_code for path in ("/metrics", "/v1/models")] == [401, 401]


@pytest.mark.e2e
@pytest.mark.skipif(BROWSER is None, reason=str(missing("chromium")))
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_browser_shows_it_and_asks_no_other_machine(server, tmp_path: Path, path: str):
    assert BROWSER is not None
    log = tmp_path / "net.json"
    options = ["--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", f"--log-net-log={log}", "--dump-dom"]
    shown = subprocess.run(
        [BROWSER, *options, f"{server.url}{path}"], capture_output=True, text=True, timeout=110, check=True
    ).stdout
    assert ("Palestra" if path == "/" else "/api/v1/forward_backward") in shown
    events = [event.get("params") for event in json.loads(log.read_text())["events"]]
    request = {urlsplit(one["url"]).netloc for one in events if isinstance(one, dict) and "url" in one}
    assert request == {urlsplit(server.url).netloc}
