"""Images: built by buildah without a container daemon or a registry, and tried in a chroot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from checks.base import DEPLOY, ROOT, CheckFailed, Workplace, free_port, need, need_root, run, smoke

RELEASE, PYTHON = "bookworm", "3.11"
BASE = "localhost/palestra-base"
TARGETS = ("server", "engine")
USER = "10001:10001"
MAX_MB = {"server": 600, "engine": 2000}
"""Limits of what the images have here: with torch's CPU build. Its CUDA libraries are some gigabytes more."""


class Images:
    def __init__(self, work: Workplace) -> None:
        need_root()
        need("mmdebstrap", "mmdebstrap")
        self._work, self._buildah = work, need("buildah", "buildah")

    def build(self) -> dict[str, Path]:
        """The root folder of each image."""
        wheels = self._packages()
        self._base()
        arguments = {"BASE": BASE, "PIP_FIND_LINKS": "/wheels", "PIP_NO_INDEX": "1"}
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        ignore = ("--ignorefile", DEPLOY / "Dockerfile.dockerignore")
        places = ("--volume", f"{wheels}:/wheels:ro", *ignore, "--file", DEPLOY / "Dockerfile")
        for target in TARGETS:
            self._run("bud", "--layers", *given, *places, "--target", target, "--tag", _tag(target), ROOT)
        return {target: self._mount(target) for target in TARGETS}

    def size_mb(self, target: str) -> int:
        (size,) = [image["size"] for image in self._images() if f"{_tag(target)}:latest" in (image["names"] or ())]
        number, unit = size.split()
        return round(float(number) * {"MB": 1, "GB": 1000}[unit])

    def config(self, target: str) -> dict[str, str]:
        return json.loads(self._run("inspect", "--type", "image", _tag(target)))["OCIv1"]["config"]

    def close(self) -> None:
        self._run("rm", "--all")

    def _packages(self) -> Path:
        """All that pip needs, for the Python of the images."""
        folder = self._work.path("wheels")
        pins = (DEPLOY / "constraints.txt").read_text().split("\n")
        names = [pin for pin in pins if pin and not pin.startswith("#")]
        (torch,) = [pin for pin in names if pin.startswith("torch==")]
        names.remove(torch)
        download = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", folder)
        own = ("--python-version", PYTHON, "--only-binary", ":all:")
        run(*download, *own, "--no-deps", *names)
        try:
            run(*download, *own, "--no-deps", f"{torch}+cpu")
        except CheckFailed:
            run(*download, *own, torch)
        return folder

    def _base(self) -> None:
        root = self._work.path("base") / "root.tar"
        if not root.exists():
            root.parent.mkdir(exist_ok=True)
            run("mmdebstrap", "--variant=minbase", RELEASE, part := root.with_suffix(".part.tar"))
            part.rename(root)
        if not any(f"{BASE}:latest" in (image["names"] or ()) for image in self._images()):
            file = self._work.path("Containerfile")
            file.write_text("FROM scratch\nADD root.tar /\n")
            self._run("bud", "--file", file, "--tag", BASE, root.parent)

    def _images(self) -> list[dict[str, Any]]:
        return json.loads(self._run("images", "--json"))

    def _mount(self, target: str) -> Path:
        container = self._run("from", _tag(target)).strip().splitlines()[-1]
        return Path(self._run("mount", container).strip().splitlines()[-1])

    def _run(self, *argv: str | Path) -> str:
        store = ("--root", self._work.path("images"), "--runroot", self._work.path("images-run"))
        return run(self._buildah, *store, *argv, env={"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"})


def _tag(target: str) -> str:
    return f"localhost/palestra-{target}"


def command_in(root: Path, *argv: str) -> list[str]:
    """A command inside of an image: its user, its files, the network of this machine."""
    inside = (
        f"exec chroot --userspec={USER} {root} env -i PATH=/opt/palestra/bin:/usr/bin:/bin HOME=/var/cache/palestra"
    )
    return ["unshare", "--mount", "sh", "-c", f'mount --bind /proc {root}/proc && {inside} "$@"', "sh", *argv]


def check_images(work: Workplace) -> str:
    images = Images(work)
    try:
        roots = images.build()
        for target, root in roots.items():
            if images.config(target)["User"] != USER:
                raise CheckFailed(f"{target} does not run as {USER}")
            if (size := images.size_mb(target)) > MAX_MB[target]:
                raise CheckFailed(f"{target} has {size} MB, more than {MAX_MB[target]}")
            facts = json.loads(run(*command_in(root, "palestra", "doctor", "--json")))
            if (facts["torch"] is not None) != (target == "engine"):
                raise CheckFailed(f"torch in {target}: {facts['torch']}")
        port = free_port()
        serve = ("palestra", "serve", "--port", str(port), "--state", "/var/lib/palestra", "models.0.threads=1")
        result = smoke(port, "--", *command_in(roots["engine"], *serve))
        sizes = ", ".join(f"{target} {images.size_mb(target)} MB" for target in TARGETS)
        _keep_programs(roots["engine"], work)
    finally:
        images.close()
    return f"{sizes}; {result}"


def _keep_programs(root: Path, work: Workplace) -> None:
    """For the check of the unit, which needs them at the same place."""
    run("cp", "--archive", root / "opt" / "palestra", work.fresh("programs"))
