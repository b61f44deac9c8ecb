"""The page of keys: for admins alone, a key is shown once, a revoked one is over."""

from __future__ import annotations

import itertools
import re

import httpx
import pytest

from tests.waiting import until

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"made on the page {next(_numbers)}"


def shown(browser, name: str) -> dict:
    (found,) = [one for one in browser.get("/api/v1/keys").json() if one["name"] == name]
    return found


def test_a_key_is_made_used_and_revoked(keyed, open_browser, name):
    carol = open_browser("carol")
    page = carol.post("/keys", data={"name": name, "owner": "<i>erin", "right": "trainer"})
    assert page.headers["cache-control"] == "no-store"
    (key,) = re.findall(r'<code class="copy">(tml-[\w-]+)</code>', page.text)
    assert "&lt;i&gt;erin" in page.text
    assert "<i>" not in page.text
    assert key not in carol.get("/keys").text
    assert shown(carol, name)["last_used_at"] is None
    http = httpx.Client(base_url=keyed.url, headers={"x-api-key": key}, verify=False, trust_env=False)
    assert http.get("/v1/models").status_code == 200
    until(lambda: shown(carol, name)["last_used_at"] is not None)
    row = carol.post(f"/keys/{shown(carol, name)['id']}/revoke").text
    assert "revoked" in row
    until(lambda: http.get("/v1/models").status_code == 401)
    assert carol.post(f"/keys/{shown(carol, name)['id']}/revoke").status_code == 404


def test_the_last_use_of_a_key_survives_the_server(mortal_keyed, name):
    admin = mortal_keyed.make_key(f"admin of {name}", right="admin")
    assert mortal_keyed.http(key=mortal_keyed.make_key(name)).get("/v1/models").status_code == 200
    mortal_keyed.stop()
    mortal_keyed.start()
    listed = mortal_keyed.http(key=admin).get("/ui/api/v1/keys").json()
    assert {one["name"]: one["last_used_at"] for one in listed}[name] is not None


def test_programs_make_keys_too(open_browser, name):
    carol = open_browser("carol")
    answer = carol.post("/api/v1/keys", json={"name": name, "right": "worker"})
    assert answer.headers["cache-control"] == "no-store"
    made = answer.json()
    assert made["key"].startswith("tml-")
    assert (made["about"]["owner"], made["about"]["right"]) == (name, "worker")
    again = carol.post("/api/v1/keys", json={"name": name})
    assert (again.status_code, "already has the name" in again.text) == (409, True)
    assert carol.post(f"/api/v1/keys/{made['about']['id']}/revoke").json()["revoked_at"] is not None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "x" * 101},
        {"name": "a\nb"},
        {"name": "x", "right": "king"},
        {"name": "x", "right": "episode"},
    ],
)
def test_a_bad_request_makes_no_key(open_browser, body):
    carol = open_browser("carol")
    before = len(carol.get("/api/v1/keys").json())
    assert carol.post("/api/v1/keys", json=body).status_code == 400
    assert carol.post("/keys", data=body).status_code == 400
    assert len(carol.get("/api/v1/keys").json()) == before


@pytest.mark.parametrize("who", ["alice", "prometheus"])
def test_others_neither_see_nor_change_keys(open_browser, who, name):
    other, carol = open_browser(who), open_browser("carol")
    for method, path in (
        ("GET", "/keys"),
        ("POST", "/keys"),
        ("GET", "/api/v1/keys"),
        ("POST", "/api/v1/keys/1/revoke"),
    ):
        assert other.request(method, path, data={"name": name} if method == "POST" else None).status_code == 403
    assert name not in carol.get("/keys").text


def test_a_page_of_another_site_makes_no_key(open_browser, name):
    carol = open_browser("carol")
    answer = carol.post("/keys", data={"name": name}, headers={"origin": "http://evil.example"})
    assert answer.status_code == 403
    assert name not in carol.get("/keys").text
