"""The pages of a server in a browser: the login, the server live, a chat with its tokens, buttons, behind a proxy."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.server.episodes.conftest import Api
from tests.server.model_api.conftest import Ephebe
from tests.server.model_api.stockroom import TOOLS
from tests.view.browser import opened_browser, opened_page, serious_findings, served, why_not
from tests.view.folders import HOSTILE

pytestmark = [pytest.mark.ui, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
PREFIX = "/a/prefix"
PAGES = ("server", "episodes", "playground", "traces", "platform", "gym", "owners", "keys", "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as found:
        yield found


@pytest.fixture
def page(browser: Any, keyed: Ephebe) -> Iterator[Any]:
    with opened_page(browser, keyed.url) as found:
        yield found


def log_in(page: Any, key: str, where: str = "server", root: str = "/ui") -> None:
    page.goto(f"{root}/{where}")
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Open").click()
    page.wait_for_url(f"**{root}/{where}")


def say(page: Any, text: str, answers: int = 1) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")
    page.locator(".message footer a").nth(answers - 1).wait_for()


def test_one_logs_in_watches_the_server_and_talks_to_a_model(page, keys):
    log_in(page, keys["carol"])
    sampled = page.locator('[data-chart="Throughput"] .legend b').nth(1)
    page.locator('[data-chart="Throughput"] canvas').wait_for()
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("link", name="Playground").click()
    say(page, "What is 3 + 4?")
    page.get_by_text("tokens", exact=True).last.click()
    page.locator(".tokens span").first.hover()
    assert re.search(r"log-probability\s*-?\d", page.locator("#token-facts").inner_text())
    page.get_by_role("link", name="trace").click()
    page.wait_for_url("**/traces/trace-*")
    assert "What is 3 + 4?" in page.locator(".transcript").inner_text()
    assert page.locator(".tokens span").count() >= 1
    page.get_by_role("link", name="Server").click()
    page.get_by_role("cell", name="sample", exact=True).wait_for()  # the call, in the table of the last minutes
    sampled.filter(has_text=re.compile(r"\d")).wait_for()
    page.get_by_role("button", name=re.compile("carol")).click()
    page.wait_for_url("**/ui/login")


def test_two_models_answer_side_by_side(page, keys):
    log_in(page, keys["alice"], "playground")
    page.get_by_label("beside").select_option("ephebe")
    say(page, "What is 1 + 2?", answers=2)
    assert page.locator(".column").count() == 2
    assert page.locator(".message.role-user").count() == 2
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".message").count() == 0


def test_tools_are_pasted_called_and_their_results_sent_back(page, keys):
    log_in(page, keys["alice"], "playground")
    page.get_by_text("Tools", exact=True).click()
    tools = page.get_by_label("Tool definitions as JSON")
    tools.fill("{not JSON")
    page.locator("#text").fill("How many cups and hats are there together?")
    page.locator("#text").press("Enter")
    page.get_by_role("alert").get_by_text("cannot be read").wait_for()
    tools.fill(json.dumps(TOOLS))
    page.locator("select[name=tool_choice]").select_option("required")
    page.locator("#text").press("Enter")
    page.get_by_role("button", name="Send the result").wait_for()
    called = page.locator(".open-call b").first.inner_text()
    assert called in ("count", "add", "subtract")
    page.locator("select[name=tool_choice]").select_option("none")
    page.get_by_label(f"Result of {called}").first.fill("seven <b>hats</b>")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send the result").click()
    user, assistant, *results = json.loads(sent.value.post_data)["messages"]
    assert (user["role"], assistant["tool_calls"][0]["function"]["name"]) == ("user", called)
    assert results[0] == {
        "role": "tool",
        "tool_call_id": assistant["tool_calls"][0]["id"],
        "content": "seven <b>hats</b>",
    }
    page.locator(".message footer a").nth(1).wait_for()
    assert page.get_by_role("button", name="Send the result").count() == 0


def test_texts_stay_text(page, keys):
    log_in(page, keys["alice"], "playground")
    page.on("dialog", lambda _: pytest.fail("a text has opened a dialog"))
    say(page, HOSTILE)
    said = page.locator(".role-user .said").inner_text()
    assert "<script>alert(1)</script>" in said
    assert "\\x1b[31m" in said
    assert page.locator(".said script, .said img").count() == 0


def test_a_refusal_of_the_endpoint_is_shown_beside_the_question(page, keys):
    log_in(page, keys["alice"], "playground")
    page.goto("/ui/playground?model=nobody")
    page.locator("#text").fill("Are you there?")
    page.locator("#text").press("Enter")
    page.get_by_role("alert").wait_for()
    assert "nobody" in page.get_by_role("alert").inner_text()
    page.locator("#send:enabled").wait_for()


def test_an_episode_is_cancelled_after_a_question(page, keys, alice: Api):
    (episode_id,) = alice.register()
    log_in(page, keys["alice"], "episodes")
    page.locator("select[name=run]").select_option(alice.run)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("row").filter(has_text=episode_id).get_by_role("button", name="Cancel").click()
    page.get_by_role("row").filter(has_text=episode_id).get_by_text("cancelled", exact=True).wait_for()
    assert alice.episode(episode_id)["state"] == "cancelled"


def test_a_key_is_made_and_revoked(page, keys):
    log_in(page, keys["carol"], "keys")
    page.get_by_label("Name").fill("made in a browser")
    page.get_by_role("button", name="Make a key").click()
    assert page.locator(".made .copy").inner_text().startswith("tml-")
    page.once("dialog", lambda dialog: dialog.accept())
    row = page.get_by_role("row").filter(has_text="made in a browser")
    row.get_by_role("button", name="Revoke").click()
    row.get_by_text("revoked").wait_for()


def test_an_admin_limits_an_owner(page, keys):
    log_in(page, keys["carol"], "owners")
    page.get_by_label("Owner", exact=True).fill("alice of pages")
    page.get_by_label("Limit").select_option("checkpoint bytes")
    page.get_by_label("Amount").fill("40GB")
    page.get_by_role("button", name="Set the limit").click()
    row = page.get_by_role("row").filter(has_text="alice of pages").first
    row.get_by_text("of 40 GB").wait_for()
    page.get_by_role("link", name="by day").click()
    page.get_by_role("columnheader", name="Day").wait_for()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 1300), ("light", 420)])
def test_pages_fit_any_window_in_both_themes(browser, keyed, keys, scheme, width):
    size = {"width": width, "height": 800}
    with opened_page(browser, keyed.url, color_scheme=scheme) as page:
        page.set_viewport_size(size)
        log_in(page, keys["carol"])
        for path in PAGES:
            page.goto(f"/ui/{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, keyed, keys, alice: Api, scheme):
    (episode_id,) = alice.register()
    told = {}
    for name, paths in {
        "carol": PAGES,
        "alice": ("server", "owners", "episodes", f"episodes/{episode_id}", "playground"),
    }.items():
        with opened_page(browser, keyed.url, color_scheme=scheme, bypass_csp=True) as page:
            log_in(page, keys[name])
            for path in paths:
                page.goto(f"/ui/{path}")
                told[path] = serious_findings(page)
    assert {path: found for path, found in told.items() if found} == {}


def test_everything_works_behind_a_proxy_with_a_path(browser, keyed, keys):
    with served(_proxy(keyed.url)) as port, opened_page(browser, f"http://127.0.0.1:{port}") as page:
        root = f"{PREFIX}/ui"
        log_in(page, keys["carol"], root=root)
        (cookie,) = page.context.cookies()
        assert cookie["path"] == root
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_role("link", name="Playground").click()
        page.wait_for_url(f"**{root}/playground**")
        say(page, "What is 2 + 3?")
        page.get_by_role("link", name="trace").click()
        page.wait_for_url(f"**{root}/traces/*")


def _proxy(url: str) -> Starlette:
    """Passes everything on without the path before it; the server does not know of it."""
    client = httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=60)

    async def pass_on(request: Request) -> StreamingResponse:
        path = request.url.path.removeprefix(PREFIX)
        sent = client.build_request(
            request.method,
            f"{path}?{request.url.query}",
            headers=request.headers.raw,
            content=await request.body(),
        )
        answer = await client.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()

        response = StreamingResponse(body(), status_code=answer.status_code)
        response.raw_headers = [pair for pair in answer.headers.raw if pair[0].lower() != b"transfer-encoding"]
        return response

    return Starlette(routes=[Route(PREFIX + "/{path:path}", pass_on, methods=["GET", "POST", "HEAD"])])
