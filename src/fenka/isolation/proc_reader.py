"""Read files of `/proc` that wait for the process they are about, in a child that can be given up.

`environ` is the process's own memory, and for `maps` the kernel takes a lock that the process can hold. A
program that maps a file of its own FUSE server there keeps every reader waiting, beyond SIGKILL. So a
child reads, and is not waited for after the deadline.
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
    paths: Sequence[Path], most_bytes: int, patience_s: float
) -> Mapping[Path, bytes | None]:
    """The files' first bytes, None for one that cannot be read. Files after one that keeps us waiting are
    missing, and so is that one: it is the first of `paths` that is not in the answer."""
    if not paths:
        return {}
    words = [sys.executable, "-ISc", _READER, str(most_bytes), *map(str, paths)]
    # Not its context manager, which would wait for it.
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert child.stdout
    try:
        output, _ = child.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired as late:
        output = late.output or b""
        child.kill()
    finally:
        child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0)
    return dict(zip(paths, _split(output), strict=False))


def _split(output: bytes) -> list[bytes | None]:
    found: list[bytes | None] = []
    while b"\n" in output:
        length, _, rest = output.partition(b"\n")
        size = int(length)
        if size > len(rest):
            break
        found.append(None if size < 0 else rest[:size])
        output = rest[max(size, 0) :]
    return found
