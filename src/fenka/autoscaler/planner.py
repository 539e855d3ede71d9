"""Makes plans in another process, and starts that again if it ends."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fenka.autoscaler.plan_worker import LENGTH_BYTES, PlanAnswer, PlanRequest
from fenka.core.errors import FenkaError
from fenka.core.nodes.case import PlanningCase
from fenka.core.nodes.plan import NodePlan

PATIENCE_S = 30.0
"""The worker is ended if it does not answer this long after its time limit."""


class PlanFailed(FenkaError):
    """No plan was made; the next pass tries again."""


class Planner(Protocol):
    """Makes plans."""

    async def plan(self, case: PlanningCase, seconds: float) -> tuple[NodePlan, float]:
        """Return a plan and the seconds that it took. Raises PlanFailed."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process that makes plans, and the two directions of the socket to it."""

    process: asyncio.subprocess.Process
    answers: asyncio.StreamReader
    requests: asyncio.StreamWriter

    async def exchange(self, data: bytes) -> bytes:
        """Return the answer to a request."""
        self.requests.write(len(data).to_bytes(LENGTH_BYTES) + data)
        await self.requests.drain()
        length = int.from_bytes(await self.answers.readexactly(LENGTH_BYTES))
        return await self.answers.readexactly(length)

    async def end(self) -> None:
        """End the process."""
        self.requests.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def _start_worker() -> _Worker:
    own, others = socket.socketpair()
    with others:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-Pm",
            "fenka.autoscaler.plan_worker",
            stdin=others.fileno(),
            stdout=others.fileno(),
            cwd="/",
        )
    return _Worker(process, *await asyncio.open_connection(sock=own))


class PlanProcess:
    """A `Planner` in a process of its own."""

    def __init__(self) -> None:
        self._known: _Worker | None = None

    async def stop(self) -> None:
        """End the process."""
        worker, self._known = self._known, None
        if worker is not None:
            await worker.end()

    async def start(self) -> _Worker:
        """Return the process, a new one if there is none. The first plan need not wait for it then."""
        if self._known is None or self._known.process.returncode is not None:
            await self.stop()
            self._known = await _start_worker()
        return self._known

    async def plan(self, case: PlanningCase, seconds: float) -> tuple[NodePlan, float]:
        """Return a plan and the seconds that it took. Raises PlanFailed."""
        request = PlanRequest(msgspec.Raw(msgspec.json.encode(case)), seconds)
        try:
            worker = await self.start()
            async with asyncio.timeout(seconds + PATIENCE_S):
                data = await worker.exchange(msgspec.json.encode(request))
        except (OSError, EOFError, TimeoutError) as why:
            await self.stop()
            raise PlanFailed(f"the planning process ended or does not answer: {why!r}") from None
        except asyncio.CancelledError:
            # Its answer would be taken for that of the next request.
            await self.stop()
            raise
        answer = msgspec.json.decode(data, type=PlanAnswer)
        if answer.plan is None:
            raise PlanFailed(f"the cluster cannot be planned for: {answer.error}")
        return answer.plan, answer.seconds


@asynccontextmanager
async def plan_process() -> AsyncIterator[PlanProcess]:
    """Yield a planner whose process runs while the block does."""
    planner = PlanProcess()
    try:
        await planner.start()
        yield planner
    finally:
        await planner.stop()
