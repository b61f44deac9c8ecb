"""The server's end of the line to a worker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import zmq

from palestra.server.core.workers.link import WorkerLink, address_in
from palestra.types.engine import Hello, ModelCard, Ping, Snapshotted, encode_message

CARD = ModelCard(folder="", architecture="", vocab_size=1, max_positions=1, parameters=1, dtype="float32", device="cpu")
HELLO = Hello(pid=1, worker_id="w", card=CARD, models=[], sampler_ids=[], unstored=[])


def hold_the_loop() -> None:
    """Long enough for a message to arrive before the loop looks."""
    time.sleep(0.02)


def test_an_answer_that_arrives_while_something_is_sent_is_heard(tmp_path: Path) -> None:
    """A ZeroMQ descriptor tells of an arrival once, and sending takes that away."""

    async def talk() -> None:
        link = WorkerLink(address_in(tmp_path, "w"))
        with zmq.Context() as context, context.socket(zmq.DEALER) as worker:
            worker.setsockopt(zmq.IDENTITY, b"w")
            worker.connect(link.address)
            worker.send_multipart([b"", encode_message(HELLO)])
            link.welcome((await link.receive()).message)
            epoch = worker.recv_multipart()[0]
            for number in range(5):
                detokenizer = asyncio.create_task(link.receive())
                await asyncio.sleep(0)
                worker.send_multipart(
                    [epoch, encode_message(Snapshotted(model_id="m", seq_id=number, covered_seq=-1, file="models/m"))]
                )
                hold_the_loop()
                link.send(Ping())
                heard = await asyncio.wait_for(detokenizer, 5)
                assert heard.message == Snapshotted(model_id="m", seq_id=number, covered_seq=-1, file="models/m")
        link.close()

    asyncio.run(talk())
