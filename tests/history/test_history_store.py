"""The embedded history: resolutions, retention, size, and the ledger over restarts."""

import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.metering import DAY_US, SECOND_US, Amounts, Line, LineKind
from fenka.history.history_store import DETAIL_DAYS, KEEP_S, Batch, HistoryStore
from fenka.history.series import HistoryEvent, Holder, UsageRecord
from tests.history.records import (
    ANNA,
    BEN,
    DAY,
    MIB,
    START,
    T4,
    charged,
    observed,
    sample,
)


@pytest.fixture
def store(tmp_path: Path) -> HistoryStore:
    """A history without a file yet."""
    return HistoryStore(tmp_path / "history" / "history.db", 200 * MIB)


def usage(store: HistoryStore, first: int = DAY, end: int = DAY + 1) -> list[UsageRecord]:
    """The records of the ledger. One that cannot be read fails the test."""
    records = store.usage(first, end)
    assert records is not None, store.problem
    return records


def seconds(store: HistoryStore) -> dict[str, float]:
    """The charged seconds by job, or by kind."""
    return {
        record.holder.id or record.kind.value: record.amounts.card_us / SECOND_US
        for record in usage(store)
    }


def test_readings_have_mean_most_and_gaps_when_they_are_read(store: HistoryStore) -> None:
    """Two readings an interval; one that the driver does not tell; none for a while."""
    for at, used in ((0, 100), (5, 301), (10, None), (15, 400), (40, 7)):
        assert store.write(sample(at, used))
    series = store.series("program", "j1", START, START + 50, 5)
    assert series is not None
    assert (series.start, series.step) == (START, 10)
    assert series.mean["used_mib"] == [200.5, 400, None, None, 7]
    assert series.most["used_mib"] == [301, 400, None, None, 7]
    assert series.most["limit_mib"] == [4308, 4308, None, None, 4308]
    assert series.most["busy"] == [None] * 5


