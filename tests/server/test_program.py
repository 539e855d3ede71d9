"""How long programs run: until they are asked to stop, or a part of their work fails."""

import asyncio

import pytest

from fenka.server.program import identity, working_until


class Work:
    """A part of a program. ended: whether it was cancelled."""

    ended = False

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


async def fail() -> None:
    """Fail as a part with a bug does."""
    raise LookupError("a bug")


async def test_work_goes_on_while_a_program_ends() -> None:
    """What has begun is finished in the block, by parts that still run."""
    stop, parts = asyncio.Event(), (Work(), Work())
    stop.set()
    async with working_until(stop, *(part.run() for part in parts)):
        assert not any(part.ended for part in parts)
    assert all(part.ended for part in parts)


async def test_program_ends_when_a_part_of_it_fails() -> None:
    """The others are cancelled. There is nothing to finish: the process is to be restarted."""
    part = Work()
    with pytest.raises(LookupError, match="a bug"):
        async with working_until(asyncio.Event(), part.run(), fail()):
            pytest.fail("the program does not end in order")
    assert part.ended


async def test_failure_is_reported_when_a_stop_is_requested_too() -> None:
    """A failure is never lost."""
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(LookupError, match="a bug"):
        async with working_until(stop, fail()):
            await asyncio.sleep(0)


def test_identity_names_a_process_and_no_other() -> None:
    """A program that restarts under the same name must not mistake a predecessor's Lease for its own."""
    first, second = identity("pod-a"), identity("pod-a")
    assert first != second
    assert {first.rpartition("_")[0], second.rpartition("_")[0]} == {"pod-a"}
