"""Verifiers for the notes server."""

from __future__ import annotations

from palestra.environments.fleet.backends.mcp_server import FinishedEpisode


async def wrote_hello(finished: FinishedEpisode) -> float:
    """Asks the server itself."""
    found = await finished.call_tool("read", {})
    return float(found.result == {"notes": ["hello"]})


def called_twice(finished: FinishedEpisode) -> float | None:
    """None: it does not know."""
    return None if not finished.calls else float(len(finished.calls) == 2)


def breaks(finished: FinishedEpisode) -> float:
    raise KeyError("of the verifier's own")


def asserts(finished: FinishedEpisode) -> float:
    assert finished.calls, "nothing was called"
    return 1.0


def counts(finished: FinishedEpisode) -> float:
    """No score: it may be above 1."""
    return len(finished.calls)
