"""Draw the record of a peak, and print its figures: ``python -m e2e.scenarios.serving.plot RECORD SVG``."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plot import Panel, Point, draw, stairs
from e2e.scenarios.serving.load import Request, quantile, windows

WINDOW_S, IDLE_FROM_S = 2.0, 10.0


@dataclass(frozen=True)
class Figures:
    """What a record shows. Times count from the first request, latencies are milliseconds."""

    requests: list[Request]
    phases: list[tuple[float, float]]
    document: dict[str, Any]

    @classmethod
    def of(cls, document: dict[str, Any]) -> "Figures":
        """Return the figures of a record."""
        requests = [
            Request(at, late, latency, status) for at, latency, status, late in document["requests"]
        ]
        phases = [(float(rate), float(seconds)) for rate, seconds in document["phases"]]
        return cls(requests, phases, document)

    @property
    def begin(self) -> float:
        """When the first request was sent."""
        return self.requests[0].at

    @property
    def marks(self) -> tuple[float, float]:
        """When the peak begins and ends."""
        first = self.phases[0][1]
        return first, first + self.phases[1][1]

    def parts(self) -> tuple[list[Request], list[Request]]:
        """Return the requests before the peak, without the first seconds, and those of its last 30 s."""
        begin, end = self.marks

        def between(first: float, last: float) -> list[Request]:
            return [each for each in self.requests if first <= each.at - self.begin < last]

        return between(IDLE_FROM_S, begin), between(max(begin, end - 30), end)

    @property
    def idle_ms(self) -> float:
        """The 95th percentile before the peak."""
        return 1000 * quantile([each.latency_s for each in self.parts()[0]], 0.95)

    def latency(self) -> list[Point]:
        """Return the 95th percentile of each window."""
        return [
            (at - self.begin, 1000 * quantile([each.latency_s for each in group], 0.95))
            for at, group in windows(self.requests, WINDOW_S)
        ]

    def recovery(self) -> tuple[float, float]:
        """Return the seconds of the peak until a window is less than three times slower than idle.

        Also return the share of such windows from then to the end of the peak.
        """
        begin, end = self.marks
        fast = [
            (at - begin, value < 3 * self.idle_ms)
            for at, value in self.latency()
            if begin <= at < end
        ]
        first = next((at for at, is_fast in fast if is_fast), math.inf)
        rest = [is_fast for at, is_fast in fast if at >= first]
        return first, sum(rest) / len(rest) if rest else 0.0

    def panels(self, end: float) -> list[Panel]:
        """Return the diagrams until a time."""
        load = [
            (at - self.begin, len(group) / WINDOW_S)
            for at, group in windows(self.requests, WINDOW_S)
        ]
        replicas = [(max(0.0, at - self.begin), float(n)) for at, n in self.document["replicas"]]
        members = [
            [
                (each["at"] - self.begin, float(each["step"]))
                for each in member
                if each["at"] >= self.begin
            ]
            for member in self.document["steps"]
        ]
        last = max(value for member in members for _, value in member)
        tens = 10.0 ** math.floor(math.log10(last))
        top = next(tens * share for share in (1, 2, 5, 10) if tens * share >= last)
        return [
            Panel("requests per second", (0, 100, 200), [load]),
            Panel("replicas that are ready", (0, 1, 2, 3), [stairs(replicas, end)]),
            Panel(
                "95th percentile of latency, ms", (1, 10, 100, 1000, 10000), [self.latency()], True
            ),
            Panel("step of the training's two members", (0, top / 2, top), members),
        ]


def main(record: str, svg: str) -> None:
    """Draw the record, and print its figures as a Markdown table."""
    figures = Figures.of(json.loads(Path(record).read_text()))
    last_step = max(each["at"] for member in figures.document["steps"] for each in member)
    end = last_step - figures.begin
    Path(svg).write_text(draw(figures.panels(end), figures.marks, end))
    late = quantile([each.sent_late_s for each in figures.requests], 0.99)
    seconds, share = figures.recovery()
    medians = (1000 * quantile([each.latency_s for each in part], 0.5) for part in figures.parts())
    rows = {
        "requests; failed ones": f"{len(figures.requests)}; "
        f"{sum(each.status != 200 for each in figures.requests)}",
        "median before the peak; in its last 30 s": "; ".join(f"{ms:.1f} ms" for ms in medians),
        "95th percentile before the peak": f"{figures.idle_ms:.1f} ms",
        "largest 95th percentile of 2 s": f"{max(value for _, value in figures.latency()):.0f} ms",
        "below three times that before the peak": f"after {seconds:.0f} s",
        "windows of 2 s below it from then on": f"{100 * share:.0f} %",
        "sent late by the client, 99 % at most": f"{1000 * late:.1f} ms",
    }
    print("\n".join(f"| {name} | {value} |" for name, value in rows.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
