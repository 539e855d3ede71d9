"""Reads logs of containers from the API server, and follows an instance of a job over its restarts.

A connection that breaks off is made again. Lines are asked for with their timestamps, because the API server
resumes at whole seconds: what was already returned is left out by its timestamp. An API
server that starts again is waited for.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from fenka.cluster.training_objects import TrainingContainerStatus, TrainingPod
from fenka.kubernetes.api_client import Api, ApiError, ApiUnreachable

POLL_S = 1.0
"""Between two looks at a pod that has not started, or has ended and may be replaced."""

MAX_LINE_BYTES = 1 << 16
"""Longer lines are returned in pieces."""

OUTAGE_LOOKS = 60
"""Looks at a pod while the API server does not answer; about a minute if it refuses connections."""

_TOO_MANY_REQUESTS = 429

_FRACTION = re.compile(r"\.\d+")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Which part of a log to read.

    Attributes:
        container: empty for the program's; while init containers run, the one that does.
        tail: the last lines only; None for all.
        since_s: lines of the last seconds only; None for all.
        timestamps: put its time before each line.
    """

    container: str = ""
    tail: int | None = None
    since_s: int | None = None
    timestamps: bool = False


@dataclass(frozen=True, slots=True)
class LogSource:
    """A container that has a log. pod: None if there is none to read now.

    last: nothing comes after this log, so that following ends with it.
    """

    pod: TrainingPod | None
    last: bool


class LogCursor:
    """The place up to which a container's log was returned."""

    def __init__(self) -> None:
        self.since = ""
        """The time from which the log is to be read again; empty for its beginning."""
        self.broken = False
        """Whether the connection broke off at the last reading, so that lines may follow."""
        self._returned: Counter[str] = Counter()
        """Timestamps of the lines returned since then."""
        self._stamp, self._length = "", 0
        """The timestamp of the last of them, and how many bytes of that line were returned."""
        self._overlap: Counter[str] = Counter()
        self._resumable = ""
        self._hidden = self._resumed = False
        self._read = 0
        """Bytes of the current line that were read."""

    def rewind(self) -> None:
        """Begin to read again from `since`. The last line may have been incomplete."""
        self.broken = False
        self._overlap = self._returned.copy()
        self._overlap[self._stamp] -= 1
        self._resumable = self._stamp

    def begin_line(self, stamp: str) -> None:
        """Begin a line with this timestamp.

        Lines of both outputs of a program are not exactly in the order of their timestamps.
        """
        self._hidden = self._overlap[stamp] > 0
        if self._hidden:
            self._overlap[stamp] -= 1
            return
        self._resumed, self._resumable = stamp == self._resumable, ""
        self._read = 0
        if self._resumed:
            return
        self._stamp, self._length = stamp, 0
        second = _FRACTION.sub("", stamp)
        if second > self.since:
            self.since = second
            self._returned.clear()
        if second == self.since:
            self._returned[stamp] += 1

    def new_part(self, text: bytes) -> bytes | None:
        """Return what is new of the line's next part; None if it was returned before."""
        if self._hidden:
            return None
        new = text[max(self._length - self._read, 0) :]
        self._read += len(text)
        self._length = max(self._length, self._read)
        return None if self._resumed and not new else new


def log_container(pod: TrainingPod, name: str = "") -> str:
    """Return the container whose log is shown; empty if none has started."""
    if name:
        return name if _started(pod.container(name)) else ""
    main = pod.main_container
    if _started(pod.container(main)):
        return main
    inits = [container.name for container in pod.spec.init_containers]
    running = [init for init in inits if _started(pod.container(init))]
    return running[-1] if running else ""


def _started(status: TrainingContainerStatus | None) -> bool:
    if status is None:
        return False
    return status.state.running is not None or status.state.terminated is not None


async def read_log(api: Api, pod: TrainingPod, options: LogOptions) -> AsyncIterator[bytes]:
    """Yield a container's log in blocks. Raises ApiError, ApiUnreachable."""
    async for block in api.stream(f"{pod.path}/log", **_query(options)):
        yield block


async def follow_log(
    api: Api,
    find: Callable[[], Awaitable[LogSource]],
    options: LogOptions,
    poll_s: float,
) -> AsyncIterator[str]:
    """Yield the lines of an instance's log, over restarts of its container and its pod, until its last one.

    Args:
        find: returns the pod that the instance has now.
        poll_s: seconds between two looks at a pod that has no log now; normally POLL_S.

    Raises:
        ApiError: if the API server refuses to read the pod.
        ApiUnreachable: if it does not answer for OUTAGE_LOOKS looks in a row.
    """
    cursors: dict[tuple[str, str, int], LogCursor] = {}
    while True:
        source = await _find_patiently(find, poll_s)
        container = log_container(source.pod, options.container) if source.pod else ""
        is_new = broken = False
        if source.pod is not None and container:
            status = source.pod.container(container)
            key = source.pod.metadata.uid, container, status.restart_count if status else 0
            is_new = key not in cursors
            cursor = cursors.setdefault(key, LogCursor())
            # Only the beginning is left out; what comes later is all new.
            first = len(cursors) == 1 and not cursor.since
            selected = options if first else LogOptions(timestamps=options.timestamps)
            async for line in _new_lines(api, source.pod, container, selected, cursor):
                yield line
            broken = cursor.broken
        if source.last and not broken:
            return
        if not is_new:
            await asyncio.sleep(poll_s)


async def _find_patiently(find: Callable[[], Awaitable[LogSource]], poll_s: float) -> LogSource:
    """Return what `find` returns; call it again while the API server is not able to answer."""
    for _ in range(OUTAGE_LOOKS - 1):
        try:
            return await find()
        except ApiUnreachable:
            pass
        except ApiError as why:
            if why.status < 500 and why.status != _TOO_MANY_REQUESTS:
                raise
        await asyncio.sleep(poll_s)
    return await find()


async def _new_lines(
    api: Api, pod: TrainingPod, container: str, options: LogOptions, cursor: LogCursor
) -> AsyncIterator[str]:
    """Yield the lines of a container's log behind the cursor, until the connection ends."""
    query = _query(options) | {"container": container, "follow": "true", "timestamps": "true"}
    if cursor.since:
        query["sinceTime"] = cursor.since
    cursor.rewind()
    try:
        stamp = ""
        async for piece, begins in _lines(api.stream(f"{pod.path}/log", **query)):
            text = piece
            if begins:
                head, _, text = piece.partition(b" ")
                stamp = head.decode(errors="replace")
                cursor.begin_line(stamp)
            new = cursor.new_part(text)
            if new is not None:
                shown = new.decode(errors="replace")
                yield f"{stamp} {shown}" if options.timestamps else shown
    except ApiUnreachable:
        # Whether the API server is there is seen when the pod is looked at again.
        cursor.broken = True
    except ApiError as why:
        # The container has not started, or the pod is gone, since it was looked at.
        if why.status not in (400, 404):
            raise


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield lines, long ones in pieces, each with whether it begins a line.

    A progress bar is one line as long as its training runs.
    """
    rest, begins = b"", True
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if begins or line:
                yield line, begins
            begins = True
        if len(rest) >= MAX_LINE_BYTES:
            yield rest, begins
            rest, begins = b"", False
    if rest:
        yield rest, begins


def _query(options: LogOptions) -> dict[str, str | int]:
    query: dict[str, str | int] = {}
    if options.container:
        query["container"] = options.container
    if options.tail is not None:
        query["tailLines"] = options.tail
    if options.since_s is not None:
        query["sinceSeconds"] = options.since_s
    if options.timestamps:
        query["timestamps"] = "true"
    return query
