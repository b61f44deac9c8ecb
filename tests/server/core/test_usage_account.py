"""Usage is counted once, also when servers with logs of their own take turns with one database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection

from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.telemetry.metrics import Metrics
from palestra.store import Store
from palestra.store.queries.models import insert_model
from palestra.store.queries.sessions import insert_session
from palestra.store.queries.usage import read_usage, usage_seqs
from palestra.store.records import ModelRow, SessionRow
from palestra.store.usage_log import UsageLog
from palestra.types import LoraConfig
from palestra.types.engine import DatumOutput, PassResult

MODEL, OWNER = "s:train:0", "me"
PASS = PassResult(outputs=[DatumOutput(logprobs=b"", shape=(10,))], metrics={})


def add_model(conn: Connection) -> None:
    insert_session(conn, SessionRow(session_id="s", owner=OWNER, created_at=0.0, last_heartbeat_at=0.0))
    row = ModelRow(
        model_id=MODEL,
        session_id="s",
        owner=OWNER,
        base_model="m",
        lora=LoraConfig(rank=8),
        created_at=0.0,
        last_request_at=0.0,
    )
    insert_model(conn, row)


def test_servers_that_take_turns_count_once(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        store.write_now(add_model)

        async def take_turn(log: str, written: Sequence[int] = (), unwritten: Sequence[int] = (), **has: bool) -> int:
            """Restores, counts these requests, and is killed; returns the tokens of today."""
            seqs = store.read_now(lambda c: usage_seqs(c, [MODEL])) if has.get("model", True) else {}
            account = UsageAccount(store, UsageLog(tmp_path / log), Metrics())
            await account.restore(seqs)
            for seq_id in written:
                account.sampled(OWNER, "", 1, sampled_tokens=0)
                account.trained(OWNER, MODEL, seq_id, PASS, 0.0)
            await account.flush()
            for seq_id in unwritten:
                account.trained(OWNER, MODEL, seq_id, PASS, 0.0)
            account.close()
            return account.tokens_today(OWNER)

        async def take_turns() -> None:
            assert await take_turn("a", [1, 2], [3]) == 32
            assert await take_turn("b", [3, 4]) == 44  # it has the result of request 3 again
            assert await take_turn("a") == 44
            assert await take_turn("b") == 44
            assert await take_turn("a", model=False) == 44  # it has ended
            assert sum(one.tokens for one in store.read_now(read_usage)) == 44
            assert await take_turn("a", [4, 5], [6]) == 66
            assert await take_turn("a") == 66

        asyncio.run(take_turns())
