"""Reads files of `/proc` that their process can block, in a child process that can be abandoned.

`environ` is the process's own memory, and reading `maps` takes a lock that the process can hold. A program
that maps a file of its own FUSE server blocks every reader, beyond SIGKILL. So a child reads, and is
abandoned after the deadline.
"""

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_READER = """
import sys
most, *paths = sys.argv[1:]
out = sys.stdout.buffer
for path in paths:
    try:
        with open(path, "rb") as file:
            text = file.read(int(most))
    except OSError:
        text = None
    out.write(b"%d\\n" % (-1 if text is None else len(text)) + (text or b""))
    out.flush()
"""


def read_files(
    paths: Sequence[Path], most_bytes: int, timeout_s: float
) -> Mapping[Path, bytes | None]:
    """Return the files' first bytes, or None for a file that cannot be read.

    A file that blocks the reader is missing, as are all files after it.
    """
    if not paths:
        return {}
    words = [sys.executable, "-ISc", _READER, str(most_bytes), *map(str, paths)]
    # Not used as a context manager, which would wait for its end.
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert child.stdout
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        output = late.output or b""
        child.kill()
    finally:
        child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0)
    return dict(zip(paths, _split(output), strict=False))


def _split(output: bytes) -> list[bytes | None]:
    contents: list[bytes | None] = []
    while b"\n" in output:
        length, _, rest = output.partition(b"\n")
        size = int(length)
        if size > len(rest):
            break
        contents.append(None if size < 0 else rest[:size])
        output = rest[max(size, 0) :]
    return contents
