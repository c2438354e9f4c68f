"""A TCP proxy in user space that does what networks do: cuts, stalls, delays, loses connections.

It runs in a thread of its own, so that the ends under test may block; each change takes effect at
once and is asked for by the test, never drawn by the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

READ_BYTES = 64 << 10
QUEUED_CHUNKS_MAX = 64


class _Pair:
    """One connection: what the client sends goes on to the server, and the other way."""

    def __init__(self, proxy: TcpProxy, client: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.client = client
        self.server: asyncio.StreamWriter | None = None

    def abort(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.transport.abort()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool
    ) -> None:
        """Carry one direction: each chunk leaves `delay_s` after it came, in order."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_CHUNKS_MAX)

        async def take() -> None:
            while True:
                data = await reader.read(READ_BYTES)
                await queue.put((loop.time() + self.proxy.delay_s, data))
                if not data:
                    return

        async def give() -> None:
            while True:
                due, data = await queue.get()
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                gate = self.proxy.up_gate if is_up else self.proxy.down_gate
                await gate.wait()
                if not data:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                writer.write(data)
                if is_up and self.proxy.recording is not None:
                    self.proxy.recording += data
                self.proxy.carried_bytes += len(data)
                limit = self.proxy.lose_after_bytes
                if limit is not None and self.proxy.carried_bytes >= limit:
                    self.proxy.lose_after_bytes = None
                    self.abort()
                    return
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(give())


class TcpProxy:
    """Listens on loopback and forwards to a port there; made by `tcp_proxy`."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.delay_s = 0.0
        self.carried_bytes = 0
        self.accepted = 0
        self.recording: bytearray | None = None
        """What clients sent, where a test wants it."""
        self.lose_after_bytes: int | None = None
        """When so many bytes were carried since, the connection that carries the next is reset."""
        self.up_gate: asyncio.Event
        self.down_gate: asyncio.Event
        self._loop = asyncio.new_event_loop()
        self._pairs: set[_Pair] = set()
        self._is_open = True
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="tcp-proxy")
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Carry nothing more in either direction; connections stay open, as a dead link's do."""
        self._do(lambda: (self.up_gate.clear(), self.down_gate.clear()))

    def cut_up(self) -> None:
        """Carry nothing more from clients to the server; answers still pass."""
        self._do(self.up_gate.clear)

    def cut_down(self) -> None:
        """Carry nothing more from the server to clients."""
        self._do(self.down_gate.clear)

    def heal(self) -> None:
        """Carry everything again, what waited first."""
        self._do(lambda: (self.up_gate.set(), self.down_gate.set()))

    def delay(self, delay_s: float) -> None:
        """Let what comes from now on take so long, each way."""
        self._do(lambda: setattr(self, "delay_s", delay_s))

    def lose_connections(self) -> int:
        """Reset every connection; what was under way is lost. Return how many there were."""
        found: list[int] = []

        def lose() -> None:
            found.append(len(self._pairs))
            for pair in list(self._pairs):
                pair.abort()

        self._do(lose)
        return found[0]

    def refuse(self, *, is_refusing: bool) -> None:
        """Reset every new connection at once, or take them again."""
        self._do(lambda: setattr(self, "_is_open", not is_refusing))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _do(self, action: Callable[[], Any]) -> None:
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self.up_gate, self.down_gate = asyncio.Event(), asyncio.Event()
        self.up_gate.set()
        self.down_gate.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        for pair in list(self._pairs):
            pair.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = _Pair(self, writer)
        self.accepted += 1
        if not self._is_open:
            pair.abort()
            return
        self._pairs.add(pair)
        try:
            other_reader, pair.server = await asyncio.open_connection("127.0.0.1", self.target_port)
            for one in (writer, pair.server):
                one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(pair.pump(reader, pair.server, is_up=True))
                group.create_task(pair.pump(other_reader, writer, is_up=False))
        except* (OSError, asyncio.CancelledError):
            pass  # the end of one side, or of the test
        finally:
            pair.abort()
            self._pairs.discard(pair)


@contextmanager
def tcp_proxy(target_port: int) -> Iterator[TcpProxy]:
    proxy = TcpProxy(target_port)
    with contextlib.closing(proxy):
        yield proxy
