"""Asks a project's build backend what the project requires: `python metadata_child.py PROJECT BACKEND [FOLDER …]`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from functools import reduce
from pathlib import Path


def main(project: str, backend: str, *own_folders: str) -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # backends print
    os.chdir(project)
    sys.argv = ["setup.py"]
    sys.path[:0] = [str(Path(one).resolve()) for one in own_folders]
    module, _, name = backend.partition(":")
    hooks = reduce(getattr, name.split(".") if name else [], importlib.import_module(module))
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(hooks, "prepare_metadata_for_build_wheel"):
            text = Path(folder, hooks.prepare_metadata_for_build_wheel(folder), "METADATA").read_text("utf-8")
        else:
            with zipfile.ZipFile(Path(folder, hooks.build_wheel(folder))) as wheel:
                text = wheel.read(next(one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))).decode()
    os.write(answer, json.dumps(HeaderParser().parsestr(text).get_all("Requires-Dist") or []).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
