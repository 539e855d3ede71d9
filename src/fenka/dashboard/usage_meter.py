"""Records whose the time of a cluster's cards was and what it cost, for `fenka usage`.

It runs in the dashboard's pod: that follows all pods and nodes, asks the nodes what is used, may have a
volume, and nothing waits for it. The scheduler's replicas have no disk, and a full disk must cost no
placement.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from aiohttp import web
from msgspec import Meta

from fenka.cluster.state import ClusterState
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.metering import SECOND_US
from fenka.core.units import MIB
from fenka.formats.quantities import check_currency, parse_memory, parse_price
from fenka.history.history_store import HistoryStore
from fenka.history.recorder import HistoryRecorder, MachineTimes
from fenka.history.series import UsageGroup, UsageRecord
from fenka.server.probes import add_probes
from fenka.views.cluster_usage import TEAM_LABEL, BusyTime, observe_cluster
from fenka.views.node_figures import NodeFigures
from fenka.views.usage_report import grouped
from fenka.workstation.protocol import UsageRead

PERIOD_S = 5.0
"""Between two observations while nothing changes."""

CARDS_PER_S = 2000
"""A large cluster is observed less often: so many cards cost a tenth of a core each second."""

WRITE_S = 10.0
CLOSE_TIMEOUT_S = 5.0
MAX_DAY = 1_000_000

_LOG = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class CannotRecord(FenkaError):
    """The options of the meter cannot be met."""

    exit_code = INVALID_INPUT


class MeterOptions(msgspec.Struct, frozen=True):
    """How a cluster's usage is recorded. Raises FenkaError for values that are none."""

    ONLY_OF_CLUSTER: ClassVar[bool] = True

    usage_file: Annotated[
        Path | None,
        Meta(title="FILE", description="record a cluster's usage here, for `fenka usage`"),
    ] = None
    usage_size: Annotated[str, Meta(title="SIZE", description="the file's limit")] = "200MiB"
    usage_port: Annotated[
        int, Meta(title="PORT", description="where usage is read, on all addresses", ge=1, le=65535)
    ] = 8251
    price: Annotated[
        list[str],
        Meta(title="MODEL=PRICE", description="an hour of a card, as 'Tesla T4=0.35'; repeatable"),
    ] = []
    currency: Annotated[
        str, Meta(title="CODE", description="of the prices of cards and elastic nodes")
    ] = "USD"
    team_label: Annotated[str, Meta(title="KEY", description="label of pods that names a team")] = (
        TEAM_LABEL
    )

    def __post_init__(self) -> None:
        check_currency(self.currency)
        for text in self.price:
            parse_price(text)
        parse_memory(self.usage_size, 1)


class UsageMeter:
    """Meters one cluster into one file. It never fails, and never waits for a disk."""

    def __init__(
        self,
        file: Path,
        options: MeterOptions,
        times: Callable[[], MachineTimes] = MachineTimes.read,
    ) -> None:
        # The kubelet opens the directories of volumes for a group, which the history refuses.
        with contextlib.suppress(OSError):
            file.parent.chmod(0o700)
        size = parse_memory(options.usage_size, 1).amount * MIB
        self._recorder = HistoryRecorder(HistoryStore(file, size), times)
        self._prices = dict(map(parse_price, options.price))
        self._options = options
        self._busy = BusyTime()
        self._observed_us: int | None = None
        self._period_s = 0.0

    @property
    def problem(self) -> str:
        """Why nothing is recorded, or what was lost, in a sentence; empty without a problem."""
        return self._recorder.problem

    @property
    def currency(self) -> str:
        """Return the code of the prices' currency."""
        return self._options.currency

    def observe(
        self,
        state: ClusterState,
        readings: Mapping[str, NodeFigures],
        prices: Mapping[str, float],
        *,
        changed: bool,
    ) -> None:
        """Charge the time since the last observation, if it is time for another one.

        Args:
            state: The cluster, which must be current: what is not observed for a minute is unobserved.
            readings: The nodes' last ones, by name.
            prices: What an hour of an elastic node costs, by name.
            changed: Whether anything has changed since the last call.
        """
        moment, last_us = self._recorder.now(), self._observed_us
        period_s = self._period_s if changed else max(PERIOD_S, self._period_s)
        if last_us is not None and moment.uptime_us - last_us < period_s * SECOND_US:
            return
        try:
            observation, holders = observe_cluster(
                state, readings, self._busy, prices, moment, self._options.team_label
            )
            self._recorder.observe(observation, holders)
        except Exception:
            # A fault here must not cost the page.
            _LOG.exception("usage is incomplete")
        else:
            self._observed_us = moment.uptime_us
            self._period_s = len(observation.cards) / CARDS_PER_S

    async def close(self) -> None:
        """Write the rest, and close the file."""
        await self._recorder.close(int(time.time()), CLOSE_TIMEOUT_S)

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Write every few seconds, and the rest at the end."""
        problem = ""
        try:
            while True:
                await sleep(WRITE_S)
                await self.write()
                if self.problem != problem:
                    problem = self.problem
                    _LOG.warning("%s", problem or "usage is recorded again")
        finally:
            await self.close()

    async def write(self) -> None:
        """Write what was charged, or keep it until that is possible."""
        try:
            await self._recorder.write(int(time.time()))
        except Exception:
            _LOG.exception("usage is incomplete")

    async def read(
        self, since_day: int, until_day: int, by: UsageGroup, *, daily: bool = False
    ) -> UsageRead:
        """Return sums of some days until now. Days are numbered from 1970 in UTC. daily: as of `grouped`."""
        await self.write()

        def read(store: HistoryStore) -> tuple[list[UsageRecord], int | None]:
            records = store.usage(since_day, until_day) or []
            return grouped(records, by, daily=daily), store.first_day()

        records, first_day = await self._recorder.read(read)
        return UsageRead(
            records, self._prices, self._options.currency, first_day, self._recorder.problem
        )

    def app(self) -> web.Application:
        """Return what answers `fenka usage`: GET `/usage?since=DAY&until=DAY&by=team&daily`."""
        app = web.Application()
        add_probes(app, lambda: "")
        app.router.add_get("/usage", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            question = msgspec.convert(dict(request.query), UsageQuestion, strict=False)
        except msgspec.ValidationError as why:
            return web.Response(status=400, text=f"{why}\n")
        answer = await self.read(
            *(question.since, question.until, question.by), daily="daily" in request.query
        )
        return web.Response(body=_encode(answer), content_type="application/json")


_Day = Annotated[int, Meta(ge=0, le=MAX_DAY)]


class UsageQuestion(msgspec.Struct, frozen=True):
    """The query of `/usage`."""

    since: _Day
    until: _Day
    by: UsageGroup = "user"
