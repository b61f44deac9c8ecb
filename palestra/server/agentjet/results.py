"""Results of episodes that an external trainer registered, pushed to the address that it gave for each of them.

The format is that of AgentJet's trainer: the JSON of a WorkflowOutput, answered by `ack`. Results are independent of
each other: a listener that has ended delays no other.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from palestra.episodes.board_events import RunProgress
from palestra.server.agentjet.names import ADDRESS, RUN
from palestra.server.agentjet.outputs import output_of
from palestra.server.broker.broker import Broker
from palestra.server.broker.deliveries import Deliveries, DeliveryReading
from palestra.server.broker.push_addresses import check_address
from palestra.server.broker.push_retries import PushTimings, RetriedPushes, RunKey
from palestra.types.episodes import PlayedGroup

ACK_S, LONGEST_ACK_S = 30.0, 60.0
"""AgentJet's trainer answers before it does anything with a result."""
AT_ONCE = 64
"""Maximum number of open connections to listeners that were not tried yet, and of those to listeners that did not
answer."""
LOOK_AT = 256
ACK = "ack"


class ResultPushes:
    def __init__(self, broker: Broker, deliveries: Deliveries, pushes: RetriedPushes):
        self._broker, self._deliveries, self._retried_pushes = broker, deliveries, pushes
        self._timings = PushTimings(ACK_S, LONGEST_ACK_S, AT_ONCE)
        self._seen: dict[RunKey, int] = {}
        """Groups up to this number are being sent, or need not be."""

    def is_concerned(self, key: RunKey, progress: RunProgress) -> bool:
        return key[1] == RUN

    def look(self, key: RunKey) -> None:
        if key[1] != RUN:
            return
        while groups := self._unseen(key):
            for group in groups:
                if address := group.tags.get(ADDRESS):
                    self._retried_pushes.begin((key, group.number), partial(self._send, key, group.number, address))
            self._seen[key] = groups[-1].number

    def forget(self, key: RunKey | None) -> None:
        for known in [one for one in self._seen if key in (None, one)]:
            del self._seen[known]

    def _unseen(self, key: RunKey) -> list[PlayedGroup]:
        after = max(self._seen.get(key, 0), self._committed(key))
        return self._broker.apply(lambda board, now: board.delivered(*key, now, after=after, limit=LOOK_AT))

    async def _send(self, key: RunKey, number: int, address: str) -> None:
        check_address(ADDRESS, address, self._broker.config.push_hosts)  # it may have been allowed earlier
        sender = self._retried_pushes.sender(address, self._timings)
        try:
            is_taken = await sender.send(partial(self._payload, key, number), ACK)
        finally:
            sender.close()
        if is_taken:
            await self._broker.do(lambda board, now: board.commit_one(*key, number, now))

    async def _payload(self, key: RunKey, number: int) -> bytes | None:
        """Returns what is sent; None: it is committed already."""
        if self._committed(key) >= number:
            return None
        groups = await self._deliveries.read(DeliveryReading(*key, number - 1, 1), wait_s=0, tokens=True)
        if not groups or groups[0].number != number:
            return None
        return await asyncio.to_thread(lambda: msgspec.json.encode(output_of(groups[0])))

    def _committed(self, key: RunKey) -> int:
        return self._broker.apply(lambda board, _now: board.run_info(*key)).committed
