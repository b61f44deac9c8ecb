"""`make test-ui`: every page in a browser, live, by keyboard, in both themes, with texts that mean harm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import RunFolder
from palestra.training.batches.grpo_batch import build_batch
from palestra.view.access import Access
from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue
from tests.training.records import group_of, make_config, make_rollout, make_turn
from tests.view.browser import (
    is_too_wide,
    opened_browser,
    opened_page,
    serious_findings,
    served,
    wait_for_charts,
    why_not,
)
from tests.view.folders import ACCIDENTS, HOSTILE, figures, made_read_only, write_run
from tests.waiting import until

pytestmark = [pytest.mark.ui, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

TRAIN = ["steps=3", "rollout.groups_per_step=3", "rollout.group_size=4", "eval.tasks=8", "eval.every=3"]
PAGES = (
    "/",
    "/runs/real",
    "/runs/real/config?against=first",
    "/runs/real/log",
    "/runs/real/events",
    "/runs/real/checkpoints",
    "/runs/real/rollouts?step=2",
    "/runs/real/rollouts?part=eval",
    "/runs/real/rollout?step=2&id={id}",
    "/runs/real/rollout?step=2&id={id}&beside={id}",
    "/compare?run=real&run=first",
    "/runs/nobody",
    "/login",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A real run of the bundled model, and one that is written by hand."""
    root = tmp_path_factory.mktemp("ui") / "runs"
    command = [sys.executable, "-m", "palestra", "train", "demo", f"runs={root}", "--name", "real", "--display", "none"]
    subprocess.run([*command, *TRAIN], check=True, timeout=500)
    write_run(root)
    return root


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(runs):
    with served(create_app(Catalogue(runs))) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def page(browser, address):
    with opened_page(browser, address) as found:
        yield found


@pytest.fixture(scope="module")
def rollout_id(runs) -> str:
    return RunReader(runs / "real").read_rollouts(2)[0]["id"]


def chart(page, title: str):
    return page.locator(f'[data-chart="{title}"]')


def drag(page, target, begin: float, end: float) -> None:
    box = target.bounding_box()
    page.mouse.move(box["x"] + begin * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 50, steps=5)
    page.mouse.up()


def test_a_real_run_has_all_four_rows_and_explains_itself(page):
    page.goto("/runs/real")
    wait_for_charts(page)
    assert page.locator(".row-title h2").all_inner_texts() == ["Learning", "Health", "Behaviour", "Speed"]
    chart(page, "Reward").get_by_role("button", name="What Reward means").click()
    assert "mean reward of graded rollouts, before penalties" in page.locator("[popover]:popover-open").inner_text()


def test_from_a_point_of_the_curve_to_the_token_that_made_it(page):
    page.goto("/runs/real")
    wait_for_charts(page)
    plot = chart(page, "Reward").locator(".u-over")
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] / 2, "y": 40})
    page.wait_for_url("**/rollouts?step=2")
    page.locator(".dot").first.click()
    span = page.locator("#strip span.tk-trained").first
    span.hover()
    facts = page.locator("#inspector").inner_text()
    for word in ("token", "sampler", "trainer", "gap", "entropy", "advantage"):
        assert word in facts
    assert re.search(r"entropy\s*\d", facts)
    page.get_by_text("entropy", exact=True).first.click()
    assert "nats" in page.locator("#token-legend").inner_text()
    assert page.locator("#strip span[class^=lp]").count() > 0
    page.get_by_text("trainer − sampler").click()
    assert "minus the sampler's" in page.locator("#token-legend").inner_text()
    page.locator("#strip").focus()
    before = page.locator("#inspector").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#inspector").inner_text() != before


def test_a_brush_on_one_chart_is_a_brush_on_all_and_can_be_undone(page):
    page.goto("/runs/first")
    wait_for_charts(page)
    plot = chart(page, "Reward").locator(".u-over")
    drag(page, plot, 0.3, 0.7)
    page.locator("#unzoom").wait_for(state="visible")
    low, high = map(float, page.locator("#board").get_attribute("data-range").split())
    assert 1.5 < low < 2.5 < high < 3.5
    assert page.url.endswith("/runs/first")  # a drag is no click
    page.locator("#unzoom").click()
    page.locator('#board[data-range=""]').wait_for()


def test_axes_and_smoothing_redraw(page):
    page.goto("/runs/first")
    wait_for_charts(page)
    for axis in ("tokens", "time", "step"):
        with page.expect_response(f"**/charts?x={axis}*"):
            page.locator(".choice").get_by_text(axis).click()
        wait_for_charts(page)
    page.locator("#smooth").fill("0.8")
    page.reload()
    wait_for_charts(page)
    assert page.locator("#smooth").input_value() == "0.8"


