"""History and usage of a workstation: real daemon, real programs, and what goes wrong with its file."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from fenka.core.metering import SECOND_US, LineKind
from fenka.hardware.simulated_node import SimulatedNode
from fenka.history.series import UsageGroup, UsageRecord
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonConnection, RequestFailed, get_snapshot
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import HOLD, Workstation, eventually, refused

pytestmark = pytest.mark.process

ALL_DAYS = 0, 1 << 20


def read_usage(station: Workstation, by: UsageGroup = "job") -> protocol.UsageRead:
    """All usage that the daemon has recorded."""
    with contextlib.closing(DaemonConnection(Runtime(station.root))) as daemon:
        return daemon.request(protocol.GetUsage(by, *ALL_DAYS), protocol.UsageRead)


def read_history(station: Workstation, **which: Any) -> protocol.HistoryRead:
    """The last ten minutes of a job or a card."""
    now = time.time()
    with contextlib.closing(DaemonConnection(Runtime(station.root))) as daemon:
        request = protocol.GetHistory(now - 600, now + 5, **which)
        return daemon.request(request, protocol.HistoryRead)


def by_job(station: Workstation) -> dict[str, list[UsageRecord]]:
    """The records of held time by the job's name."""
    records: dict[str, list[UsageRecord]] = {}
    for record in read_usage(station).records:
        if record.kind is LineKind.HELD:
            records.setdefault(record.holder.name, []).append(record)
    return records


def seconds(records: list[UsageRecord]) -> float:
    """The charged seconds of a card."""
    return sum(record.amounts.card_us for record in records) / SECOND_US


def history_file(station: Workstation) -> Path:
    """The daemon's database."""
    return paths.history_database(Runtime(station.root))


def test_xids_are_shown_and_recorded_when_a_card_reports_them(station: Workstation) -> None:
    """One of a program's, and then one after which the card is lost; the newest stands first."""
    station.start("--simulate", "T4")
    node = SimulatedNode(station.root / "simulated")

    def shown() -> list[str]:
        return get_snapshot(Runtime(station.root)).cards[0].xids

    def raised() -> list[str]:
        # The driver keeps none for a listener that begins later, as one may on a busy machine.
        node.raise_xid(0, 31)
        return shown()

    eventually(raised)
    node.raise_xid(0, 48)
    eventually(lambda: "XID 48" in shown()[0])
    last, first, *_ = shown()
    assert last.endswith("XID 48: the card is not used any more until it is reset")
    assert first.endswith("XID 31: a program failed; the card stays usable")
    uuid = get_snapshot(Runtime(station.root)).cards[0].uuid

    def recorded() -> list[str]:
        events = read_history(station, card=uuid).events
        return [event.detail for event in events if event.kind == "xid"]

    eventually(lambda: recorded() and recorded()[-1].startswith("XID 48"))
    assert recorded()[0] == "XID 31: a program failed; the card stays usable"


def test_usage_is_there_when_the_daemon_was_killed_and_jobs_have_ended(
    station: Workstation,
) -> None:
    """SIGKILL and another daemon: rows go on, the time between is unobserved, one name is two programs."""
    station.start("--simulate", "T4")
    words = [*HOLD, "100", "--password=hunter2"]
    program = station.run("--gpu-mem", "4", "--name", "one", "--team", "vision", "--", *words)
    program.report()
    first = eventually(lambda: by_job(station).get("one"))
    assert first[0].holder.team == "vision"
    program.end()
    eventually(lambda: "one" not in station.jobs())
    before = by_job(station)["one"]
    station.kill_daemon()
    for file in station.root.glob("history-*"):
        assert b"hunter2" not in file.read_bytes(), "arguments are not recorded"
    station.start("--simulate", "T4")
    other = station.run("--gpu-mem", "7", "--name", "one", "--", *HOLD, "100")
    other.report()
    after = eventually(lambda: (found := by_job(station)["one"]) and len(found) == 2 and found)
    kept = next(record for record in after if record.holder.id == first[0].holder.id)
    assert kept.amounts == before[0].amounts
    everything = read_usage(station)
    kinds = {record.kind for record in everything.records}
    assert kinds == {LineKind.HELD, LineKind.IDLE, LineKind.UNOBSERVED}
    assert everything.problem == ""


def test_all_time_is_someones_when_slices_come_and_go(station: Workstation) -> None:
    """The sum of all lines is the time that has passed by the clock, for both cards."""
    began = time.monotonic()
    station.start("--simulate", "T4*2")
    started = time.monotonic()
    programs = [station.run("--gpu-mem", size, "--", *HOLD, "100") for size in ("4", "10", "14")]
    for program in programs:
        program.report()
    for program in programs:
        program.end()
    read_at = time.monotonic()
    total = seconds(read_usage(station).records)
    assert 2 * (read_at - started) <= total <= 2 * (time.monotonic() - began)


