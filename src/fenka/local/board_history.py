"""The daemon's history of a program or a card as the dashboard's charts; values in, values out."""

from typing import NamedTuple

from fenka.history.series import FigureSeries
from fenka.views.board import HistoryAnswer, Series
from fenka.workstation.protocol import HistoryRead


class _Line(NamedTuple):
    """A line of a chart. scale: divides the recorded values. limit: the figure that is drawn dashed."""

    name: str
    unit: str
    figure: str
    scale: float = 1
    limit: str = ""


PROGRAM: tuple[_Line, ...] = (
    _Line("memory", "MiB", "used_mib", 1, "limit_mib"),
    _Line("busy", "share", "busy", 1000),
    _Line("throttled", "share", "throttled", 1000),
)
CARD: tuple[_Line, ...] = (
    _Line("memory", "MiB", "used_mib"),
    _Line("held", "MiB", "held_mib"),
    _Line("busy", "share", "busy", 1000),
    _Line("temperature", "celsius", "temperature_c"),
    _Line("power", "watt", "power_w"),
)


def timeline(read: HistoryRead, subject: str, lines: tuple[_Line, ...]) -> HistoryAnswer:
    """Return the charts and events of a program or card.

    Args:
        read: The daemon's answer.
        subject: The job's id, or the card's UUID.
        lines: PROGRAM or CARD.
    """
    figures = read.series.get(subject)
    marks = [
        (float(event.at), f"{event.kind}: {event.detail}" if event.detail else event.kind)
        for event in read.events
        if event.subject == subject
    ]
    if figures is None:
        return HistoryAnswer([], marks, read.problem or "nothing was recorded in this time")
    return HistoryAnswer([_series(figures, line) for line in lines], marks, read.problem)


def _series(figures: FigureSeries, line: _Line) -> Series:
    def scaled(values: list[float | None] | list[int | None]) -> list[float | None]:
        return [None if value is None else value / line.scale for value in values]

    return Series(
        name=line.name,
        unit=line.unit,
        start=figures.start,
        step=figures.step,
        mean=scaled(figures.mean.get(line.figure, [])),
        highest=scaled(figures.most.get(line.figure, [])),
        limit=scaled(figures.mean.get(line.limit, [])),
    )
