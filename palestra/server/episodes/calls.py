"""The calls that come thousands of times a second: what each does at once, and what is told when that is durable.

Owns: bodies and answers of these. Never touches: who may call, connections, the rules (they are the board's).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any

from fastapi import Request
from msgspec import Struct
from msgspec.structs import replace

from palestra.episodes.staging import PART
from palestra.server.auth import Caller
from palestra.server.direct_answers import Address
from palestra.server.episodes import wire as w
from palestra.server.episodes.access import holder, speaker
from palestra.server.episodes.broker import Broker
from palestra.server.episodes.claims import Begun, Claim, Claims
from palestra.server.errors import Refusal
from palestra.server.hub import Hub
from palestra.types.episodes import ClaimRequest, Lease, NewGroup, Registered

MAX_AT_ONCE = 4096  # leases that one call speaks of
ASK_AGAIN_S = 1.0


class Asking(Struct, frozen=True):
    hub: Hub
    caller: Caller
    address: Callable[[], Address]
    run: str = ""
    """In the path."""

    @property
    def broker(self) -> Broker:
        return self.hub.episodes.broker


class Later(Struct, frozen=True):
    """An answer that takes its time, and sees by itself to what must be durable first."""

    work: Coroutine[Any, Any, Struct]
    is_for_caller: bool = False
    """Who leaves meanwhile gives it up."""


Answer = Callable[[], Struct] | Later
"""What is told once everything so far is durable; or later."""


def claim(asking: Asking, asked: ClaimRequest) -> Answer:
    if not asked.wait_s >= 0:
        raise Refusal(400, f"wait_s: 0 seconds or more, found {asked.wait_s}")
    caller, claims = asking.caller, asking.hub.episodes.claims
    client_id = holder(caller, asked.client_id)
    if client_id != asked.client_id:
        asked = replace(asked, client_id=client_id)
    base_url, model = endpoint(asking.hub, asking.address())
    wanted = Claim(caller.owner, asked, base_url=base_url, model=model)
    begun = claims.begin(wanted)
    if begun.has_to_wait:
        return Later(_wait(claims, begun), is_for_caller=True)
    return lambda: _claimed(claims, wanted, claims.told(begun))


async def _wait(claims: Claims, begun: Begun) -> w.Claimed:
    return _claimed(claims, begun.claim, await claims.finish(begun))


def _claimed(claims: Claims, claim: Claim, leases: list[Lease]) -> w.Claimed:
    return w.Claimed(leases, 0.0) if leases else w.Claimed([], ASK_AGAIN_S, claims.why_nothing(claim))


def heartbeat(asking: Asking, body: w.Heartbeat) -> Answer:
    _check_count("leases", body.leases)
    owner, who = asking.caller.owner, speaker(asking.caller, body.client_id, body.leases)
    beats = asking.broker.apply(lambda board, now: board.heartbeat(owner, who, body.leases, now))
    return lambda: w.Beats(beats)


def end(asking: Asking, body: w.Ends) -> Answer:
    _check_count("ends", body.ends)
    owner, who = asking.caller.owner, speaker(asking.caller, body.client_id, body.ends)
    broker = asking.broker
    ended = broker.apply(lambda board, now: board.end(owner, who, body.ends, now))
    began_at = broker.clock.latest

    def told() -> w.EndedEpisodes:
        broker.observer.ended(owner, ended, began_at)
        return w.EndedEpisodes(ended)

    return told


def release(asking: Asking, body: w.Release) -> Answer:
    _check_count("leases", body.leases)
    owner, who = asking.caller.owner, speaker(asking.caller, body.client_id, body.leases)
    beats = asking.broker.apply(lambda board, now: board.release(owner, who, body.leases, body.reason, now))
    return lambda: w.Beats(beats)


def register(asking: Asking, body: w.NewGroups) -> Answer:
    owner, run, broker = asking.caller.owner, asking.run, asking.broker
    if sum([max(group.size, group.count or 0) for group in body.groups]) > PART:
        return Later(_register_in_parts(broker, owner, run, body.groups))
    registered = broker.apply(lambda board, now: board.register(owner, run, body.groups, now))
    return lambda: _registered(broker, owner, run, registered)


async def _register_in_parts(broker: Broker, owner: str, run: str, groups: Sequence[NewGroup]) -> w.RegisteredGroups:
    work = broker.do_in_parts(lambda board, now: board.register_in_parts(owner, run, groups, now))
    return _registered(broker, owner, run, await work)


def _registered(broker: Broker, owner: str, run: str, groups: list[Registered]) -> w.RegisteredGroups:
    broker.observer.registered(owner, run, groups)
    return w.RegisteredGroups(groups)


def _check_count(where: str, items: Sequence[object]) -> None:
    if len(items) > MAX_AT_ONCE:
        raise Refusal(400, f"{where}: at most {MAX_AT_ONCE} in one call, found {len(items)}")


def address_of(request: Request) -> Address:
    scope = request.scope
    host = next((value for name, value in scope["headers"] if name == b"host"), None)
    server = scope.get("server")
    return Address(scope["scheme"], server and tuple(server), host, scope.get("root_path", ""))


def endpoint(hub: Hub, address: Address) -> tuple[str, str]:
    """Where a player reaches the model, and the name of one."""
    return f"{hub.config.episodes.url or _url(address)}/v1", next(iter(hub.workers))


@lru_cache(maxsize=64)
def _url(address: Address) -> str:
    headers = [] if address.host is None else [(b"host", address.host)]
    parts = {"scheme": address.scheme, "server": address.server, "headers": headers, "root_path": address.root_path}
    return str(Request({"type": "http", "query_string": b"", "path": "/", **parts}).base_url).rstrip("/")
