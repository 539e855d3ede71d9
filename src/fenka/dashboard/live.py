"""Follows the daemon for all viewers: one connection, one message for everybody.

The daemon may be killed, replaced or stopped at any time. The last message stays, with a sentence that it is
old.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from fenka.core.errors import FenkaError
from fenka.dashboard.stream import Fanout
from fenka.local.machine_board import Surroundings, Viewer, world
from fenka.views.board import World
from fenka.workstation import protocol
from fenka.workstation.client import DaemonConnection, DaemonUnavailable, RequestFailed
from fenka.workstation.paths import Runtime

T = TypeVar("T")

DEADLINE_S = 3.0
"""For an answer of the daemon, which may hang."""

RETRY_S = 0.5
"""Between attempts to connect."""

SURROUNDINGS_PERIOD_S = 5.0
"""Between readings of the records of trainings, notebooks and services."""

_encode = msgspec.json.Encoder().encode


class Live:
    """The state of this machine, and the viewers that get each change of it."""

    def __init__(
        self,
        runtime: Runtime,
        viewer: Viewer,
        look_around: Callable[[protocol.MachineSnapshot], Surroundings],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        runtime: the daemon's directory.
        viewer: the user of this process.
        look_around: reads what the snapshot does not have. It may take long and is called in a thread.
        clock: Unix seconds.
        """
        self._runtime, self.viewer, self._clock = runtime, viewer, clock
        self._look_around = look_around
        self._around = Surroundings()
        self._looked_at = -SURROUNDINGS_PERIOD_S
        self._problem, self._at = "", 0.0
        self.fanout = Fanout()
        self.snapshot: protocol.MachineSnapshot | None = None
        self.encoded: bytes | None = None
        """The last World as JSON."""
        self._looking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Follow the daemon until cancelled."""
        while True:
            try:
                await self._follow()
            except (FenkaError, OSError, msgspec.MsgspecError) as why:
                self._set_problem(_sentence(why))
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Follow one daemon until it is gone. Raises FenkaError, OSError."""
        connection = await _in_thread(lambda: connect(self._runtime))
        with connection:
            seen = 0
            while True:
                snapshot = await self._next(connection, seen)
                seen = snapshot.revision or 0
                self.show(snapshot)
                # It may take long, and asks the daemon, which may hang.
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._read_surroundings(snapshot))

    async def _next(self, connection: DaemonConnection, seen: int) -> protocol.MachineSnapshot:
        """Return the next snapshot, however long it takes; after the deadline viewers are told."""
        connection.send(protocol.Watch(seen))
        while not await _readable(connection, DEADLINE_S):
            self._set_problem("the fenka daemon does not answer: what is shown is old")
        answer = await _in_thread(lambda: connection.receive(DEADLINE_S))
        if not isinstance(answer, protocol.MachineSnapshot):
            raise RequestFailed(protocol.failure_reason(answer))
        return answer

    async def _read_surroundings(self, snapshot: protocol.MachineSnapshot) -> None:
        if time.monotonic() - self._looked_at < SURROUNDINGS_PERIOD_S:
            return
        with contextlib.suppress(FenkaError, OSError):
            around = await _in_thread(lambda: self._look_around(snapshot))
            if around != self._around:
                self._around = around
                self._publish()
        self._looked_at = time.monotonic()

    def show(self, snapshot: protocol.MachineSnapshot) -> None:
        """Show viewers what the daemon has answered."""
        self._problem, self.snapshot, self._at = "", snapshot, self._clock()
        self._publish()

    def _set_problem(self, sentence: str) -> None:
        if sentence != self._problem:
            self._problem = sentence
            self._publish()

    def _publish(self) -> None:
        shown = self.world()
        if shown is not None:
            self.encoded = _encode(shown)
            self.fanout.publish("world", self.encoded)

    def world(self) -> World | None:
        """Return what the page shows now; None before the daemon has answered once."""
        if self.snapshot is None:
            return None
        shown = world(self.snapshot, self.viewer, self._around, self._at)
        if not self._problem:
            return shown
        return msgspec.structs.replace(shown, problems=[self._problem, *shown.problems])


def connect(runtime: Runtime) -> DaemonConnection:
    """Connect to the daemon within the deadline. Starts none. Raises FenkaError, OSError."""
    return DaemonConnection(runtime, timeout_s=DEADLINE_S)


async def request(
    runtime: Runtime, message: msgspec.Struct, expected: type[T], timeout_s: float = DEADLINE_S
) -> T:
    """Send one request of this process's user, and return its answer.

    Raises RequestFailed for any other answer, DaemonUnavailable if there is none within the time.
    """

    def ask() -> T:
        with connect(runtime) as connection:
            connection.send(message)
            answer = connection.receive(timeout_s)
            if not isinstance(answer, expected):
                raise RequestFailed(protocol.failure_reason(answer))
            return answer

    try:
        return await asyncio.to_thread(ask)
    except (TimeoutError, ConnectionError):
        raise DaemonUnavailable("the fenka daemon does not answer: try again") from None


async def _in_thread(work: Callable[[], T]) -> T:
    """Call a function in a thread of its own, for which the end of this program does not wait."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as why:
            error = why
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await result


async def _readable(connection: DaemonConnection, within_s: float) -> bool:
    """Return whether there is something to read within this time."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        async with asyncio.timeout(within_s):
            await ready.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(connection.fileno())
    return True


def _sentence(why: Exception) -> str:
    if isinstance(why, FenkaError):
        return str(why)
    return "the fenka daemon went away: what is shown is old"
