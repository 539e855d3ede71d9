"""Reads files of `/proc` that their process can block, in a child process that can be abandoned.

`environ` is the process's own memory, and reading `maps` takes a lock that the process can hold. A program
that maps a file of its own FUSE server blocks every reader, beyond SIGKILL. So a child reads, and is
abandoned after the deadline.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_READER = """
import sys
most = int(sys.argv[1])
out = sys.stdout.buffer
for path in sys.stdin.buffer.read().split(b"\\0"):
    try:
        with open(path, "rb") as file:
            text = file.read(most)
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
    words = [sys.executable, "-ISc", _READER, str(most_bytes)]
    # Not used as a context manager, which would wait for its end.
    child = subprocess.Popen(words, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout
    try:
        # A command line holds fewer paths than a user may have processes.
        output, _ = child.communicate(b"\0".join(map(os.fsencode, paths)), timeout_s)
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
    start = 0
    while (newline := output.find(b"\n", start)) >= 0:
        size = int(output[start:newline])
        start = newline + 1 + max(size, 0)
        if start > len(output):
            break
        contents.append(None if size < 0 else output[newline + 1 : start])
    return contents
