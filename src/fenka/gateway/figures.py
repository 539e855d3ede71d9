"""The figures of all gateways of a service, and each version's load by them.

A gateway reads the others' `/metrics`. Tenants run the gateways, so each answer is bounded in bytes, samples
and time. A gateway that does not answer is missing: the load of the others is a lower bound.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from fenka.core.errors import FenkaError
from fenka.core.scaling import VersionUse, version_loads
from fenka.gateway.endpoints import GatewayPeer

ADMIN_PORT = 9090
"""Where each gateway on Kubernetes serves `/metrics`."""

MAX_GATEWAYS = 50
"""Gateways that are asked; the others count as missing."""
MAX_BODY_BYTES = 1 << 20
MAX_SAMPLES = 2000
MAX_LINE_BYTES = 4096
MAX_VALUE = 1e12
WITHIN_S = 2.0
"""For one gateway, from connecting to the last byte."""
HOLD_S = 0.5
"""A reading serves all that want one for this long, however many clients ask."""

_PREFIX = "fenka_gateway_"
_NAMES = (
    "requests_in_flight",
    "requests_waiting",
    "version_weight",
    "version_idle_seconds",
    "replicas",
)
_LINES = tuple(f"{_PREFIX}{name}{end}".encode() for name in _NAMES for end in ("{", " "))

SOME_LOAD = 0.001
"""The load of a version in use that has no request at this moment."""


class InvalidFigures(FenkaError):
    """An answer cannot be used."""


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """One gateway's figures, by version.

    Attributes:
        in_flight: Requests at replicas.
        weights: Each version's weight.
        ready: Replicas that accept requests.
        idle_s: Seconds since the last request.
        waiting: Requests without a replica, of all versions.
    """

    in_flight: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    idle_s: dict[str, float] = field(default_factory=dict)
    waiting: float = 0.0


def parse_figures(body: bytes) -> GatewayFigures:
    """Return the figures of a gateway's metrics. Raises InvalidFigures."""
    figures, waiting = GatewayFigures(), None
    try:
        for family in text_string_to_metric_families("".join(_selected_lines(body))):
            for sample in family.samples:
                value, labels = float(sample.value), sample.labels
                if not 0 <= value <= MAX_VALUE:
                    raise InvalidFigures(f"has {value:g} as {sample.name}")
                match sample.name.removeprefix(_PREFIX):
                    case "requests_in_flight":
                        figures.in_flight[labels["version"]] = value
                    case "version_weight":
                        figures.weights[labels["version"]] = value
                    case "version_idle_seconds":
                        figures.idle_s[labels["version"]] = value
                    case "replicas" if labels["state"] == "ready":
                        figures.ready[labels["version"]] = value
                    case "requests_waiting":
                        waiting = value
    except (ValueError, KeyError, IndexError, TypeError):
        raise InvalidFigures("has metrics that are not Prometheus' text format") from None
    if waiting is None:
        raise InvalidFigures(f"is no gateway: it does not have {_PREFIX}requests_waiting")
    return replace(figures, waiting=waiting)


def _selected_lines(body: bytes) -> Iterator[str]:
    """Yield the lines of the metrics that are read. Raises InvalidFigures."""
    count = 0
    for line in body.split(b"\n"):
        if not line.startswith(_LINES):
            continue
        count += 1
        if len(line) > MAX_LINE_BYTES or count > MAX_SAMPLES:
            raise InvalidFigures("has more metrics than a gateway")
        try:
            yield f"{line.decode()}\n"
        except UnicodeDecodeError:
            raise InvalidFigures("has metrics that are not text") from None


