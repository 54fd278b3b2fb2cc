"""The process that receives: `python -m loadtests.kit.driver FD`, started by pump.py, one for each locust process.

It reads questions from a socket, asks them all at once on one asyncio loop, and writes back what was seen of each, and
once a second what it had to do for it. It ends when the socket does, so it never outlives its locust.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time

from loadtests.kit import talk, ways
from loadtests.kit.talk import Ask, Pulse, Target

PULSE_SECONDS = 1.0
GREET_SECONDS = 10.0
LONGEST_LINE = 2**26


class Driver:
    """The open requests of one target."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._open: dict[int, asyncio.Task[None]] = {}
        self._meter = ways.Meter()

    async def run(self) -> None:
        """Serve until the other side is gone."""
        _, _, body = talk.read(await self._reader.readline())
        self._target = Target(**body)
        self._way = ways.way(self._target)
        try:
            async with asyncio.timeout(GREET_SECONDS):
                await self._way.greet()
        except (ways.Failure, TimeoutError):
            pass  # the requests will fail as well, and be counted
        self._writer.write(talk.write("ready", 0, {}))
        pulse = asyncio.create_task(self._pulse())
        try:
            while line := await self._reader.readline():
                kind, number, body = talk.read(line)
                if kind == "ask":
                    self._open[number] = asyncio.create_task(self._answer(number, Ask(**body)))
                elif kind == "cancel" and number in self._open:
                    self._open[number].cancel()
        finally:
            pulse.cancel()
            for task in list(self._open.values()):
                task.cancel()
            await asyncio.gather(*self._open.values(), return_exceptions=True)
            await self._way.close()

    async def _answer(self, number: int, ask: Ask) -> None:
        try:
            seen = await ways.read(self._way, ask, self._target, self._meter)
        finally:
            del self._open[number]
        self._writer.write(talk.write("seen", number, talk.seen_plain(seen)))

    async def _pulse(self) -> None:
        before, spent, counted = time.monotonic(), time.process_time(), 0
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            now, cpu, count = time.monotonic(), time.process_time(), self._meter.messages
            pulse = Pulse(seconds=now - before, messages=count - counted, cpu=cpu - spent, open=len(self._open))
            self._writer.write(talk.write("pulse", 0, talk.plain(pulse)))
            before, spent, counted = now, cpu, count


async def serve(descriptor: int) -> None:
    """Serve the socket of this descriptor."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=LONGEST_LINE)
    gc.freeze()  # what the imports left is not garbage, and looking through it takes tenths of a second
    try:
        await Driver(reader, writer).run()
    except ConnectionError:
        pass  # locust is gone
    finally:
        writer.close()


def main() -> None:
    """Serve, on uvloop where it is installed: a message then costs a fifth less."""
    descriptor = int(sys.argv[1])
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(descriptor))
    else:
        uvloop.run(serve(descriptor))


if __name__ == "__main__":
    main()
