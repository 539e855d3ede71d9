"""Logs of containers: which container, which lines, and what happens when the connection breaks off."""

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.training_objects import TrainingPod
from fenka.kubernetes import pod_logs
from fenka.kubernetes.api_client import ApiError, ApiUnreachable
from fenka.kubernetes.pod_logs import (
    LogCursor,
    LogOptions,
    LogSource,
    follow_log,
    log_container,
    read_log,
)
from tests.builders import Json, pod
from tests.fakes.api_server import FakeApiServer, Fault, api_server

RUNS: Json = {"running": {}}
ENDED: Json = {"terminated": {"exitCode": 0}}
WAITS: Json = {"waiting": {"reason": "PodInitializing"}}


def a_pod(
    main: Json, init: Json | None = None, *, name: str = "p", restarts: int = 0
) -> TrainingPod:
    """Return a pod whose containers are in these states."""
    status: Json = {
        "containerStatuses": [{"name": "main", "state": main, "restartCount": restarts}]
    }
    spec: Json = {}
    if init is not None:
        spec["initContainers"] = [{"name": "init-code"}]
        status["initContainerStatuses"] = [{"name": "init-code", "state": init}]
    return msgspec.convert(pod(name, node="a", status=status, spec=spec), TrainingPod)


@pytest.mark.parametrize(
    ("main", "init", "name", "container"),
    [
        (RUNS, None, "", "main"),
        (ENDED, None, "", "main"),
        (WAITS, RUNS, "", "init-code"),
        (WAITS, ENDED, "", "init-code"),
        (WAITS, WAITS, "", ""),
        (RUNS, ENDED, "", "main"),
        (RUNS, ENDED, "init-code", "init-code"),
        (WAITS, None, "main", ""),
        (RUNS, None, "nobody", ""),
    ],
)
def test_log_is_the_programs_or_that_of_the_code_while_it_is_cloned(
    main: Json, init: Json | None, name: str, container: str
) -> None:
    """Nothing is shown of a container that has not started."""
    assert log_container(a_pod(main, init), name) == container


def line(second: int, text: str, fraction: str = "123456789") -> str:
    """Return a line with its timestamp."""
    return f"2024-01-01T00:00:{second:02}.{fraction}Z {text}"


async def test_read_passes_the_options_on() -> None:
    """Tail, since and timestamps are the API server's."""
    async with api_server() as server, server.api() as api:
        server.logs["p", "main"] = [line(1, "one"), line(2, "two"), line(3, "three")]
        options = LogOptions("main", tail=2, since_s=60, timestamps=True)
        text = b"".join([block async for block in read_log(api, a_pod(RUNS), options)])
    assert text.decode() == line(2, "two") + "\n" + line(3, "three") + "\n"
    assert "sinceSeconds=60" in server.requests[-1]


async def followed(
    server: FakeApiServer, sources: list[LogSource], *logs: list[str], **options: int
) -> list[str]:
    """Return the lines that following yields while the pod and its log go through these states."""
    steps = iter(zip(sources, logs, strict=True))

    async def find() -> LogSource:
        source, log = next(steps)
        if source.pod is not None:
            server.logs[source.pod.metadata.name, "main"] = log
        return source

    async with server.api() as api:
        lines = follow_log(api, find, LogOptions(**options), poll_s=0)  # type: ignore[arg-type]
        return [each async for each in lines]


async def test_following_resumes_without_repeating_a_line_when_the_connection_breaks_off() -> None:
    """The API server resumes at a whole second, and two lines may have the same timestamp."""
    running, ended = LogSource(a_pod(RUNS), last=False), LogSource(a_pod(ENDED), last=True)
    first = [line(1, "one"), line(2, "two"), line(2, "two")]
    second = [*first, line(2, "two"), line(2, "again", "2"), line(2, "", "3"), line(3, "three")]
    async with api_server() as server:
        lines = await followed(server, [running, running, ended], first, first, second)
    assert lines == ["one", "two", "two", "two", "again", "", "three"]


def breaking_off(text: str) -> Fault:
    """Return a fault: the first connection gets this text of a log and breaks off."""
    breaks = iter([True])

    async def break_off(request: web.Request) -> web.StreamResponse | None:
        if not next(breaks, False):
            return None
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(text.encode())
        assert request.transport
        request.transport.close()
        return answer

    return break_off


async def test_following_reads_on_when_the_connection_breaks_off_after_the_jobs_end() -> None:
    """The last log is complete only if the API server has ended it."""
    log = [line(1, "one"), line(2, "two")]
    ended = LogSource(a_pod(ENDED), last=True)
    async with api_server() as server:
        server.before = breaking_off(f"{log[0]}\n{log[1][:-1]}")
        assert await followed(server, [ended, ended], log, log) == ["one", "two"]


