"""Who may look, and what a browser may do with what it gets."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from palestra.view.access import Access, is_local_address
from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue

API = "/api/v1/runs"


@pytest.fixture
def keyed(root, open_client) -> TestClient:
    return open_client(root, Access(key="a-long-key"), base_url="http://view.example:8400", follow_redirects=False)


@pytest.mark.parametrize("host", ["localhost:8400", "127.0.0.1", "[::1]:8400", "here.localhost"])
def test_this_machine_needs_no_key(client, host):
    assert client.get(API, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8400", "127.0.0.1.evil.example", "", "[", "0.0.0.0"])
def test_another_name_for_this_machine_is_refused(client, host):
    assert client.get(API, headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_pages_of_other_sites_change_nothing(client, root, headers):
    answer = client.post(f"{API}/first/labels", json={"tag": "forged"}, headers=headers)
    assert answer.status_code == 403
    assert not (root / "first" / "labels.jsonl").exists()
    assert client.post("/runs/first/star", headers=headers).status_code == 403


def test_a_page_of_our_own_changes_what_it_may(client):
    headers = {"origin": "http://localhost:8400", "sec-fetch-site": "same-origin"}
    assert client.post(f"{API}/first/labels", json={"tag": "own"}, headers=headers).status_code == 200


def test_every_answer_forbids_scripts_from_elsewhere_and_frames(client):
    for path in ("/", "/runs/first", API, "/static/view.css", "/nowhere", "/runs/nobody"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert "frame-ancestors 'none'" in policy
        assert client.get(path).headers["x-content-type-options"] == "nosniff"


def test_an_error_that_nobody_has_foreseen_is_a_page_with_the_same_headers(root):
    app = create_app(Catalogue(root))
    expected = TestClient(app, base_url="http://localhost").get("/").headers

    def break_down() -> None:
        raise ZeroDivisionError

    for path in ("/broken", "/api/v1/broken"):
        app.router.add_api_route(path, break_down)
        with pytest.raises(ZeroDivisionError):  # for the log
            TestClient(app, base_url="http://localhost").get(path)
        answer = TestClient(app, base_url="http://localhost", raise_server_exceptions=False).get(path)
        assert answer.status_code == 500
        for name in ("content-security-policy", "x-content-type-options", "x-frame-options", "referrer-policy"):
            assert answer.headers[name] == expected[name]
        assert "bug of the dashboard" in answer.text


def test_a_long_body_is_refused(client):
    assert client.post(f"{API}/first/labels", content=b"x" * 100_000).status_code == 413


def test_with_a_key_nothing_is_shown_without_it(keyed):
    assert keyed.get(API).status_code == 401
    page = keyed.get("/runs/first/config?against=x")
    assert (page.status_code, page.headers["location"]) == (303, "../../login?next=runs%2Ffirst%2Fconfig%3Fagainst%3Dx")
    assert keyed.get("/static/view.css").status_code == 200
    assert keyed.get(API, headers={"x-api-key": "a-long-key"}).status_code == 200
    assert keyed.get(API, headers={"authorization": "Bearer a-long-key"}).status_code == 200
    assert keyed.get(API, headers={"x-api-key": "another"}).status_code == 401


def test_the_key_opens_a_browser_by_a_cookie(keyed):
    wrong = keyed.post("/login", data={"key": "guess"})
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (403, False)
    right = keyed.post("/login", data={"key": "a-long-key", "next": "runs/first"})
    assert (right.status_code, right.headers["location"]) == (303, "./runs/first")
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "a-long-key" not in cookie
    assert keyed.get("/runs/first").status_code == 200


def test_cookies_of_other_programs_on_this_host_do_no_harm(keyed):
    own = keyed.post("/login", data={"key": "a-long-key"}).headers["set-cookie"].partition(";")[0]
    keyed.cookies.clear()
    for other in ('theirs={"a": [1, 2]}', "odd name=1", "=", "a(b)=c"):
        assert keyed.get(API, headers={"cookie": f"{other}; {own}"}).status_code == 200


@pytest.mark.parametrize(
    "target", ["//evil.example", "/\\evil.example", "http://evil.example", "\\\\evil", "javascript:x", "../../x"]
)
def test_a_login_leads_nowhere_else(keyed, target):
    assert keyed.post("/login", data={"key": "a-long-key", "next": target}).headers["location"] == "./"


def test_behind_a_proxy_its_name_is_let_through(root, open_client):
    client = open_client(root, Access(hosts=("runs.example",)), base_url="https://runs.example")
    assert client.get(API).status_code == 200
    assert client.get(API, headers={"host": "evil.example"}).status_code == 403


def test_addresses_are_relative_so_that_any_prefix_works(client):
    page = client.get("/runs/first/config").text
    assert 'href="/' not in page
    assert 'src="/' not in page
    assert 'href="../../static/view.css' in page


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_only_loopback_is_local(host, is_local):
    assert is_local_address(host) is is_local
