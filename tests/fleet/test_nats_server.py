"""The server the other tests of this folder count on: what it holds outlives it."""

from __future__ import annotations

import asyncio

import nats

from fleet.servers import NatsServer


def test_what_a_stream_holds_outlives_a_kill(nats_server: NatsServer) -> None:
    async def publish() -> None:
        client = await nats.connect(nats_server.address)
        await client.jetstream().add_stream(name="S", subjects=["s.*"])
        for number in range(10):
            await client.jetstream().publish("s.a", b"%d" % number)
        await client.close()

    async def held() -> int:
        client = await nats.connect(nats_server.address)
        info = await client.jetstream().stream_info("S")
        await client.close()
        return int(info.state.messages)

    asyncio.run(publish())
    before = nats_server.pid
    nats_server.kill()
    nats_server.start()
    assert (nats_server.pid != before, asyncio.run(held())) == (True, 10)