def test_a_coarser_resolution_is_read_when_the_span_is_older(store: HistoryStore) -> None:
    """A reading each 5 minutes for 30 days: 5 s of 2 hours, a minute of 2 days, 10 minutes of 30 days."""
    last = 30 * 86400
    for at in range(0, last + 1, 300):
        store.write(sample(at, at // 300 % 7))
    for span, step, length in ((3600, 5, 720), (86400, 60, 1440), (29 * 86400, 600, 29 * 144)):
        series = store.series("program", "j1", START + last - span, START + last, 10_000)
        assert series is not None
        assert (series.step, len(series.mean["used_mib"])) == (step, length)
        known = {
            (series.start - START + index * step): mean
            for index, mean in enumerate(series.mean["used_mib"])
            if mean is not None
        }
        apart = max(step, 300)
        assert sorted(known) == list(range(last - span, last, apart))
        for at, mean in known.items():
            readings = [each_at // 300 % 7 for each_at in range(at, at + apart, 300)]
            assert mean == sum(readings) / len(readings)


def test_old_readings_are_deleted_when_time_passes(store: HistoryStore) -> None:
    """No table keeps more than its time; events go after 30 days."""
    for day in range(40):
        at = START + day * 86400
        store.write(
            Batch(at, [ANNA], {"j1": (1, 2, 3, 4, 5)}, events=[HistoryEvent(at, "j1", "asked")])
        )
    newest = START + 39 * 86400
    for step, keep_s in KEEP_S.items():
        rows = store.database.run(
            lambda connection, table=f"program_{step}": connection.execute(  # type: ignore[misc]
                f"SELECT MIN(at) FROM {table}"
            ).fetchone()
        )
        assert rows == ((newest - keep_s) // step * step,) or rows == (newest,)
    events = store.events(START, newest + 1)
    assert events is not None
    assert [event.at for event in events] == [START + day * 86400 for day in range(9, 40)]
    assert events[0] == HistoryEvent(START + 9 * 86400, "j1", "asked")


def test_two_programs_are_told_apart_when_they_have_one_name(store: HistoryStore) -> None:
    """The job's id is the key."""
    store.write(Batch(START, [ANNA, BEN], {"j1": (1, 9, 0, 0, 0), "j2": (2, 9, 0, 0, 0)}))
    for job, used in (("j1", 1), ("j2", 2), ("train", None)):
        series = store.series("program", job, START, START + 5, 1)
        assert series is not None
        assert series.mean["used_mib"] == [used]


def test_usage_goes_on_when_another_program_observes(store: HistoryStore) -> None:
    """Rows of a day add up; the time between two observers is unobserved; ended jobs keep their rows."""
    assert store.write(charged(observed(0, ANNA), observed(60)))
    store.close()
    again = HistoryStore(store.database.file, 200 * MIB)
    again.write(charged(observed(100, BEN, observer="next"), observed(130, observer="next")))
    again.write(
        charged(observed(130, observer="next"), observed(160, observer="next"))._replace(
            first=observed(100, observer="next")
        )
    )
    assert seconds(again) == {
        "j1": 17.141720,
        "j2": 8.570860,
        "idle": pytest.approx(160 - 40 - 17.141720 - 8.570860),
        "unobserved": 40,
    }
    assert {record.holder for record in usage(again) if record.holder.id} == {ANNA, BEN}
    assert sum(record.amounts.card_us for record in usage(again)) == 160 * SECOND_US


def test_time_is_charged_once_when_two_programs_observe_at_once(store: HistoryStore) -> None:
    """The old one goes on for 20 s after the next has begun, and writes last; it may write after the next."""
    store.write(charged(observed(0, ANNA), observed(60)))
    store.write(charged(observed(40, BEN, observer="next"), observed(50, observer="next")))
    assert seconds(store) == {"j1": 17.141720, "idle": pytest.approx(60 - 17.141720)}
    store.write(charged(observed(40, BEN, observer="next"), observed(70, observer="next")))
    assert seconds(store)["unobserved"] == 70 - 60
    store.write(charged(observed(0, ANNA), observed(75)))
    assert seconds(store)["unobserved"] == 75 - 60
    store.write(charged(observed(40, BEN, observer="next"), observed(90, observer="next")))
    assert seconds(store) == {
        "j1": 17.141720,
        "idle": pytest.approx(60 - 17.141720),
        "unobserved": 90 - 60,
    }


@given(
    st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 9)), min_size=1, max_size=20),
    st.lists(st.integers(0, 30), min_size=2, max_size=2),
)
def test_all_time_is_charged_once_when_several_write_in_any_order(
    steps: list[tuple[str, int]], begins: list[int]
) -> None:
    """Each observes from its beginning on, and charges what was since it has written last."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(HistoryStore(Path(folder) / "history.db", 200 * MIB)) as store,
    ):
        first = {
            name: observed(at, ANNA, observer=name)
            for name, at in zip("ABC", [0, *begins], strict=True)
        }
        until, now, written = dict(first), 0, list[int]()
        for name, passed in steps:
            now += passed
            if now * SECOND_US < first[name].uptime_us:
                continue
            last = observed(now, ANNA, observer=name)
            store.write(charged(until[name], last)._replace(first=first[name]))
            until[name] = last
            written += [first[name].uptime_us, last.uptime_us]
            charged_us = sum(record.amounts.card_us for record in usage(store))
            assert charged_us == max(written) - written[0]


def test_usage_by_job_is_added_up_when_it_is_old(store: HistoryStore) -> None:
    """After 400 days users and teams are left; the sums stay."""
    old = [*map(observed, (0, 60))]
    old[0] = observed(0, ANNA, BEN)
    store.write(charged(*old))
    another = ANNA.__class__("j3", "other", "anna", 1000, "vision", "anna")
    store.write(charged(observed(60, another), observed(90))._replace(holders=[another]))
    before = usage(store)
    store.write(Batch((DAY + DETAIL_DAYS + 1) * 86400))
    after = usage(store)
    assert [record.holder.name for record in after] == [""] * 3
    assert sorted(record.holder.user for record in after) == ["", "anna", "ben"]
    assert sum(record.amounts.card_us for record in after) == 90 * SECOND_US
    of_anna = [record.amounts for record in after if record.holder.user == "anna"]
    of_jobs = [record.amounts for record in before if record.holder.user == "anna"]
    assert of_anna == [of_jobs[0].plus(of_jobs[1])]


def test_the_oldest_readings_go_when_the_file_has_its_size(tmp_path: Path) -> None:
    """A mebibyte: the file never has more, new readings are there, and usage stays."""
    store = HistoryStore(tmp_path / "small.db", MIB)
    store.write(charged(observed(0, ANNA), observed(60)))
    for at in range(0, 86400, 20):
        jobs = {f"j{number}": (at % 4000, 4308, 1, 2, 3) for number in range(20)}
        assert store.write(Batch(START + at, programs=jobs)), store.problem
        assert store.database.file.stat().st_size <= MIB
    newest = store.series("program", "j7", START + 86300, START + 86400, 1)
    assert newest is not None
    assert newest.most["used_mib"] == [86380 % 4000]
    assert seconds(store)["j1"] == 17.141720


def test_pods_and_then_days_go_when_usage_fills_the_file(tmp_path: Path) -> None:
    """40 days of 300 pods, each with its own team: a mebibyte is not exceeded, a day's sum stays."""
    store = HistoryStore(tmp_path / "small.db", MIB)
    for day in range(40):
        pods = [
            Holder(f"{day}-{number}", "pod", team=f"team {day} {number}") for number in range(300)
        ]
        usage_of_day = {
            Line(DAY + day, LineKind.HELD, pod.id, "node", "T4", None): Amounts(card_us=SECOND_US)
            for pod in pods
        }
        batch = Batch((DAY + day) * 86400, pods, usage=usage_of_day)
        assert store.write(batch), store.problem
    assert store.database.file.stat().st_size <= MIB
    by_day: dict[int, int] = {}
    for record in usage(store, DAY, DAY + 40):
        by_day[record.day] = by_day.get(record.day, 0) + record.amounts.card_us
    assert [*by_day] == [*range(min(by_day), DAY + 40)]
    assert {*by_day.values()} == {300 * SECOND_US}
    assert store.first_day() == min(by_day) > DAY
    last = usage(store, DAY + 39, DAY + 40)
    assert {record.holder.name for record in last} == {"pod"}


def test_a_day_is_added_up_twice_without_loss(store: HistoryStore) -> None:
    """Usage of a day that was added up before comes late, as after a long write failure."""
    for number in (1, 2):
        line = Line(DAY, LineKind.HELD, f"j{number}", f"node {number}", "T4", None)
        job = Holder(f"j{number}", "train", "anna", 1000)
        late = (DAY + DETAIL_DAYS + number) * 86400
        assert store.write(Batch(late, [job], usage={line: Amounts(card_us=number)}))
    assert store.write(Batch((DAY + DETAIL_DAYS + 3) * 86400))
    (record,) = usage(store)
    assert (record.holder.name, record.node, record.amounts.card_us) == ("", "", 3)


def test_time_goes_on_when_the_clock_is_set(store: HistoryStore) -> None:
    """Back an hour, forth a month, and to 1970: written readings are there, usage is by the uptime."""
    for at, used in ((7200, 1), (3600, 2), (40 * 86400, 3), (3605, 4)):
        assert store.write(sample(at, used))
    assert store.write(Batch(5, [ANNA], {"j1": (9, 9, 9, 9, 9)}))
    series = store.series("program", "j1", START + 3600, START + 3610, 2)
    assert series is not None
    assert series.mean["used_mib"][-1] == 4
    back = observed(60)._replace(at_us=(DAY - 1) * DAY_US + SECOND_US)
    assert store.write(charged(observed(0, ANNA), back))
    records = usage(store, DAY - 3, DAY + 1)
    assert sum(record.amounts.card_us for record in records) == 60 * SECOND_US
    assert {record.kind for record in records} == {LineKind.HELD, LineKind.IDLE}


def test_cards_have_their_own_figures_when_they_are_read(store: HistoryStore) -> None:
    """A card's series has what PROGRAM has not."""
    store.write(Batch(START, cards={T4.uuid: (12_000, 12_924, 620, 49, 29)}))
    series = store.series("card", T4.uuid, START, START + 5, 1)
    assert series is not None
    assert {name: values[0] for name, values in series.most.items()} == {
        **{"used_mib": 12_000, "held_mib": 12_924, "busy": 620},
        **{"temperature_c": 49, "power_w": 29},
    }
