"""Makes what a release uploads, and prints it: `make release`. Nothing is uploaded.

The files are built twice, from two copies of the commit in different folders, and must be the same to the byte:
whoever has the commit can tell that a published wheel is made of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASED_NAMES = ROOT / "scripts" / "reference" / "released_names.json"


class NotReady(Exception):
    """What a release still needs."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release", help="folder of the files")
    parser.add_argument("--rehearse", action="store_true", help="build what is committed, though it is no release yet")
    args = parser.parse_args()
    try:
        version = version_of((ROOT / "palestra" / "__init__.py").read_text(encoding="utf-8"))
        missing = list(what_is_missing(version))
        for one in missing:
            print(("would stop: " if args.rehearse else "stop: ") + one)
        if missing and not args.rehearse:
            raise NotReady(f"{version} is not ready; to build it all the same: make release ARGS=--rehearse")
        files = build_twice(args.out)
        run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
        installed = installed_version(next(one for one in files if one.suffix == ".whl"))
        if installed != version:
            raise NotReady(f"the wheel says that it is {installed}, the commit is {version}")
    except (NotReady, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}\n{getattr(error, 'stderr', None) or ''}".strip())
    print(f"\npalestra {version}, from {git('rev-parse', 'HEAD')}; to upload:")
    for file in files:
        print(f"  {hashlib.sha256(file.read_bytes()).hexdigest()}  {file.stat().st_size:>10,} B  {file.name}")
    print(f"in {args.out}. CONTRIBUTING.md, 'A release', says how")


def version_of(text: str) -> str:
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise NotReady("palestra/__init__.py has no __version__")
    return found[1]


def what_is_missing(version: str) -> list[str]:
    """What the tree, the changelog and the kept names lack for a release of this version."""
    return [
        *([] if not git("status", "--porcelain") else ["there are changes that are not committed"]),
        *changelog_problems((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version),
        *names_problems(json.loads(RELEASED_NAMES.read_text(encoding="utf-8"))["version"], version),
    ]


def changelog_problems(text: str, version: str) -> list[str]:
    sections = re.split(r"^## \[", text, flags=re.MULTILINE)
    problems = []
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE):
        problems.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    if any(one.startswith("Unreleased]") and "\n- " in one for one in sections):
        problems.append("CHANGELOG.md has entries under [Unreleased]: move them to the release")
    return problems


def names_problems(kept: str, version: str) -> list[str]:
    if kept == version:
        return []
    return [f"the stable names are those of {kept}: python scripts/reference/released_names.py {version}"]


def build_twice(out: Path) -> list[Path]:
    """Builds wheel and sdist from the commit, in two places. Raises NotReady if they differ."""
    epoch = git("log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory(prefix="another-place-") as second:
        for place in (first, second):
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
            print(f"building in {place}", flush=True)
            run(sys.executable, "-m", "build", "--outdir", f"{place}/dist", place, SOURCE_DATE_EPOCH=epoch)
        built = sorted((Path(first) / "dist").iterdir())
        for file in built:
            if file.read_bytes() != (Path(second) / "dist" / file.name).read_bytes():
                raise NotReady(f"{file.name} differs from build to build")
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(file, out)) for file in built]


def installed_version(wheel: Path) -> str:
    """Installs the wheel into an empty environment, and returns what its command says."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        run(f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
        return run(f"{folder}/bin/palestra", "--version").split()[-1]


def git(*args: str) -> str:
    return run("git", "-C", str(ROOT), *args).strip()


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT.parent, check=True, capture_output=True, text=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
