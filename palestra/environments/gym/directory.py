"""Addresses of the servers of a running gym, read from its head server."""

from __future__ import annotations

from typing import Any

import yaml

from palestra.environments.gym.errors import NoGym, UnknownAgent
from palestra.net.http_client import CallFailed, HttpClient
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

LIMIT_S = 30.0
AGENTS = ("responses_api_agents", "environment_servers")
"""Kinds of servers that play rows: an environment server stands for its agent."""


class ServerDirectory:
    """Addresses and kinds by instance name. Servers may move: `refresh` asks the head server again."""

    def __init__(self, client: HttpClient, head: str, key: str | None = None) -> None:
        self._client = client
        self.head = head.rstrip("/")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.urls: dict[str, str] = {}
        self.kinds: dict[str, str] = {}

    @classmethod
    async def of_head(cls, client: HttpClient, head: str, key: str | None = None) -> ServerDirectory:
        """Reads the directory. Raises NoGym if no gym answers."""
        made = cls(client, head, key)
        await made.refresh()
        return made

    async def refresh(self) -> None:
        try:
            found = await self._fetch("/server_instances")
            urls = {one["config_path"]: one.get("url") or f"http://{one['host']}:{one['port']}" for one in found}
            kinds = {one["config_path"]: one["server_type"] for one in found}
        except (CallFailed, TimeoutError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise NoGym(
                f"no gym answers at {self.head} ({type(error).__name__}); to start one: palestra gym run -c "
                "FILE; commands find it by --server URL, or start their own with -c FILE"
            ) from error
        self.urls, self.kinds = urls, kinds

    async def settings(self) -> JsonObject:
        """Returns the gym's settings for callers that may see them; otherwise nothing."""
        try:
            text = await self._fetch("/global_config_dict_yaml")
            found = yaml.safe_load(text) if isinstance(text, str) else None
        except (CallFailed, TimeoutError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _fetch(self, path: str) -> Any:
        reply = await self._client.get(self.head + path, headers=self.headers, timeout_s=LIMIT_S)
        if reply.status >= 400:
            raise CallFailed(f"HTTP {reply.status}")
        return reply.json()

    def agent(self, name: str) -> str:
        """Returns an agent's address. Raises UnknownAgent with the nearest name."""
        if name in self.urls and self.kinds[name] in AGENTS:
            return self.urls[name]
        agents = sorted(each for each, kind in self.kinds.items() if kind in AGENTS)
        raise UnknownAgent(f"the gym has no agent {name!r}; {did_you_mean(name, agents)}")