@pytest.mark.parametrize("before", [[], [line(2, "two")]])
async def test_following_resumes_within_a_line_that_was_returned_in_pieces(
    before: list[str],
) -> None:
    """The line has the timestamp of the one before it."""
    bar = "".join(f"\r{number}" for number in range(100_000))
    log = [*before, line(2, bar), line(2, "end", "5")]
    ended = LogSource(a_pod(ENDED), last=True)
    async with api_server() as server:
        server.before = breaking_off("\n".join(log)[: len(bar) // 2])
        lines = await followed(server, [ended, ended], log, log)
    assert lines[: len(before)] == ["two"] * len(before)
    assert "".join(lines[len(before) :]) == bar + "end"


async def test_following_goes_on_with_the_next_pod_when_the_job_restarts() -> None:
    """And with the next container when the pod's own restarts."""
    sources = [
        LogSource(a_pod(ENDED), last=False),
        LogSource(a_pod(RUNS, restarts=1), last=False),
        LogSource(None, last=False),
        LogSource(a_pod(WAITS, name="q"), last=False),
        LogSource(a_pod(ENDED, name="q"), last=True),
    ]
    logs = [[line(1, "first")], [line(2, "second")], [], [], [line(1, "third")]]
    async with api_server() as server:
        assert await followed(server, sources, *logs) == ["first", "second", "third"]


async def test_following_shows_the_whole_log_after_the_first_lines_of_tail() -> None:
    """`--tail` is about what was there at the start."""
    running, ended = LogSource(a_pod(RUNS), last=False), LogSource(a_pod(ENDED), last=True)
    logs = [
        [line(1, "one"), line(2, "two")],
        [line(1, "one"), line(2, "two"), line(2, "three", "5")],
    ]
    async with api_server() as server:
        assert await followed(server, [running, ended], *logs, tail=1) == ["two", "three"]


async def test_following_returns_a_line_in_pieces_when_it_has_no_end() -> None:
    """A progress bar ends its lines by a carriage return: nothing would be shown, and all be kept."""
    bar = "".join(f"\r{number}" for number in range(100_000))
    source = LogSource(a_pod(ENDED), last=True)
    log = [line(1, "begin"), line(2, bar), line(3, "end")]
    async with api_server() as server:
        first, *pieces, last = await followed(server, [source], log)
    assert (first, "".join(pieces), last) == ("begin", bar, "end")
    assert len(pieces) > 1
    assert max(map(len, pieces)) < len(bar)


@pytest.mark.parametrize(
    "outage", [ApiUnreachable("no answer"), ApiError(503, "", "starting"), ApiError(429, "", "")]
)
async def test_following_goes_on_when_the_api_server_is_away_for_a_while(
    outage: Exception,
) -> None:
    """It answers again before the last look that is allowed."""
    away = iter([outage] * (pod_logs.OUTAGE_LOOKS - 1))
    async with api_server() as server, server.api() as api:
        server.logs["p", "main"] = [line(1, "one")]

        async def find() -> LogSource:
            for why in away:
                raise why
            return LogSource(a_pod(ENDED), last=True)

        assert [each async for each in follow_log(api, find, LogOptions(), poll_s=0)] == ["one"]


async def test_following_ends_at_once_when_the_api_server_refuses() -> None:
    """A right that is missing does not come back by waiting."""
    looks = 0

    async def find() -> LogSource:
        nonlocal looks
        looks += 1
        raise ApiError(403, "Forbidden", "no")

    async with api_server() as server, server.api() as api:
        with pytest.raises(ApiError, match="no"):
            assert [each async for each in follow_log(api, find, LogOptions(), poll_s=0)] == []
    assert looks == 1


async def test_following_ends_when_the_api_server_stays_away() -> None:
    """The last look at the pod says so."""
    async with api_server() as server, server.api() as api:

        async def find() -> LogSource:
            await server.stop()
            await api.get("/api/v1/pods", TrainingPod)
            raise AssertionError

        with pytest.raises(ApiUnreachable):
            assert [each async for each in follow_log(api, find, LogOptions(), poll_s=0)] == []
        await server.start()


STAMPS = st.lists(
    st.builds(
        lambda second, part: f"2024-01-01T00:00:{second:02}.{part}Z",
        st.integers(0, 3),
        st.integers(0, 2),
    )
)


@given(STAMPS, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=4))
def test_cursor_returns_each_line_once_wherever_the_connection_breaks(
    stamps: list[str], breaks: list[tuple[int, int]]
) -> None:
    """It breaks after some lines and a part of the next; each reading begins at a whole second."""
    log = [(stamp, b"a line"[number % 7 :]) for number, stamp in enumerate(sorted(stamps))]
    cursor, returned = LogCursor(), list[bytes]()
    for whole, part in [*breaks, (len(log), 0)]:
        cursor.rewind()
        since = cursor.since[:19]
        received = [
            *log[:whole],
            *((stamp, text[:part]) for stamp, text in log[whole:][:1] if part),
        ]
        for stamp, text in received:
            if stamp[:19] < since:
                continue
            cursor.begin_line(stamp)
            new = cursor.new_part(text)
            if new is not None:
                returned.append(new)
    assert b"".join(returned) == b"".join(text for _, text in log)
    if not any(part for _, part in breaks):
        assert returned == [text for _, text in log]