@dataclass(frozen=True, slots=True)
class LoadReading:
    """The figures that the gateways of a service reported at one time.

    Attributes:
        gateways: The figures of those that answered.
        missing: Why others did not answer, by pod.
    """

    gateways: tuple[GatewayFigures, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    def complete(self, version: str) -> bool:
        """Return whether the load of a version is known exactly, and not only a lower bound of it."""
        return (
            bool(self.gateways)
            and not self.missing
            # A gateway that follows the API server late may still hold back its requests.
            and all(version in gateway.weights for gateway in self.gateways)
        )

    def load(self, version: str, recent_s: float) -> float:
        """Return a version's load; see `requests_of`."""
        return requests_of(version, self.gateways, recent_s)


def requests_of(version: str, gateways: Sequence[GatewayFigures], recent_s: float) -> float:
    """Return a version's load by the figures of all gateways of its service; see `version_loads`.

    One who looks now and then would miss all short requests of a version in use. So the load of a version
    that serves and got a request within `recent_s` is never 0.
    """
    names = {name for gateway in gateways for name in gateway.weights}
    if version not in names:
        return 0.0
    uses = {
        name: VersionUse(
            max(gateway.weights.get(name, 0) for gateway in gateways),
            sum(gateway.in_flight.get(name, 0) for gateway in gateways),
            any(gateway.ready.get(name) for gateway in gateways),
        )
        for name in names
    }
    load = version_loads(uses, sum(gateway.waiting for gateway in gateways))[version]
    in_use = uses[version].serves and any(
        gateway.idle_s.get(version, recent_s) < recent_s for gateway in gateways
    )
    return max(load, SOME_LOAD) if in_use else load


class FiguresReader:
    """Reads the figures of all gateways of a service; for one event loop. `async with` closes it."""

    def __init__(
        self,
        peers: Callable[[], Sequence[GatewayPeer]],
        port: int = ADMIN_PORT,
        within_s: float = WITHIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """peers: returns the gateways of the service."""
        self._peers, self._port, self._within_s, self._clock = peers, port, within_s, clock
        self._read_at = -math.inf
        self._reading: asyncio.Task[LoadReading] | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_GATEWAYS),
            timeout=aiohttp.ClientTimeout(total=within_s),
            auto_decompress=False,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._session.close()

    async def read(self) -> LoadReading:
        """Return what the gateways report, at most HOLD_S ago."""
        task = self._reading
        if task is None or (task.done() and self._clock() - self._read_at > HOLD_S):
            task = self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(task)

    async def _read(self) -> LoadReading:
        peers = self._peers()
        asked, rest = peers[:MAX_GATEWAYS], peers[MAX_GATEWAYS:]
        missing = {peer.pod: f"more than {MAX_GATEWAYS} gateways are not asked" for peer in rest}
        gateways = list[GatewayFigures]()
        answers = await asyncio.gather(*map(self._figures, asked))
        for peer, answer in zip(asked, answers, strict=True):
            if isinstance(answer, GatewayFigures):
                gateways.append(answer)
            elif answer:
                missing[peer.pod] = answer
        self._read_at = self._clock()
        return LoadReading(tuple(gateways), missing)

    async def _figures(self, peer: GatewayPeer) -> GatewayFigures | str:
        """Return a gateway's figures, or why there are none; empty if it has no requests."""
        host = f"[{peer.host}]" if ":" in peer.host else peer.host
        try:
            return parse_figures(await self._body(f"http://{host}:{self._port}/metrics"))
        except InvalidFigures as error:
            return str(error)
        except aiohttp.ClientConnectorError as error:
            # Nothing listens in a pod that starts, or that has ended.
            ended = isinstance(error.os_error, ConnectionRefusedError) and not peer.ready
            return "" if ended else "accepts no connection"
        except TimeoutError:
            return f"does not answer within {self._within_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError):
            return "does not answer as a gateway does"

    async def _body(self, url: str) -> bytes:
        body = bytearray()
        async with self._session.get(url, allow_redirects=False) as answer:
            if answer.status != 200:
                raise InvalidFigures(f"answers /metrics with {answer.status}, expected 200")
            async for block in answer.content.iter_any():
                body += block
                if len(body) > MAX_BODY_BYTES:
                    answer.close()
                    raise InvalidFigures(f"answers more than {MAX_BODY_BYTES >> 20} MiB")
        return bytes(body)