def test_points_come_while_a_run_writes_and_go_on_after_the_server_was_away(browser, tmp_path):
    app = create_app(Catalogue(tmp_path))
    with RunFolder.create(tmp_path, "live", make_config(steps=9)) as run:
        run.write_metrics(1, figures(2))
        with served(app) as port:
            context = browser.new_context(base_url=f"http://127.0.0.1:{port}")
            page = context.new_page()
            page.goto("/runs/live")
            wait_for_charts(page)
            reward = chart(page, "Reward").locator(".legend b").first
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url) if "/charts" in request.url else None)
            run.write_metrics(2, figures(2) | {"reward/mean": 0.625})
            chart(page, "Reward").locator("b", has_text="0.625").wait_for()
            assert asked == []  # a point was added; nothing was read anew
            run.write_metrics(3, figures(3) | {"eval/success": 0.5})  # a chart that was not there
            chart(page, "Evaluation").wait_for()
            page.wait_for_function("document.querySelector('#run-head').textContent.includes('3 of 9')")
        run.write_metrics(4, figures(4) | {"reward/mean": 0.75})  # nobody is listening
        with served(app, port):
            chart(page, "Reward").locator("b", has_text="0.75").wait_for()
            assert reward.inner_text() == "0.75"
            run.finish(RunStatus.DONE)
            run.close()
            page.locator("#run-head .state-done").wait_for()
            shutil.rmtree(tmp_path / "live")
            page.get_by_text("The folder of this run was deleted.").wait_for()
            context.close()


def test_a_real_run_is_followed_from_its_first_second_to_its_end(browser, tmp_path):
    command = [sys.executable, "-m", "palestra", "train", "demo", f"runs={tmp_path}", "--name", "going"]
    with (
        subprocess.Popen([*command, "--display", "none", *TRAIN]) as training,
        served(create_app(Catalogue(tmp_path))) as port,
        opened_page(browser, f"http://127.0.0.1:{port}") as page,
    ):
        try:
            until((tmp_path / "going" / "summary.json").is_file, timeout_s=200)
            page.goto("/runs/going")
            page.evaluate("window.isTheSamePage = true")
            page.locator("#live", has_text="live").wait_for()
            for step in (1, 2, 3):
                page.locator("#run-head", has_text=re.compile(f"[{step}-3] of 3")).wait_for(timeout=200_000)
            wait_for_charts(page)
            page.locator("#run-head .state-done").wait_for(timeout=200_000)
            assert chart(page, "Evaluation").locator(".legend b").first.inner_text() != ""
            last = RunReader(tmp_path / "going").read_metrics()[-1]
            shown = float(chart(page, "Reward").locator(".legend b").first.inner_text())
            assert shown == pytest.approx(last["reward/mean"], abs=1e-3)
            assert page.evaluate("window.isTheSamePage")
            assert training.wait(200) == 0
        finally:
            training.kill()


def test_runs_are_filtered_starred_and_reached_by_keys(page):
    page.goto("/")
    page.keyboard.press("/")
    page.keyboard.type("fir")
    page.locator("text=1 of 2 runs").wait_for()
    assert page.locator("tbody tr").count() == 1
    page.get_by_role("button", name="Star first").click()
    page.locator('.star[aria-pressed="true"]').wait_for()
    page.locator("#filter").fill("")
    page.locator("text=2 of 2 runs").wait_for()
    assert page.locator("tbody tr").first.locator(".star").get_attribute("aria-pressed") == "true"


def test_ticked_runs_are_compared(page):
    page.goto("/")
    page.get_by_label("Compare first").check()
    page.get_by_label("Compare real").check()
    with page.expect_response(lambda answer: answer.request.headers.get("hx-request") == "true"):
        pass  # the table is read anew every few seconds, and keeps what is ticked
    page.get_by_role("button", name="Compare").click()
    wait_for_charts(page)
    assert page.locator(".compared").count() == 2
    assert chart(page, "reward/mean").locator(".legend li").count() == 2


