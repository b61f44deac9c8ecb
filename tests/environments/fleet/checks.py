"""Verifiers for the notes server."""

from __future__ import annotations

from palestra.environments.fleet.backends.mcp_server import Finished


async def wrote_hello(finished: Finished) -> float:
    """Asks the server itself."""
    found = await finished.call_tool("read", {})
    return float(found.result == {"notes": ["hello"]})


def called_twice(finished: Finished) -> float | None:
    """None: it does not know."""
    return None if not finished.calls else float(len(finished.calls) == 2)


def breaks(finished: Finished) -> float:
    raise KeyError("of the verifier's own")


def asserts(finished: Finished) -> float:
    assert finished.calls, "nothing was called"
    return 1.0


def counts(finished: Finished) -> float:
    """No score: it may be above 1."""
    return len(finished.calls)
