"""Sends each message to all viewers: encoded once, with a short queue for each of them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

QUEUED = 4
"""Messages that wait for a slow viewer. Older ones are out of date and are dropped."""

PING_S = 15.0
"""Proxies close connections on which nothing is sent."""

PING = b": ping\n\n"

END = b"event: end\ndata: {}\n\n"
"""The last message: the server ends, and the page need not ask at its address again."""


class Fanout:
    """The viewers of one server. `publish` never waits for any of them."""

    def __init__(self) -> None:
        self._viewers: set[_Viewer] = set()
        self.latest: dict[str, bytes] = {}
        """The last frame by its event: what a new viewer gets at once."""
        self._closed = False

    @property
    def viewers(self) -> int:
        """Return how many there are."""
        return len(self._viewers)

    def publish(self, event: str, data: bytes) -> None:
        """Send a message to everybody. data: JSON without line breaks."""
        frame = b"event: %s\ndata: %s\n\n" % (event.encode(), data)
        self.latest[event] = frame
        for viewer in self._viewers:
            viewer.add(frame)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for viewer in self._viewers:
            viewer.arrived.set()

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield what one viewer is sent, until `close`."""
        viewer = _Viewer()
        for frame in self.latest.values():
            viewer.add(frame)
        self._viewers.add(viewer)
        try:
            yield PING  # The headers go out with it.
            while not self._closed:
                try:
                    async with asyncio.timeout(PING_S):
                        await viewer.arrived.wait()
                except TimeoutError:
                    yield PING
                for frame in viewer.take():
                    yield frame
            yield END
        finally:
            self._viewers.discard(viewer)


class _Viewer:
    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._queue: deque[bytes] = deque(maxlen=QUEUED)

    def add(self, frame: bytes) -> None:
        self._queue.append(frame)
        self.arrived.set()

    def take(self) -> list[bytes]:
        """Return all frames that have arrived. Later ones wait in the queue while these are sent."""
        self.arrived.clear()
        frames = [*self._queue]
        self._queue.clear()
        return frames
