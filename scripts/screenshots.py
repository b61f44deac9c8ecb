"""Pictures of the dashboard for the documentation, from a run of the demo.

make screenshots                     # trains the demo first (minutes), unless ./runs has one called demo
make screenshots ARGS="FOLDER demo"  # of a run that is there

Owns: which pages are shown, and how. Never touches: what is on them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from palestra.runs.reader import Part, RunReader

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1280, "height": 800}


def main() -> None:
    folder, name = Path(sys.argv[1] if len(sys.argv) > 1 else "runs"), sys.argv[2] if len(sys.argv) > 2 else "demo"
    if not (folder / name).is_dir():
        subprocess.run(["palestra", "train", "demo", f"runs={folder}", "--name", name], check=True)
    IMAGES.mkdir(exist_ok=True)
    sync_api: Any = import_module("playwright.sync_api")  # make screenshots installs it
    with served(folder) as address, sync_api.sync_playwright() as playwright:
        program = next(path for one in BROWSERS if (path := shutil.which(one)))
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme, pages in pages_of(RunReader(folder / name)).items():
            context = browser.new_context(base_url=address, viewport=SIZE, color_scheme=scheme)
            page = context.new_page()
            for image, path in pages.items():
                page.goto(path, wait_until="networkidle" if "/rollout?" in path else "load")
                page.wait_for_timeout(1500)
                prepare(page, image)
                page.screenshot(path=IMAGES / f"{image}.png")
                print(IMAGES / f"{image}.png")  # noqa: T201
            context.close()
        browser.close()


def pages_of(run: RunReader) -> dict[str, dict[str, str]]:
    """Addresses by scheme and picture. The rollout is the one with the most to see in the step in the middle."""
    steps = run.steps(Part.ROLLOUTS)
    middle = steps[len(steps) // 2]
    rollout = max(run.read_rollouts(middle), key=lambda one: (one["used"] or False, one["turns"]))
    here = f"/runs/{run.name}"
    light = {"view-run": here, "view-rollouts": f"{here}/rollouts?step={middle}"}
    return {"light": light, "dark": {"view-rollout": f"{here}/rollout?step={middle}&id={rollout['id']}"}}


def prepare(page: Any, image: str) -> None:
    if image == "view-rollout":
        page.get_by_text("log-probability", exact=True).click()
        page.locator("#strip span[class^=lp]").nth(5).hover()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "palestra", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rpartition(": ")[2].strip().rstrip("/")
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
