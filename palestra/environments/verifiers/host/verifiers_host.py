"""Hosts environments of the `verifiers` package for a parent process: standard library and verifiers only.

It runs in the Python that has verifiers, which may be another one than ours. Requests and answers are lines of JSON, by
stdin and the stdout that the process began with; whatever an environment prints goes to stderr.

`verifiers_host_v0` and `verifiers_host_v1` know the two interfaces.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

BIGGEST_LINE = 64 * 1024 * 1024


class HostedEnvironments:
    """The environments of one entry of a config: one for training, and one for evaluation if it has its own args."""

    def __init__(self) -> None:
        self._hosted: dict[str, Any] = {}

    async def load(self, name: str, part: str, args: dict[str, Any], env: dict[str, Any]) -> dict[str, Any]:
        module = find_module(name)
        if hasattr(module, "load_environment"):
            import verifiers_host_v0 as interface
        else:
            import verifiers_host_v1 as interface
        self._hosted[part] = hosted = interface.Hosted(module.__name__, args, env)
        await hosted.open()
        return {"interface": hosted.interface, "is_grouped": hosted.is_grouped}

    async def tasks(self, part: str, split: str, limit: int) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._hosted[part].tasks, split, limit)

    async def play(self, part: str, **request: Any) -> list[dict[str, Any]]:
        return await self._hosted[part].play(**request)

    async def close(self) -> None:
        for hosted in self._hosted.values():
            await hosted.close()


def find_module(name: str) -> Any:
    """Imports an installed package, or a local folder: the package itself, or a project with the package in it."""
    sys.path[:0] = [str(Path.cwd())]  # like `python -m`
    folder, module = Path(name).expanduser(), Path(name.split("@")[0]).name.replace("-", "_")
    if folder.is_dir():
        has_module = (folder / f"{module}.py").exists() or (folder / module).is_dir()
        sys.path[:0] = [str(folder.resolve() if has_module else folder.resolve().parent)]
    for place in (f"verifiers.v1.tasksets.{module}", module):
        if _exists(place):
            return importlib.import_module(place)
    raise ModuleNotFoundError(f"there is no package {module!r} and no folder {name!r} beside {Path.cwd()}")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


async def serve(lines: asyncio.StreamReader, out: Any) -> None:
    """Answers requests, many at a time, until the parent has closed its end."""
    hosted, running = HostedEnvironments(), set[asyncio.Task[None]]()

    async def answer(request: dict[str, Any]) -> None:
        try:
            content = {"result": await getattr(hosted, request["method"])(**request["params"])}
        except (Exception, SystemExit) as error:  # boundary: an environment's own code
            content = {"error": {"type": type(error).__name__, "message": str(error)[:4000]}}
            traceback.print_exc()
        out.write(json.dumps({"id": request["id"], **content}, default=str).encode() + b"\n")
        out.flush()

    while line := await lines.readline():
        request = json.loads(line)
        if request["method"] == "cancel":
            for task in running:
                if task.get_name() == str(request["params"]["id"]):
                    task.cancel()
            continue
        task = asyncio.create_task(answer(request), name=str(request["id"]))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await hosted.close()


async def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lines = asyncio.StreamReader(limit=BIGGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await serve(lines, out)


if __name__ == "__main__":
    asyncio.run(main())
