"""The daemon's history as charts."""

from fenka.history.series import FigureSeries, HistoryEvent
from fenka.local.board_history import CARD, PROGRAM, timeline
from fenka.workstation.protocol import HistoryRead


def test_thousandths_become_shares_and_gaps_stay() -> None:
    """An interval of which nothing is known is None in each line, never 0."""
    figures = FigureSeries(
        1000,
        5,
        {"used_mib": [100.0, None], "limit_mib": [4308.0, 4308.0], "busy": [250.0, None]},
        {"used_mib": [120, None], "busy": [500, None]},
    )
    event = HistoryEvent(1001, "a", "resized", "4 to 6")
    other = HistoryEvent(1002, "b", "ended")
    shown = timeline(HistoryRead({"a": figures}, [event, other]), "a", PROGRAM)
    memory, busy, throttled = shown.series
    assert (memory.start, memory.step, memory.unit) == (1000, 5, "MiB")
    assert (memory.mean, memory.highest, memory.limit) == (
        [100.0, None],
        [120.0, None],
        [4308.0, 4308.0],
    )
    assert (busy.mean, busy.highest) == ([0.25, None], [0.5, None])
    assert throttled.mean == []
    assert shown.marks == [(1001.0, "resized: 4 to 6")]
    assert not shown.problem


def test_reason_is_shown_when_there_is_nothing() -> None:
    """The daemon's own, if it has one."""
    assert timeline(HistoryRead({}), "x", CARD).problem == "nothing was recorded in this time"
    assert timeline(HistoryRead({}, problem="the disk is full"), "x", CARD).problem == (
        "the disk is full"
    )
