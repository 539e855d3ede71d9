"""Parts of logs that are files of this machine."""

from typing import BinaryIO

BLOCK_BYTES = 1 << 16


def last_lines(file: BinaryIO, lines: int | None) -> int:
    """Return where the last lines begin: 0 for None, the end of the file for 0."""
    place = end = file.seek(0, 2)
    if lines is None or not lines:
        return 0 if lines is None else end
    while place:
        size = min(BLOCK_BYTES, place)
        place -= size
        file.seek(place)
        block = file.read(size)
        # A newline at the end belongs to the last line.
        before = size - (place + size == end)
        while (newline := block.rfind(b"\n", 0, before)) >= 0:
            lines -= 1
            if not lines:
                return place + newline + 1
            before = newline
    return 0