def test_readings_show_what_a_program_holds_when_it_is_looked_at(station: Workstation) -> None:
    """Memory, limit and events of a job by its id, and the card's own figures."""
    station.start("--simulate", "T4")
    program = station.run("--gpu-mem", "4", "--name", "hold", "--", *HOLD, "2000")
    program.report()
    job = station.jobs()["hold"]

    def readings() -> Any:
        figures = read_history(station, job=job["id"]).series[job["id"]].most
        return [mib for mib in figures["used_mib"] if mib] and figures

    figures = eventually(readings)
    assert max(filter(None, figures["used_mib"])) >= 2000
    assert set(figures["limit_mib"]) == {None, 4308}
    events = read_history(station, job=job["id"]).events
    assert [(event.kind, event.detail) for event in events] == [
        ("asked", ""),
        ("granted", "4308 MiB of card 0"),
    ]
    (card,) = read_history(station).series.values()
    assert max(filter(None, card.most["held_mib"])) == 4308
    assert max(filter(None, card.most["temperature_c"])) > 0


def test_a_grant_is_given_when_the_history_is_broken(station: Workstation) -> None:
    """A directory in the file's place: `fenka doctor` says so, and programs run."""
    history_file(station).mkdir(parents=True)
    station.start("--simulate", "T4")
    program = station.run("--gpu-mem", "4", "--", *HOLD, "100")
    program.report()
    problem = f"history is not recorded: {history_file(station)}: Is a directory"
    eventually(lambda: read_usage(station).problem == problem)
    checks = json.loads(station.fenka("doctor", "-o", "json").stdout)
    assert {"subject": "history", "status": "wrong", "detail": problem} in checks
    history_file(station).rmdir()
    eventually(lambda: not read_usage(station).problem)
    assert by_job(station), "the time before is not lost"


def test_nothing_is_recorded_when_it_is_not_wanted(station: Workstation) -> None:
    """No file, and a sentence for those who ask."""
    station.start("--simulate", "T4", "--no-history")
    with pytest.raises(RequestFailed, match="records no history: start it without --no-history"):
        read_usage(station)
    refused(
        station.fenka("usage"),
        1,
        "this daemon records no history: start it without --no-history",
    )
    assert "records no history" in station.ok("doctor")
    assert not history_file(station).exists()


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        (
            "--price",
            "Tesla T5=1",
            "--price Tesla T5 is of no card that fenka knows: here are Tesla T4",
        ),
        (
            "--price",
            "Tesla T4",
            "'Tesla T4' is no price of a card's hour: write MODEL=PRICE, as .*",
        ),
        ("--price", "=1", "'=1' is no price of a card's hour: write MODEL=PRICE, as .*"),
        ("--currency", "euro", "'euro' is no currency: write its code, as EUR"),
        ("--history-size", "big", "--history-size big is no size: write it as 200MiB"),
    ],
)
def test_an_option_is_refused_when_it_is_a_mistake(
    station: Workstation, option: str, value: str, sentence: str
) -> None:
    """Each mistake is one sentence and exit code 2."""
    refused(station.fenka("daemon", "--simulate", "T4", option, value), 2, sentence)


def test_a_bill_is_refused_when_a_card_has_no_price(station: Workstation) -> None:
    """One sentence and exit code 2."""
    station.start("--simulate", "T4")
    refused(
        station.fenka("usage", "-o", "focus"),
        2,
        r'Tesla T4 has no price: write \[price\] and "Tesla T4" = 0.35 to daemon.toml, .*',
    )


def test_prices_are_those_of_the_file_when_it_has_them(station: Workstation) -> None:
    """A table of prices, as the documentation has it."""
    options = Path(station.environment["XDG_CONFIG_HOME"]) / "fenka" / "daemon.toml"
    options.parent.mkdir(parents=True)
    options.write_text('currency = "EUR"\nhistory-size = "50MiB"\n[price]\n"Tesla T4" = 0.35\n')
    station.start("--simulate", "T4")
    read = read_usage(station)
    assert (read.prices, read.currency) == ({"Tesla T4": 350_000}, "EUR")
    assert 'history-size = "50MiB"' in station.ok("daemon", "--show-config")
    rows = json.loads(station.ok("usage", "-o", "json"))
    assert rows["currency"] == "EUR"
    assert [row["kind"] for row in rows["rows"]] == ["idle"]
    station.ok("daemon", "--restart")
    assert read_usage(station).prices == {"Tesla T4": 350_000}
