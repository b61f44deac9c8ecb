"""Results of episodes that a trainer outside registered, pushed to where it listens for each of them.

As AgentJet's trainer takes them: the JSON of a WorkflowOutput, answered by `ack`. They do not wait for one another: one
listener that is gone holds up nobody. Owns: which results are on their way. Never touches: sockets, HTTP.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from palestra.server.episodes.broker import Broker
from palestra.server.episodes.deliveries import Deliveries, Reading
from palestra.server.episodes.push_addresses import check_address
from palestra.server.episodes.push_errands import Errands, RunKey
from palestra.server.tinkerscript.names import ADDRESS, RUN
from palestra.server.tinkerscript.outputs import output_of
from palestra.types.episodes import PlayedGroup

AT_ONCE = 64
"""Lines that are open: those to listeners that are gone are given up soon."""
LOOK_AT = 256
ACK = "ack"


class ResultPushes:
    def __init__(self, broker: Broker, deliveries: Deliveries, errands: Errands):
        self._broker, self._deliveries, self._errands = broker, deliveries, errands
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._seen: dict[RunKey, int] = {}
        """Groups up to there are on their way, or need not be."""

    def look(self, key: RunKey) -> None:
        if key[1] != RUN:
            return
        while groups := self._unseen(key):
            for group in groups:
                if group.tags.get(ADDRESS):
                    self._errands.begin((key, group.number), partial(self._send, key, group.number))
            self._seen[key] = groups[-1].number

    def forget(self, key: RunKey | None) -> None:
        for known in [one for one in self._seen if key in (None, one)]:
            del self._seen[known]

    def _unseen(self, key: RunKey) -> list[PlayedGroup]:
        after = max(self._seen.get(key, 0), self._committed(key))
        return self._broker.apply(lambda board, now: board.delivered(*key, now, after=after, limit=LOOK_AT))

    async def _send(self, key: RunKey, number: int) -> None:
        group = await self._read(key, number)
        if group is None:
            return
        address = group.tags[ADDRESS]
        check_address(ADDRESS, address, self._broker.config.push_hosts)  # it may have been allowed once
        payload = await asyncio.to_thread(lambda: msgspec.json.encode(output_of(group)))
        sender = self._errands.sender(address, self._slots)
        try:
            is_taken = await sender.send(payload, ACK, lambda: self._is_wanted(key, number))
        finally:
            sender.close()
        if is_taken:
            await self._broker.do(lambda board, now: board.commit_one(*key, number, now))

    async def _read(self, key: RunKey, number: int) -> PlayedGroup | None:
        """None: it is committed already."""
        if not self._is_wanted(key, number):
            return None
        groups = await self._deliveries.read(Reading(*key, number - 1, 1), wait_s=0, tokens=True)
        return groups[0] if groups and groups[0].number == number else None

    def _is_wanted(self, key: RunKey, number: int) -> bool:
        return self._committed(key) < number

    def _committed(self, key: RunKey) -> int:
        return self._broker.apply(lambda board, _now: board.run_info(*key)).committed
