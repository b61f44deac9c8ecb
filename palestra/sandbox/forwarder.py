"""The program that carries connections in a container from a port to a Unix socket.

It is handed over as text, because nothing of ours is in an image.
"""

from __future__ import annotations

FORWARDER = """
import asyncio, sys

async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()

async def accepted(reader, writer):
    try:
        there, back = await asyncio.open_unix_connection(sys.argv[1])
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(copy(reader, back), copy(there, writer))
    writer.close()
    back.close()

async def main():
    server = await asyncio.start_server(accepted, "127.0.0.1", int(sys.argv[2]))
    await server.serve_forever()

asyncio.run(main())
"""
