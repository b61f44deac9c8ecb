"""The server's end of the line to a worker."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import zmq

from palestra.server.link import Link, address_in
from palestra.types.engine import Hello, ModelCard, Ping, Snapshotted, encode_message

ROUNDS = 3000
CARD = ModelCard(folder="", architecture="", vocab_size=1, max_positions=1, parameters=1, dtype="float32", device="cpu")


def echo(address: str) -> None:
    """A worker that answers every message with two."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.IDENTITY, b"w")
        line.connect(address)
        hello = Hello(pid=1, worker_id="w", card=CARD, models=[], sampler_ids=[], unstored=[])
        line.send_multipart([b"", encode_message(hello)])
        epoch, _ = line.recv_multipart()
        answer = encode_message(Snapshotted(model_id="m", seq_id=1))
        for _ in range(ROUNDS):
            line.recv_multipart()
            line.send_multipart([epoch, answer])
            line.send_multipart([epoch, answer])


def test_no_answer_is_left_lying_when_sending_and_receiving_cross(tmp_path: Path) -> None:
    async def talk() -> int:
        link = Link(address_in(tmp_path, "w"))
        worker = threading.Thread(target=echo, args=[link.address], daemon=True)
        worker.start()
        heard = await link.receive()
        assert isinstance(heard.message, Hello)
        link.welcome(heard.message)
        count = 0

        async def listen() -> None:
            nonlocal count
            while count < 2 * ROUNDS:
                await link.receive()
                count += 1

        listening = asyncio.create_task(listen())
        for n in range(ROUNDS):
            link.send(Ping())
            if n % 3 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(listening, 20)
        link.close()
        worker.join(5)
        return count

    assert asyncio.run(talk()) == 2 * ROUNDS
