"""Pictures of the dashboard for the documentation, from a run of the demo, a task of the platform, a server and a gym.

make screenshots                     # trains the demo first (minutes), unless ./runs has one called demo
make screenshots ARGS="FOLDER demo"  # of a run that is there
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from palestra.environments.platform import Instance, make_task
from palestra.environments.platform.golden import play_golden
from palestra.runs.reader import Part, RunReader

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLOURS = 128
SIZE = {"width": 1280, "height": 800}
TASK = "mail-move_only-0-17"
ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOL = {"name": "count", "description": "Count an item.", "parameters": ITEM}
GYM = [
    *("-c", "resources_servers/mcqa/configs/mcqa.yaml"),
    *("-c", "responses_api_models/vllm_model/configs/vllm_model.yaml"),
    *("head_server.port=0", "--model", "ephebe", "--model-api-key", "tml-anything"),
]


def main() -> None:
    folder, name = Path(sys.argv[1] if len(sys.argv) > 1 else "runs"), sys.argv[2] if len(sys.argv) > 2 else "demo"
    if not (folder / name).is_dir():
        subprocess.run(["palestra", "train", "demo", f"runs={folder}", "--name", name], check=True)
    IMAGES.mkdir(exist_ok=True)
    sync_api: Any = import_module("playwright.sync_api")  # make screenshots installs it
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(started("serve", "--port", "0", "--state", str(state), says="http://"))
        head = stack.enter_context(started("gym", "run", *GYM, "--model-url", f"{server}/v1", says="The head is at "))
        view = stack.enter_context(started("view", str(folder), "--port", "0", "--gym", head, says="http://"))
        play_gym(head, state)
        playwright = stack.enter_context(sync_api.sync_playwright())
        program = next(path for one in BROWSERS if (path := shutil.which(one)))
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme, pages in pages_of(RunReader(folder / name), view, server).items():
            context = browser.new_context(viewport=SIZE, color_scheme=scheme)
            page = context.new_page()
            for image, address in pages.items():
                page.goto(address, wait_until="networkidle" if "/rollout?" in address else "load")
                page.wait_for_timeout(1500)
                PREPARE.get(image, lambda page: None)(page)
                page.screenshot(path=IMAGES / f"{image}.png")
                shrink(IMAGES / f"{image}.png")
                print(IMAGES / f"{image}.png")  # noqa: T201
            context.close()
        browser.close()


def shrink(file: Path) -> None:
    """Pages have few colours: a palette makes a picture a third of its size, and looks the same."""
    image: Any = import_module("PIL.Image")
    found = image.open(file).convert("RGB").quantize(COLOURS, image.Quantize.MEDIANCUT, dither=image.Dither.NONE)
    found.save(file, optimize=True)


def pages_of(run: RunReader, view: str, server: str) -> dict[str, dict[str, str]]:
    """Addresses by scheme and picture. The rollout is the one with the most to see in the step in the middle."""
    steps = run.steps(Part.ROLLOUTS)
    middle = steps[len(steps) // 2]
    rollout = max(run.read_rollouts(middle), key=lambda one: (one.get("used") or False, one.get("turns", 0)))
    here = f"{view}/runs/{run.name}"
    light = {
        "view-run": here,
        "view-rollouts": f"{here}/rollouts?step={middle}",
        "view-platform": f"{view}/platform?task={TASK}",
        "view-gym": f"{view}/gym",
        "view-playground": f"{server}/ui/playground",
        "view-owners": f"{server}/ui/owners",
    }
    return {"light": light, "dark": {"view-rollout": f"{here}/rollout?step={middle}&id={rollout['id']}"}}


def show_token(page: Any) -> None:
    page.get_by_text("log-probability", exact=True).click()
    page.locator("#strip span[class^=lp]").nth(5).hover()


def set_limits(page: Any) -> None:
    """Sets limits of the owner that has played, of another one, and of everybody."""
    for owner, limit, amount in (
        ("local", "tokens per day", "20k"),
        ("research", "models", "8"),
        ("research", "checkpoint bytes", "200GB"),
        ("*", "pending samples", "2000"),
    ):
        page.get_by_label("Owner", exact=True).fill(owner)
        page.get_by_label("Limit").select_option(limit)
        page.get_by_label("Amount").fill(amount)
        page.get_by_role("button", name="Set the limit").click()
        page.wait_for_load_state()


def play_task(page: Any) -> None:
    """Searches a mail and moves it, by the forms of two tools."""
    page.get_by_role("button", name="Play", exact=True).click()
    task = make_task(TASK)
    for call, _ in play_golden(task, Instance(task.seed)).steps:
        tool = page.locator("details", has=page.get_by_text(f"Call {call.tool}", exact=True))
        tool.locator("summary").click()
        for argument, value in call.arguments.items():
            tool.locator(f"[name={argument}]").fill(str(value))
        tool.get_by_role("button").click()
        page.locator("#play .piece-call").first.get_by_text(call.tool).wait_for()
    page.locator(".verdict b.passed").wait_for()


def call_tool(page: Any) -> None:
    """Asks for a call, and answers it."""
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tool definitions as JSON").fill(json.dumps(TOOL, indent=2))
    page.locator("select[name=tool_choice]").select_option("required")
    page.locator("#text").fill("How many cups are there?")
    page.locator("#text").press("Enter")
    page.get_by_label("Result of count").fill("7")
    page.locator("select[name=tool_choice]").select_option("none")
    page.get_by_role("button", name="Send the result").click()
    page.locator(".message footer a").nth(1).wait_for()


PREPARE: dict[str, Callable[[Any], None]] = {
    "view-rollout": show_token,
    "view-platform": play_task,
    "view-playground": call_tool,
    "view-owners": set_limits,
}


def play_gym(head: str, folder: Path) -> None:
    """Lets the gym play its example rows, so that there is something to count."""
    rows = ["-i", "resources_servers/mcqa/data/example.jsonl", "-o", str(folder / "rollouts.jsonl")]
    command = [
        sys.executable,
        "-m",
        "palestra",
        "gym",
        "collect",
        *rows,
        "--agent",
        "mcqa_simple_agent",
        "--repeats",
        "8",
    ]
    subprocess.run([*command, "--server", head], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def started(*command: str, says: str) -> Iterator[str]:
    """Runs a command of ours until the end of the block. Gives the address behind `says` in its output."""
    whole = [sys.executable, "-m", "palestra", *command]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if says in line)
            found = re.search(r"http://[\w.:-]+", line)
            assert found is not None, line
            Thread(target=process.stdout.read, daemon=True).start()  # it goes on only while its output is read
            yield found[0]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
