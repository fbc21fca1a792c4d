"""Blocks go over a line in order, urgent ones first, and large data between them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from labkit.launch.machines.line import BEGIN, PART_BYTES, READ_BYTES, Block, FrameKind, Large, Line


def run(scenario: Callable[[Line, Line], Awaitable[None]]) -> None:
    """Run a scenario on the two ends of a line."""

    async def main() -> None:
        ends = []
        for sock in socket.socketpair():
            reader, writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES)
            ends.append(Line(reader, writer))
        writing = [asyncio.ensure_future(end.write()) for end in ends]
        await asyncio.wait_for(scenario(*ends), 60)
        for task in writing:
            task.cancel()
        for end in ends:
            end.close()

    asyncio.run(main())


async def received(line: Line, count: int) -> list[Block]:
    found = []
    async for block in line.blocks():
        found.append(block)
        if len(found) == count:
            break
    return found


def test_blocks_arrive_in_order_and_urgent_ones_first() -> None:
    async def scenario(near: Line, far: Line) -> None:
        near.send(FrameKind.OUTPUT, 3, b"first")
        near.send(FrameKind.RECORDS, 3, b"second")
        near.send(FrameKind.CLOCK, 0, b"now", urgent=True)
        blocks = await received(far, 3)
        assert blocks == [(FrameKind.CLOCK, 0, b"now"), (FrameKind.OUTPUT, 3, b"first"), (FrameKind.RECORDS, 3, b"second")]
        assert near.backlog == 0

    run(scenario)


def test_other_blocks_pass_large_data() -> None:
    data = os.urandom(20 * PART_BYTES + 7)

    async def scenario(near: Line, far: Line) -> None:
        number = near.send_large(memoryview(data))
        reports = asyncio.ensure_future(received(near, 1))  # the far end says how much it has received
        large, blocks = Large(), []
        async for kind, of, part in far.blocks():
            if kind is FrameKind.PART:
                large.add(of, part)
                if not blocks:
                    near.send(FrameKind.CLOCK, urgent=True)
                blocks.append("part")
            else:
                blocks.append("clock")
            if large.complete(number):
                break
        reports.cancel()
        assert "clock" in blocks[:10]
        assert large.read(number) == data
        large.clear()

    run(scenario)


def test_large_data_is_freed_when_no_frame_needs_it_any_more() -> None:
    def open_files() -> int:
        return len(os.listdir("/dev/fd"))

    part = (0).to_bytes(8, "little") + (4).to_bytes(8, "little") + b"data"
    before, large = open_files(), Large()
    large.use(1)
    large.forget(1)  # before it has come
    large.add(1, part)
    assert large.read(1) == b"data"
    assert open_files() == before + 1
    large.release(1)
    assert open_files() == before


def test_what_a_login_shell_prints_is_not_part_of_the_line() -> None:
    async def scenario(near: Line, far: Line) -> None:
        near._writer.write(b"Welcome to pc1!\n" + BEGIN)
        near.send(FrameKind.GONE, 1)
        assert await far.begin() == "Welcome to pc1!\n"
        assert await received(far, 1) == [(FrameKind.GONE, 1, b"")]

    run(scenario)


def test_blocks_end_with_the_connection() -> None:
    async def scenario(near: Line, far: Line) -> None:
        near.close()
        assert await received(far, 1) == []

    run(scenario)
