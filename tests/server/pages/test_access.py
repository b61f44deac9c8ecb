"""Who sees which page of a server: the rights of its keys, one owner apart from another, no page of another site."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue
from tests.waiting import until

PAGES = ("/server", "/episodes", "/playground", "/traces", "/platform", "/gym", "/keys")


def test_without_a_key_pages_lead_to_the_login_and_programs_get_401(open_browser):
    stranger = open_browser("")
    page = stranger.get("/server")
    assert (page.status_code, page.headers["location"]) == (303, "./login?next=server")
    assert stranger.get("/login").status_code == 200
    assert stranger.get("/static/view.css").status_code == 200
    answer = stranger.get("/api/v1/server")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "key_needed")
    assert stranger.post("/v1/chat/completions", json={}).status_code == 401


def test_a_key_becomes_a_cookie_that_no_script_and_no_other_site_gets(open_browser, keys):
    browser = open_browser("")
    answer = browser.post("/login", data={"key": keys["alice"], "next": "server"})
    assert (answer.status_code, answer.headers["location"]) == (303, "./server")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert "path" not in cookie.lower()
    assert keys["alice"] not in cookie
    assert browser.get("/server").status_code == 200
    browser.post("/logout")
    assert browser.get("/server").status_code == 303


@pytest.mark.parametrize(("name", "words"), [("a worker", "has the right &#39;worker&#39;"), (None, "not valid")])
def test_other_keys_do_not_open_it(open_browser, keys, name, words):
    answer = open_browser("").post("/login", data={"key": keys[name] if name else "tml-guess"})
    assert answer.status_code == 403
    assert words in answer.text
    assert "set-cookie" not in answer.headers


def with_long_time(cookie: str) -> str:
    """More digits than Python makes a number of."""
    number, _, proof = cookie.split(".")
    return f"{number}.{'9' * 5000}.{proof}"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c[:-1] + ("0" if c[-1] != "0" else "1"),
        lambda c: f"1{c}",
        lambda c: "9" * 40 + c,
        str.upper,
        with_long_time,
    ],
)
def test_a_forged_cookie_opens_nothing(open_browser, change):
    browser = open_browser("alice")
    ((name, value),) = browser.cookies.items()
    forged = httpx.Client(base_url=browser.base_url, cookies={name: change(value)}, verify=False, trust_env=False)
    assert forged.get("/server").status_code == 303


def test_a_cookie_ends_with_its_key(keyed, open_browser, keys):
    from click.testing import CliRunner

    from palestra.cli import main

    keys["dora"] = keyed.make_key("dora of pages")
    browser = open_browser("dora")
    assert browser.get("/server").status_code == 200
    gone = CliRunner().invoke(main, ["key", "revoke", "dora of pages", "--state", str(keyed.state)])
    assert gone.exit_code == 0, gone.output
    until(lambda: browser.get("/server").status_code == 303)


def test_a_key_in_a_header_works_as_for_the_api(keyed, keys):
    http = keyed.http(key=keys["alice"])
    assert http.get("/ui/api/v1/server").status_code == 200
    assert http.get("/ui/api/v1/runs").status_code == 403
    assert keyed.http(key=keys["a worker"]).get("/ui/api/v1/server").status_code == 401


def test_runs_are_for_admins(keyed, open_browser):
    alice, carol = open_browser("alice"), open_browser("carol")
    answer = alice.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "./server")
    assert alice.get("/runs/first").status_code == 403
    assert alice.get("/api/v1/runs").json()["error"]["code"] == "forbidden"
    assert carol.get("/").status_code == 200
    assert carol.get("/api/v1/runs").json()["runs"] == []


def test_no_route_of_the_runs_is_open_to_trainers(open_browser):
    """Whatever routes the dashboard gains. Plays of tasks belong to their owner; keys for metrics see none."""
    alice, prometheus, tried = open_browser("alice"), open_browser("prometheus"), 0
    routers = (getattr(one, "original_router", None) for one in create_app(Catalogue(Path())).routes)
    for route in (route for router in routers if router is not None for route in router.routes):
        assert isinstance(route, APIRoute)
        if route.path in ("/", "/login", "/logout"):
            continue
        caller = prometheus if "/platform" in route.path else alice
        for method in route.methods or ():
            answer = caller.request(method, re.sub(r"\{.*?\}", "first", route.path))
            assert answer.status_code == 403, (method, route.path, answer.text)
            tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("carol", ["Runs", "Sweeps", "Server", "Episodes", "Playground", "Platform", "Gym", "Owners", "Keys"]),
        ("alice", ["Server", "Episodes", "Playground", "Platform", "Owners"]),
        ("prometheus", ["Server", "Owners"]),
    ],
)
def test_links_lead_where_a_key_may_go(open_browser, name, links):
    browser = open_browser(name)
    page = browser.get("/server").text
    found = re.search(r'<nav class="nav-links".*?</nav>', page, re.DOTALL)
    assert found is not None
    assert re.findall(r">(\w+)</a>", found[0]) == links
    for path in re.findall(r'href="\./(\w*)"', found[0]):
        assert browser.get(f"/{path}").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}],
)
def test_pages_of_other_sites_change_nothing(open_browser, headers):
    carol = open_browser("carol")
    assert carol.post("/logout", headers=headers).status_code == 403
    assert carol.post("/v1/chat/completions", json={}, headers=headers).status_code == 403


def test_another_name_for_this_machine_is_refused(open_browser):
    assert open_browser("carol").get("/server", headers={"host": "evil.example"}).status_code == 403


def test_every_answer_forbids_scripts_from_elsewhere_and_frames(open_browser):
    carol = open_browser("carol")
    for path in (*PAGES, "/", "/login", "/static/server/live.js", "/api/v1/server", "/nowhere", "/v1/models"):
        policy = carol.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy


def test_a_path_before_the_pages_works(keyed, open_browser):
    carol = open_browser("carol")
    assert httpx.get(f"{keyed.url}/ui", trust_env=False).headers["location"] == "./ui/"
    for path in PAGES:
        page = carol.get(path).text
        assert not re.findall(r'(?:href|src|action|hx-get|hx-post|data-api)="/', page)


def test_nothing_is_asked_on_loopback_without_keys(shared_ephebe):
    server = shared_ephebe()
    page = httpx.get(f"{server.url}/ui/server", trust_env=False, timeout=60)
    assert page.status_code == 200
    assert "Log out" not in page.text
    assert httpx.get(f"{server.url}/ui/", trust_env=False, timeout=60).status_code == 200


def test_a_play_of_a_task_belongs_to_its_owner(open_browser):
    alice, bob, plays = open_browser("alice"), open_browser("bob"), "/api/v1/platform/plays"
    mine = alice.post(plays, json={"task": "keys-put_number-0b-17"}).json()["id"]
    assert [one["id"] for one in alice.get(plays).json()] == [mine]
    assert bob.get(plays).json() == []
    for path in (f"{plays}/{mine}", f"/platform/{mine}"):
        assert alice.get(path).status_code == 200
        assert bob.get(path).status_code == 404
    assert bob.post(f"{plays}/{mine}/calls", json={"tool": "list"}).status_code == 404
    assert bob.delete(f"{plays}/{mine}").status_code == 404
    assert alice.delete(f"{plays}/{mine}").json() == []
