"""Figures over time of a cluster, from a Prometheus that scrapes fenka.

Never all containers at once: 24,000 of them would be 6.8 MB an answer.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.units import MIB
from fenka.views.board import HistoryAnswer, Series, WaitSums

DEADLINE_S = 5.0
POINTS = 500
"""A span has at most so many steps."""
SHORTEST_STEP_S = 15.0


class NoPrometheus(FenkaError):
    """The address leads to something else than a Prometheus."""

    exit_code = INVALID_INPUT


class _Figure(NamedTuple):
    """A line of a chart. scale: divides its metric's values. limit: the metric that is drawn dashed."""

    name: str
    unit: str
    metric: str
    scale: float = 1
    limit: str = ""


PROGRAM = (
    _Figure(
        *("memory", "MiB", "fenka_container_gpu_memory_used_bytes", MIB),
        "fenka_container_gpu_memory_limit_bytes",
    ),
    _Figure(
        *("busy", "share", "fenka_container_gpu_utilization_ratio", 1),
        "fenka_container_gpu_compute_limit_ratio",
    ),
)
CARD = (
    _Figure(
        *("memory", "MiB", "fenka_card_memory_used_bytes", MIB), "fenka_card_memory_total_bytes"
    ),
    _Figure("busy", "share", "fenka_card_utilization_ratio"),
    _Figure("temperature", "celsius", "fenka_card_temperature_celsius"),
    _Figure(*("power", "watt", "fenka_card_power_watts", 1), "fenka_card_power_limit_watts"),
)


class _Sample(msgspec.Struct, frozen=True):
    values: list[tuple[float, str]]


class _Instant(msgspec.Struct, frozen=True):
    value: tuple[float, str]
    metric: dict[str, str] = {}


class _QueryData(msgspec.Struct, frozen=True):
    result: msgspec.Raw = msgspec.Raw(b"[]")


class _QueryAnswer(msgspec.Struct, frozen=True):
    status: str
    error: str = ""
    data: _QueryData = _QueryData()


class _Span(NamedTuple):
    start: float
    step: float
    steps: int


class Prometheus:
    """A server that is asked.

    Raises NoPrometheus if the address is no URL.
    """

    def __init__(self, url: str, token_file: Path | None = None) -> None:
        """Args: token_file: has the bearer token; it is read for each question, since it may be renewed."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise NoPrometheus(
                f"invalid --prometheus {url[:80]!r}: expected a URL, as http://prometheus.monitoring:9090"
            )
        self._url, self._token_file = url.rstrip("/"), token_file

    async def check(self) -> str:
        """Return why the server does not answer now; empty if it does.

        Raises NoPrometheus if it is something else.
        """
        try:
            await self._ask("query", {"query": "1"})
        except (OSError, TimeoutError, aiohttp.ClientError) as why:
            return _unreachable(why)
        return ""

    async def program(self, namespace: str, pod: str, span_s: float, now: float) -> HistoryAnswer:
        """Return the figures of a pod. span_s: until now, in Unix seconds."""
        return await self._timeline(PROGRAM, {"namespace": namespace, "pod": pod}, span_s, now)

    async def card(self, node: str, index: int, span_s: float, now: float) -> HistoryAnswer:
        """Return the figures of a card. span_s: until now, in Unix seconds."""
        return await self._timeline(CARD, {"node": node, "index": str(index)}, span_s, now)

    async def waits(self) -> WaitSums | None:
        """Return how requests waited that were granted in the last 24 hours; None if that is not known."""
        questions = (
            "sum(increase(fenka_scheduler_wait_seconds_count[1d]))",
            "sum(increase(fenka_scheduler_wait_seconds_sum[1d]))",
            "topk(5, sum by (reason) (avg_over_time(fenka_scheduler_waiting_reasons[1d])) > 0)",
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                answers = await asyncio.gather(
                    *(self._ask("query", {"query": question}) for question in questions)
                )
            counts, sums, reasons = (
                msgspec.json.decode(answer.data.result, type=list[_Instant]) for answer in answers
            )
        except (NoPrometheus, OSError, TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return None
        granted, total_s = (float(found[0].value[1]) if found else 0.0 for found in (counts, sums))
        return WaitSums(
            round(granted),
            mean_s=total_s / granted if granted >= 1 else None,
            reasons=[(row.metric.get("reason", ""), float(row.value[1])) for row in reasons],
        )

    async def _timeline(
        self, figures: tuple[_Figure, ...], labels: Mapping[str, str], span_s: float, now: float
    ) -> HistoryAnswer:
        step = max(math.ceil(span_s / POINTS), SHORTEST_STEP_S)
        count = max(int(span_s // step), 1)
        span = _Span(now - count * step, step, count)
        try:
            async with asyncio.timeout(DEADLINE_S):
                series = await asyncio.gather(
                    *(self._series(figure, labels, span) for figure in figures)
                )
        except NoPrometheus as why:
            return HistoryAnswer([], problem=str(why))
        except (OSError, TimeoutError, aiohttp.ClientError) as why:
            return HistoryAnswer([], problem=_unreachable(why))
        return HistoryAnswer([*series])

    async def _series(self, figure: _Figure, labels: Mapping[str, str], span: _Span) -> Series:
        names = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        selector, window = f"{figure.metric}{{{names}}}", f"[{span.step:g}s]"
        questions = [
            f"sum(avg_over_time({selector}{window}))",
            f"sum(max_over_time({selector}{window}))",
        ]
        if figure.limit:
            questions.append(f"sum(last_over_time({figure.limit}{{{names}}}{window}))")
        mean, highest, *limit = await asyncio.gather(
            *(self._values(question, span, figure.scale) for question in questions)
        )
        return Series(
            figure.name, figure.unit, span.start, span.step, mean, highest, *(limit or [[]])
        )

    async def _values(self, query: str, span: _Span, scale: float) -> list[float | None]:
        end = span.start + span.steps * span.step
        asked = {"query": query, "start": span.start + span.step, "end": end, "step": span.step}
        answer = await self._ask("query_range", {name: str(value) for name, value in asked.items()})
        values: list[float | None] = [None] * span.steps
        for sample in msgspec.json.decode(answer.data.result, type=list[_Sample]):
            for at, text in sample.values:
                position, value = round((at - span.start) / span.step) - 1, float(text)
                if 0 <= position < span.steps and math.isfinite(value):
                    values[position] = value / scale
        return values

    async def _ask(self, what: str, query: Mapping[str, str]) -> _QueryAnswer:
        """Raises NoPrometheus, OSError, TimeoutError, aiohttp.ClientError."""
        headers = {}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{self._url}/api/v1/{what}", params=query, allow_redirects=False) as got,
        ):
            body = await got.read()
        try:
            answer = msgspec.json.decode(body, type=_QueryAnswer)
        except msgspec.MsgspecError:
            raise NoPrometheus(
                f"{self._url} does not answer as Prometheus does: name its address with --prometheus"
            ) from None
        if answer.status != "success":
            raise NoPrometheus(f"Prometheus refuses: {answer.error[:200]}")
        return answer


def _unreachable(why: Exception) -> str:
    return f"Prometheus does not answer: {str(why) or 'the time is over'}"
