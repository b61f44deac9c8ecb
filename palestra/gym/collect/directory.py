"""Where the servers of a running gym are: asked of its head.

Owns: asking, names that are not there. Never touches: rows, the gym's files.
"""

from __future__ import annotations

import difflib
from typing import Any

import yaml

from palestra.gym.collect.errors import NoGym, UnknownAgent
from palestra.gym.http_client import CallFailed, HttpClient
from palestra.gym.records import ServerKind

LIMIT_S = 30.0


class Directory:
    """Addresses by instance name, and of what kind each is. Servers may move: `refresh` asks the head again."""

    def __init__(self, client: HttpClient, head: str, key: str | None = None) -> None:
        self._client = client
        self._head = head
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.urls: dict[str, str] = {}
        self.kinds: dict[str, str] = {}

    @classmethod
    async def of_head(cls, client: HttpClient, head: str, key: str | None = None) -> Directory:
        """Raises NoGym where no gym answers."""
        made = cls(client, head, key)
        await made.refresh()
        return made

    async def refresh(self) -> None:
        try:
            found = await self._asked("/server_instances")
            urls = {one["config_path"]: one.get("url") or f"http://{one['host']}:{one['port']}" for one in found}
            kinds = {one["config_path"]: one["server_type"] for one in found}
        except (CallFailed, TimeoutError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise NoGym(
                f"no gym answers at {self._head} ({type(error).__name__}): start one with `palestra gym run -c FILE`, "
                "say where it is with --server, or let this command start it with -c FILE"
            ) from error
        self.urls, self.kinds = urls, kinds

    async def settings(self) -> dict[str, Any]:
        """What the gym was started with, for those who may see it; else nothing."""
        try:
            text = await self._asked("/global_config_dict_yaml")
            found = yaml.safe_load(text) if isinstance(text, str) else None
        except (CallFailed, TimeoutError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _asked(self, path: str) -> Any:
        reply = await self._client.get(self._head + path, headers=self._headers, timeout_s=LIMIT_S)
        if reply.status >= 400:
            raise CallFailed(f"HTTP {reply.status}")
        return reply.json()

    def agent(self, name: str) -> str:
        """Its address. Raises UnknownAgent with the nearest name."""
        if name in self.urls and self.kinds[name] == ServerKind.AGENT:
            return self.urls[name]
        agents = sorted(each for each, kind in self.kinds.items() if kind == ServerKind.AGENT)
        near = difflib.get_close_matches(name, agents, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(agents) or 'none'}"
        raise UnknownAgent(f"the gym has no agent {name!r}; {hint}")
