"""The alias by which agents sample a run's newest weights: `model: "policy"` at the model endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

import httpx

from palestra.config.api_key import api_key
from palestra.episodes.client.http_exchange import CONNECT_S
from palestra.util.json_types import JsonObject

TIMEOUT_S = 10.0  # a training step waits for this call
OURS = ("model_not_found", "alias_not_found")
"""Codes of a 404 that concern an alias, not a missing route."""


class AliasError(Exception):
    """The error that the server reports, or that it does not answer."""


class UnknownAlias(AliasError, LookupError):
    """There is no alias with this name, or no such model."""


class AliasesSilent(AliasError, ConnectionError):
    """The server cannot be reached."""


class NoAliases(AliasError):
    """The server's Tinker API does not have these routes, such as the hosted one."""


class AliasClient:
    """A client for the alias routes of a server; `open` makes one. Aliases are dictionaries as the server returns them:
    id, model, version, updated_at."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http, self.url = http, url

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, key: str | None = None) -> AsyncIterator[AliasClient]:
        headers = {"x-api-key": key or api_key()}
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout) as http:
            yield cls(http, url)

    async def list(self) -> list[JsonObject]:
        return (await self._call("GET", ""))["data"]

    async def put(self, name: str, model: str) -> JsonObject:
        return await self._call("PUT", f"/{quote(name, safe='')}", {"model": model})

    async def delete(self, name: str) -> None:
        await self._call("DELETE", f"/{quote(name, safe='')}")

    async def _call(self, method: str, path: str, body: JsonObject | None = None) -> JsonObject:
        try:
            answer = await self._http.request(method, f"/v1/aliases{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AliasesSilent(f"{self.url} does not answer: {str(error) or type(error).__name__}") from error
        content = _content(answer)
        if answer.is_success and content.get("object") in ("alias", "list"):
            return content
        refusal = content.get("error")
        refusal = refusal if isinstance(refusal, dict) else {}
        if answer.is_success or (answer.status_code in (404, 405) and refusal.get("code") not in OURS):
            raise NoAliases(f"{self.url} has no aliases")
        kind = UnknownAlias if answer.status_code == 404 else AliasError
        raise kind(refusal.get("message") or content.get("detail") or f"{answer.status_code} {answer.reason_phrase}")


def _content(answer: httpx.Response) -> JsonObject:
    """Returns the JSON body, empty if the answer is not from our server: another program at that address may answer
    anything."""
    try:
        content = answer.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


class RunAlias:
    """The alias of one run. A problem with it is reported once."""

    def __init__(self, client: AliasClient, name: str, note: Callable[[str], None]) -> None:
        self._client, self.name, self._note = client, name, note
        self._version: int | None = None
        self._noted: set[str] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, name: str | None, note: Callable[[str], None]) -> AsyncIterator[RunAlias | None]:
        """Opens the alias; None if it is not requested or not available at this server."""
        if name is None:
            yield None
            return
        async with AliasClient.open(url) as client:
            try:
                await client.list()
            except NoAliases as error:
                note(f"{error}; the newest weights get no alias ({name})")
                yield None
                return
            except AliasError:
                pass  # it may work at the first move; if not, it is reported there
            yield cls(client, name, note)

    async def move(self, model: str) -> None:
        """Points the alias at weights that live as long as the run."""
        if await self._put(model):
            self._tell(f"the newest weights are model {self.name!r} at {self._client.url}/v1")

    async def settle(self, model: str) -> None:
        """Points the alias at weights that stay after the run."""
        if await self._put(model):
            self._tell(f"the alias {self.name!r} stays at {model}")

    async def _put(self, model: str) -> bool:
        try:
            version = (await self._client.put(self.name, model))["version"]
        except AliasError as error:
            self.complain(str(error))
            return False
        if self._version is not None and version != self._version + 1:
            self._tell(f"another client also moves the alias {self.name!r}; give this run its own: alias=NAME")
        self._version = version
        return True

    def complain(self, reason: str) -> None:
        self._tell(f"the alias {self.name!r} was not moved: {reason}")

    def _tell(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)