CUT_LEGENDS = """() => [...document.querySelectorAll(".legend")].filter((legend) => {
  const edge = legend.parentElement.getBoundingClientRect().right;
  return [...legend.querySelectorAll("b")].some((value) => value.getBoundingClientRect().right > edge)
    || legend.getBoundingClientRect().bottom > legend.nextElementSibling.getBoundingClientRect().top + 1;
}).length"""
SPILLED_CHOICES = """() => {
  const boxes = [...document.querySelectorAll("#token-color span")].map((one) => one.getBoundingClientRect());
  const frame = document.querySelector("#token-color").getBoundingClientRect();
  const meet = (a, b, low, high) => a[low] < b[high] - 1 && b[low] < a[high] - 1;
  const overlap = (a, b) => meet(a, b, "left", "right") && meet(a, b, "top", "bottom");
  return boxes.filter((box, i) => box.right > frame.right + 1 || box.height > 30
    || boxes.slice(i + 1).some((other) => overlap(box, other))).length;
}"""


@pytest.mark.parametrize("width", [360, 760, 1010, 1300])
def test_legends_and_token_filters_are_whole_at_every_width(browser, tmp_path, width):
    names = [f"{'a-long-name-' * 8}{one}" for one in "ab"] + ["short"]
    for name in names:
        write_run(tmp_path / "runs", name)
    with (
        served(create_app(Catalogue(tmp_path / "runs"))) as port,
        opened_page(browser, f"http://127.0.0.1:{port}") as page,
    ):
        page.set_viewport_size({"width": width, "height": 850})
        page.goto("/compare?" + "&".join(f"run={name}" for name in names))
        wait_for_charts(page)
        assert page.evaluate(CUT_LEGENDS) == 0
        assert page.locator(f'.line-name[title="{names[0]}"]').count() > 1
        page.goto("/runs/short/rollout?step=1&id=g1a-0")
        page.locator(".strip-row").first.wait_for()
        assert page.evaluate(SPILLED_CHOICES) == 0


def test_runs_stay_sorted_while_the_list_renews_itself(page):
    page.goto("/")
    page.get_by_role("link", name="Name").click()
    page.wait_for_url("**sort=name")
    names = page.locator("table.runs a.strong")
    assert names.all_text_contents() == ["first", "real"]
    page.get_by_role("link", name="Name").click()
    page.wait_for_url("**sort=-name")
    with page.expect_response(lambda answer: "sort=-name" in answer.url and "filter=" in answer.url):
        pass  # what the page asks for every few seconds
    assert names.all_text_contents() == ["real", "first"]


def test_labels_are_given_on_the_page_of_a_run(page):
    page.goto("/runs/first")
    page.get_by_label("Add a tag").fill("good")
    page.get_by_label("Add a tag").press("Enter")
    page.get_by_role("button", name="Take the tag good away").click()
    page.get_by_role("button", name="Take the tag good away").wait_for(state="detached")
    page.get_by_label("Add a note").fill("look <b>here</b>")
    page.get_by_label("Add a note").press("Enter")
    page.get_by_placeholder("look <b>here</b>").wait_for()


