"""Makes plans in another process, and starts that again if it ends."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


class PlanProcess:
    """A `Planner` in a process of its own."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process, so that the first plan need not wait for it."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-Pm",
                "fenka.autoscaler.plan_worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd="/",
            )

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def plan(self, case: PlanningCase, seconds: float) -> tuple[NodePlan, float]:
        """Return a plan and the seconds that it took. Raises PlanFailed."""
        await self.start()
        request = PlanRequest(msgspec.Raw(msgspec.json.encode(case)), seconds)
        try:
            async with asyncio.timeout(seconds + PATIENCE_S):
                data = await self._exchange(msgspec.json.encode(request))
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

    async def _exchange(self, data: bytes) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(data).to_bytes(LENGTH_BYTES) + data)
        await process.stdin.drain()
        length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES))
        return await process.stdout.readexactly(length)


@asynccontextmanager
async def plan_process() -> AsyncIterator[PlanProcess]:
    """Yield a planner whose process runs while the block does."""
    planner = PlanProcess()
    try:
        await planner.start()
        yield planner
    finally:
        with contextlib.suppress(ProcessLookupError):
            await planner.stop()
