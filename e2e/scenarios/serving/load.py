"""Send requests at times that are fixed beforehand, whatever happens to earlier ones (an open loop).

    load.py URL FILE RATExSECONDS…

Each request is a line of JSON in FILE once it has ended. Its latency counts from the time at which it was to
be sent, so a client or a server that stalls does not hide the requests that waited meanwhile.
"""

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import aiohttp

TIMEOUT_S = 120
WEIGHT = 3
"""Of the tests' model: its answer is the input times this."""


@dataclass(frozen=True)
class Request:
    """A request that has ended.

    Attributes:
        at: when it was to be sent, in seconds since 1970.
        sent_late_s: how much later it was sent, because this program was late.
        latency_s: from `at` to the end of the response.
        status: of HTTP; 0 if there was no complete response.
        version: the version that answered, "" if none did.
        right: whether the answer is the model's for this input.
        error: why there was no complete response.
    """

    at: float
    sent_late_s: float
    latency_s: float
    status: int
    version: str = ""
    right: bool = False
    error: str = ""


def arrivals(phases: Sequence[tuple[float, float]], seed: int = 1) -> list[float]:
    """Return the seconds at which requests are sent: a Poisson process with each phase's mean count.

    Args:
        phases: requests per second and seconds of each phase.
        seed: of the random times.
    """
    times, begin, chance = list[float](), 0.0, random.Random(seed)
    for rate, seconds in phases:
        count = round(rate * seconds)
        times += sorted(begin + chance.random() * seconds for _ in range(count))
        begin += seconds
    return times


async def send(session: aiohttp.ClientSession, url: str, number: int, at: float) -> Request:
    """Send one request and return what became of it."""
    late, status, version, right, error = time.time() - at, 0, "", False, ""
    try:
        async with session.post(f"{url}/predict", json={"input": number}) as response:
            text = await response.text()
            status = response.status
        with contextlib.suppress(ValueError, KeyError):
            answer = json.loads(text)
            version, right = answer["version"], answer["output"] == number * WEIGHT
    except (aiohttp.ClientError, TimeoutError) as why:
        error = repr(why)
    return Request(at, late, time.time() - at, status, version, right, error)


async def run(url: str, times: Sequence[float], output: TextIO) -> None:
    """Send a request at each of the times, which count from now."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        begin = time.time()

        async def one(number: int, at: float) -> None:
            request = await send(session, url, number, at)
            output.write(json.dumps(asdict(request)) + "\n")
            output.flush()

        async with asyncio.TaskGroup() as group:
            for number, seconds in enumerate(times):
                await asyncio.sleep(begin + seconds - time.time())
                group.create_task(one(number, begin + seconds))


def read(file: Path) -> list[Request]:
    """Return the requests of a file in the order in which they were to be sent."""
    lines = (json.loads(line) for line in file.read_text().splitlines())
    return sorted((Request(**line) for line in lines), key=lambda request: request.at)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, -int(-len(values) * share // 1) - 1)]


def windows(requests: Sequence[Request], seconds: float) -> Iterator[tuple[float, list[Request]]]:
    """Yield the requests of each window of this many seconds, with the begin of the window."""
    begin = requests[0].at

    def number(request: Request) -> int:
        return int((request.at - begin) // seconds)

    for index, group in itertools.groupby(requests, number):
        yield begin + index * seconds, list(group)


def main(url: str, file: str, *phases: str) -> None:
    """Send the phases' requests."""
    parsed = [tuple(map(float, phase.split("x"))) for phase in phases]
    with Path(file).open("w") as output:
        asyncio.run(run(url, arrivals([(rate, s) for rate, s in parsed]), output))


if __name__ == "__main__":
    main(*sys.argv[1:])