def test_rollouts_are_filtered_by_a_bar_and_read_with_j_and_k(page):
    page.goto("/runs/first/rollouts?step=1")
    page.get_by_role("link", name="6 rollouts with reward 1").click()
    page.wait_for_url("**where=reward%3D1**")
    assert page.locator(".dot").count() == 6
    page.goto("/runs/first/rollout?step=1&id=g1a-1")
    page.keyboard.press("j")
    page.wait_for_url("**id=g1a-2")
    page.keyboard.press("k")
    page.wait_for_url("**id=g1a-1")
    page.keyboard.press("s")
    page.wait_for_url("**beside=g1a-2")
    assert page.locator(".transcript").count() == 2
    page.keyboard.press("u")
    page.wait_for_url("**/rollouts?part=rollouts&step=1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, address, rollout_id, scheme):
    told = {}
    with opened_page(browser, address, color_scheme=scheme, bypass_csp=True) as page:
        for path in PAGES:
            open_whole(page, path.format(id=rollout_id))
            told[path] = serious_findings(page)
    assert {path: found for path, found in told.items() if found} == {}


def test_a_narrow_window_needs_no_scrolling_to_the_side(browser, address, rollout_id):
    with opened_page(browser, address) as page:
        page.set_viewport_size({"width": 390, "height": 800})
        for path in PAGES:
            open_whole(page, path.format(id=rollout_id))
            assert not is_too_wide(page), path


def open_whole(page, path: str) -> None:
    page.goto(path)
    if page.locator("#board").count():
        wait_for_charts(page)


def test_the_theme_is_chosen_and_kept(page):
    page.goto("/")
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(color)
    for name in ("light", "dark"):
        page.locator("#theme").click()
        assert page.locator("#theme-name").inner_text() == name
    dark = page.evaluate(color)
    assert dark != light
    page.reload()
    assert page.evaluate(color) == dark


def hostile_texts() -> list[str]:
    """200 texts: markup, templates, terminal codes, right-to-left, odd Unicode, very long lines."""
    tags = ["script", "img src=x onerror=alert(1)", "svg/onload=alert(1)", "iframe srcdoc=x", "style", "base href=//x"]
    codes = ["\x00", "\x1b[2J\x1b]0;x\x07", "\u202e", "\u2066", "\U0001f600", "\x08"]
    ends = ["", "</td></table>", "\"'>", "-->", "]]>", "{{7*7}}", "{% raw %}", "${7*7}", *codes]
    texts = [f"{end}<{tag}>alert(document.domain)</{tag.split()[0]}>" for tag in tags for end in ends]
    texts += [chr(code) * 3 + HOSTILE for code in range(0x7F, 0xA0)]
    texts += [f"javascript:alert({i})" for i in range(40)]
    texts += ["x" * 1_000_000, "<b>" * 300_000, "\u05d0" * 5000, "a\u0301" * 5000, "\n" * 5000]
    return (texts * 2)[:200]


def hostile_rollout(index: int, texts: list[str]):
    said = [{"role": role, "content": text} for text in texts for role in (text[:20], "assistant")]
    more = {"task": texts[0][:200], "error": texts[1][:500], "metrics": {text[:50]: 1.0 for text in texts}}
    return make_rollout(f"g-{index}", 1.0, messages=said, **more)


def test_hostile_texts_are_shown_as_text(browser, tmp_path):
    texts = hostile_texts()
    assert len(texts) == 200
    rollouts = [hostile_rollout(i, texts[10 * i : 10 * i + 10]) for i in range(20)]
    with RunFolder.create(tmp_path, "first", make_config(steps=1)) as run:
        run.write_rollouts(1, [group_of("g", rollouts)])
        run.write_metrics(1, {"reward/mean": 1.0})
        (run.path / "logs" / "server.log").write_text("\n".join(texts[:150]))
    pages = ["rollouts?step=1", "log", *(f"rollout?step=1&id=g-{i}" for i in range(20))]
    with served(create_app(Catalogue(tmp_path))) as port, opened_page(browser, f"http://127.0.0.1:{port}") as page:
        page.on("dialog", lambda dialog: pytest.fail(f"a text of a model ran: {dialog.message}"))
        for path in pages:
            page.goto(f"/runs/first/{path}")
            assert page.locator("script:not([src]), main img, main iframe, main script, main base").count() == 0, path
            assert page.locator(".said *, .log *, .prompt *").count() == 0, path
            shown = page.locator("main").inner_text()
            assert not {*shown} & {*map(chr, range(9)), "\x1b", "\u202e", "\u2066", "\x7f"}, path


def test_a_rollout_of_32000_tokens_scrolls_with_few_nodes_and_no_long_task(browser, tmp_path):
    config = make_config(steps=1, data={"max_sequence_length": 40_000})
    turn = make_turn(32_000)
    turn.tokens = [i % 50_000 for i in range(32_000)]
    groups = [group_of("g", [make_rollout("g-0", 1.0, [turn]), make_rollout("g-1", 0.0)])]
    with RunFolder.create(tmp_path, "first", config) as run:
        run.write_rollouts(1, groups, build_batch(groups, config).sequences)
        run.write_metrics(1, {"reward/mean": 1.0})
    with served(create_app(Catalogue(tmp_path))) as port, opened_page(browser, f"http://127.0.0.1:{port}") as page:
        page.goto("/runs/first/rollout?step=1&id=g-0")
        page.locator("#strip span[data-token]").first.wait_for()
        longest = min(scroll(page) for _ in range(3))  # others work on this machine too
        assert longest < 50
        assert page.evaluate("document.querySelectorAll('*').length") <= 2000
        page.evaluate("document.getElementById('strip').scrollTop = 1e9")
        page.locator('#strip [data-token="32001"]').wait_for()


def scroll(page) -> float:
    """The longest task in milliseconds while the whole strip scrolls by."""
    return page.evaluate(
        """async () => {
            const tasks = [];
            const watch = new PerformanceObserver((list) => tasks.push(...list.getEntries()));
            watch.observe({ entryTypes: ["longtask"] });
            const strip = document.getElementById("strip");
            for (let top = 0; top < strip.scrollHeight; top += strip.scrollHeight / 60) {
                strip.scrollTop = top;
                await new Promise(requestAnimationFrame);
            }
            await new Promise((done) => setTimeout(done, 100));
            watch.disconnect();
            return Math.max(0, ...tasks.map((task) => task.duration));
        }"""
    )


def test_behind_a_prefix_every_page_finds_its_files(browser, runs):
    app = create_app(Catalogue(runs))

    async def stripping(scope, receive, send):
        """A proxy that takes its prefix away and says nothing about it."""
        await app({**scope, "path": scope["path"].removeprefix("/tools/view")}, receive, send)

    for outer, prefix in ((stripping, "/tools/view"), (Starlette(routes=[Mount("/ui", app)]), "/ui")):
        with served(outer) as port, opened_page(browser, f"http://127.0.0.1:{port}") as page:
            page.goto(f"{prefix}/")
            page.get_by_role("link", name="first").click()
            wait_for_charts(page)
            page.get_by_role("link", name="Config").click()
            page.get_by_role("link", name="Rollouts").click()
            page.locator(".dot").first.click()
            page.locator("#strip span[data-token]").first.wait_for()
            assert f"{prefix}/runs/first/rollout?" in page.url


def test_beyond_this_machine_a_browser_is_asked_for_the_key(browser, runs):
    app = create_app(Catalogue(runs), Access(key="a-long-key"))
    with served(app) as port, opened_page(browser, f"http://127.0.0.1:{port}") as page:
        page.goto("/runs/first/config")
        page.get_by_label("Key").fill("wrong")
        page.get_by_role("button", name="Open").click()
        page.get_by_text("This is not the key.").wait_for()
        page.get_by_label("Key").fill("a-long-key")
        page.get_by_role("button", name="Open").click()
        page.wait_for_url("**/runs/first/config")


def test_what_accidents_leave_is_shown_as_far_as_it_can_be(browser, tmp_path):
    names = [f"{number}-{accident.__name__}" for number, accident in enumerate(ACCIDENTS)]
    for name, accident in zip(names, ACCIDENTS, strict=True):
        accident(write_run(tmp_path, name))
    with served(create_app(Catalogue(tmp_path))) as port, opened_page(browser, f"http://127.0.0.1:{port}") as page:
        page.goto("/")
        assert page.locator("tbody tr").count() == len(names)
        for name in names:
            for path in ("", "/rollouts", "/config", "/log", "/events"):
                answer = page.goto(f"/runs/{name}{path}")
                assert answer.status in (200, 422), (name, path)
                if page.locator("#board").count():
                    page.locator('#board[aria-busy="false"]').wait_for()
        (older,) = (name for name in names if name.endswith("of_an_older_version"))
        page.goto(f"/runs/{older}/rollouts?step=1")
        page.locator(".dot").first.click()
        page.get_by_text("What is 2 + 2?").wait_for()
        page.locator("#strip span[data-token]").first.wait_for()


def test_a_folder_that_cannot_be_written_is_shown_and_says_so_when_it_is_to_change(browser, tmp_path):
    write_run(tmp_path)
    with (
        made_read_only(tmp_path),
        served(create_app(Catalogue(tmp_path))) as port,
        opened_page(browser, f"http://127.0.0.1:{port}") as page,
    ):
        page.goto("/")
        page.get_by_role("link", name="first").click()
        wait_for_charts(page)
        for _ in range(2):  # the second time in the same place
            page.get_by_role("button", name="Star first").click()
            page.get_by_role("alert").get_by_text("Permission denied").wait_for()
        assert page.get_by_role("alert").count() == 1


def test_a_run_without_steps_and_one_with_odd_numbers_are_drawn(browser, tmp_path):
    RunFolder.create(tmp_path, "empty", make_config()).close()
    write_run(tmp_path, "odd")
    with (tmp_path / "odd" / "metrics.jsonl").open("a") as stream:
        for step, value in enumerate([1e300, -1e300, 0, None, 5e-324], 5):
            stream.write(json.dumps({"step": step, "attempt": 1, "reward/mean": value}) + "\n")
        stream.write('{"step": 10, "rewa')
    with served(create_app(Catalogue(tmp_path))) as port, opened_page(browser, f"http://127.0.0.1:{port}") as page:
        page.goto("/runs/empty")
        page.get_by_text("No step is done yet.").wait_for()
        page.goto("/runs/empty/rollouts")
        page.get_by_text("This run has no rollouts yet.").wait_for()
        page.goto("/runs/odd")
        wait_for_charts(page)
        page.locator("details.others summary").click()
        page.locator('details.others [data-chart="env/math/own_metric"] canvas').wait_for()
