"""Where the servers of a running gym are: asked of its head.

Owns: asking, names that are not there. Never touches: rows, the gym's files.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

import aiohttp
import yaml

from palestra.gym.collect.errors import CollectError
from palestra.gym.records import ServerKind

HEAD = "http://127.0.0.1:11000"
KEY_VARIABLE = "PALESTRA_GYM_KEY"
_LIMIT = aiohttp.ClientTimeout(total=30)


class Directory:
    """Addresses by instance name, and of what kind each is. Servers may move: `refresh` asks the head again."""

    def __init__(self, session: aiohttp.ClientSession, head: str = HEAD) -> None:
        self._session = session
        self._head = head
        self.urls: dict[str, str] = {}
        self.kinds: dict[str, str] = {}

    @classmethod
    async def of_head(cls, session: aiohttp.ClientSession, head: str = HEAD) -> Directory:
        """Raises CollectError where no gym answers."""
        made = cls(session, head)
        await made.refresh()
        return made

    async def refresh(self) -> None:
        try:
            found = await self._asked("/server_instances")
            urls = {one["config_path"]: one.get("url") or f"http://{one['host']}:{one['port']}" for one in found}
            kinds = {one["config_path"]: one["server_type"] for one in found}
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CollectError(
                f"no gym answers at {self._head} ({type(error).__name__}): start one with `palestra gym run -c FILE`, "
                "say its head with --head, or let this command start it with -c FILE"
            ) from error
        self.urls, self.kinds = urls, kinds

    async def settings(self) -> dict[str, Any]:
        """What the gym was started with, for those who may see it; else nothing."""
        try:
            text = await self._asked("/global_config_dict_yaml")
            found = yaml.safe_load(text) if isinstance(text, str) else None
        except (aiohttp.ClientError, TimeoutError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _asked(self, path: str) -> Any:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._session.get(self._head + path, headers=headers, timeout=_LIMIT) as answer:
            answer.raise_for_status()
            return await answer.json()

    def agent(self, name: str) -> str:
        """Its address. Raises CollectError with the nearest name."""
        if name in self.urls and self.kinds[name] == ServerKind.AGENT:
            return self.urls[name]
        agents = sorted(each for each, kind in self.kinds.items() if kind == ServerKind.AGENT)
        near = difflib.get_close_matches(name, agents, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(agents) or 'none'}"
        raise CollectError(f"the gym has no agent {name!r}; {hint}")
