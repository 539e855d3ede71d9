"""The C library returns what the scheduler has freed."""

import asyncio
import ctypes

import pytest

from fenka.scheduler.main import returned_memory


class Library:
    """A C library that counts calls."""

    def __init__(self) -> None:
        self.options: set[int] = set()
        self.trimmed = 0

    def mallopt(self, option: int, _: int) -> None:
        """Set an option."""
        self.options.add(option)

    def malloc_trim(self, _: int) -> None:
        """Return free pages."""
        self.trimmed += 1


async def test_free_pages_are_returned_again_and_again_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass over the queue may free some."""
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    async with returned_memory(sleep=lambda _: asyncio.sleep(0)):
        while library.trimmed < 3:
            await asyncio.sleep(0)
    assert library.options == {-1, -3}
    trimmed = library.trimmed
    for _ in range(3):
        await asyncio.sleep(0)
    assert library.trimmed == trimmed


async def test_memory_is_left_alone_when_the_library_cannot_return_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only glibc can."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    async with returned_memory():
        await asyncio.sleep(0)
