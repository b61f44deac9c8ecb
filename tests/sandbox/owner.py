"""An owner of sandboxes, to be killed: starts some, says so, and waits.

Usage: owner.py BACKEND COUNT [IMAGE]
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from palestra.sandbox import SandboxSpec, sandbox

MARK = "palestra-left-behind"


async def main() -> None:
    spec = SandboxSpec(env={"MARK": MARK}, image=sys.argv[3] if len(sys.argv) > 3 else None)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(int(sys.argv[2])):
            box = await stack.enter_async_context(sandbox(sys.argv[1], spec))
            await box.exec("setsid sleep 1000 & sleep 1001 & true")
            asyncio.ensure_future(box.exec("sleep 1002; true"))  # noqa: RUF006 - it dies with the owner
        await asyncio.sleep(0.5)
        print("started", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
