"""Is it there, and is it who it should be: one small GET, with a time limit.

Owns: asking, the words for no answer. Never touches: what follows from the answer.
"""

from __future__ import annotations

from palestra.net.http_client import CallFailed, HttpClient, HttpReply

NAME_HEADER = "x-gym-server"


class NoAnswer(Exception):
    """The words say why."""


async def get(url: str, timeout_s: float) -> HttpReply:
    """Status and headers of what answers there, by a connection of its own. Raises NoAnswer.

    Certificates are not looked at: nothing is said but GET, and whoever answers, there is somebody."""
    try:
        async with HttpClient(connect_s=None) as client:
            return await client.probe(url, timeout_s=timeout_s)
    except TimeoutError:
        raise NoAnswer(f"no answer in {timeout_s:g} s") from None
    except CallFailed as error:
        raise NoAnswer(str(error)) from None


async def check_server(name: str, host: str, port: int, timeout_s: float) -> None:
    """Returns where the server of that name is healthy. Raises NoAnswer."""
    answer = await get(f"http://{reachable(host)}:{port}/", timeout_s)
    if answer.status != 200:
        raise NoAnswer(f"answers with status {answer.status}")
    said = answer.headers.get(NAME_HEADER, name)
    if said != name:
        raise NoAnswer(f"the server {said!r} answers there")


def reachable(host: str) -> str:
    """Every address is also this one; a literal of IPv6 gets its brackets."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host
