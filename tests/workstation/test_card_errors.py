"""Cards that reported an error are not used until they are reset; cards of unknown size, never."""

import json

import pytest

from fenka.hardware.simulated_node import SimulatedNode
from fenka.hardware.xids import APPLICATION_XIDS
from fenka.workstation import protocol
from fenka.workstation.client import get_snapshot
from fenka.workstation.paths import Runtime
from tests.workstation.conftest import HOLD, Workstation, eventually, refused


def card(station: Workstation, index: int = 0) -> protocol.CardView:
    """Return a card as the daemon shows it."""
    return get_snapshot(Runtime(station.root)).cards[index]


def break_card(station: Workstation, *words: str) -> None:
    """Provoke a fault of card 0 until the daemon has received it, which may begin to listen late."""

    def broken() -> bool:
        assert station.fenka("sim", "card", "0", *words).returncode == 0
        return not card(station).healthy

    eventually(broken)


@pytest.mark.parametrize("words", [("--ecc-errors", "2"), ("--xid", "79")])
def test_sick_card_takes_nothing_when_it_reported_an_error(
    station: Workstation, words: tuple[str, str]
) -> None:
    """Programs go to the other card; every screen marks the sick one, and says what clears that."""
    station.start("--simulate", "T4*2")
    before = station.run("--gpu-mem", "4", "--name", "before", "--", *HOLD, "100")
    before.report()
    break_card(station, *words)
    xid = "XID 48" if words[0] == "--ecc-errors" else "XID 79"
    problem = f"{xid}: reset it, then `fenka daemon --card-reset 0`"
    assert card(station).problem == problem
    after = station.run("--gpu-mem", "4", "--name", "after", "--", *HOLD, "100")
    after.report()
    jobs = {job.name: job for job in get_snapshot(Runtime(station.root)).jobs}
    assert [piece.card for piece in jobs["after"].slices] == [1]
    sentence = f"is on card 0, which takes nothing new: {problem}"
    assert (jobs["before"].problems, jobs["after"].problems) == ([sentence], [])
    assert f"! before {sentence}\n" in station.fenka("ps").stdout
    assert sentence in station.fenka("why", "before").stdout
    assert f"takes no new programs: {xid}" in station.fenka("top", "node").stdout
    examined = station.fenka("doctor")
    assert examined.returncode == 1
    (line,) = [line for line in examined.stdout.splitlines() if "card 0" in line]
    assert line.startswith("wrong")
    assert problem in line
    refused(
        station.fenka("run", "--gpu-mem", "14", "--no-wait", "--", "true"),
        75,
        f".*unhealthy.*; card 0: {xid}: reset it, then `fenka daemon --card-reset 0`.*",
    )


def test_errors_outlive_the_daemon_until_somebody_reports_the_reset(station: Workstation) -> None:
    """Another daemon knows them; only root and the daemon's owner clear them; an unknown card is named."""
    station.start("--simulate", "T4*2")
    held = station.run("--gpu-mem", "4", "--", *HOLD, "100")
    held.report()
    break_card(station, "--ecc-errors", "1")
    station.kill_daemon()
    station.start("--simulate", "T4*2")
    assert card(station).problem.startswith("XID 48")
    refused(
        station.fenka("daemon", "--card-reset", "7"), 1, "no card is called '7': there are 0, 1, .*"
    )
    result = station.fenka("daemon", "--card-reset", "0")
    assert (result.returncode, result.stdout) == (0, "used again: card 0\n")
    assert card(station).healthy
    assert json.loads((station.root / "card-errors.json").read_text())["errors"] == {}


def test_error_is_cleared_when_a_lost_card_returns(station: Workstation) -> None:
    """That is how a reset looks. A reset that is reported of a lost card changes nothing."""
    station.start("--simulate", "T4")
    break_card(station, "--lose")
    eventually(lambda: card(station).problem == "it has fallen off the bus")
    refused(
        station.fenka("daemon", "--card-reset", "0"),
        1,
        "card 0 is still not used: it has fallen off the bus",
    )
    assert station.fenka("sim", "card", "0", "--recover").returncode == 0
    eventually(lambda: card(station).healthy)


def test_card_stays_in_use_when_the_error_was_a_programs(station: Workstation) -> None:
    """The same table serves the node program and the daemon."""
    station.start("--simulate", "T4")
    node = SimulatedNode(station.root / "simulated")
    for xid in APPLICATION_XIDS:

        def shown(xid: int = xid) -> bool:
            node.raise_xid(0, xid)
            return any(f"XID {xid}:" in line for line in card(station).xids)

        eventually(shown)
    assert card(station).healthy


def test_card_of_unknown_memory_is_shown_when_its_size_is_not_configured(
    station: Workstation,
) -> None:
    """The daemon starts, and says what slices need; with a size it leases them."""
    station.start("--simulate", "GB10")
    shown = card(station)
    assert (shown.model, shown.memory_mib, shown.used_mib) == ("NVIDIA GB10", 0, None)
    assert "size to be configured: `fenka daemon --restart --card-memory 96GiB`" in shown.problem
    assert "NVIDIA GB10, unknown memory" in station.fenka("doctor").stdout
    for words in (("--gpu-mem", "4"), ("--gpus", "1", "--no-wait")):
        result = station.fenka("run", *words, "--", "true")
        assert result.returncode != 0
        assert "--card-memory 96GiB" in result.stderr
    assert station.fenka("daemon", "--restart", "--card-memory", "96GiB").returncode == 0
    assert card(station).memory_mib == 96 * 1024
    program = station.run("--gpu-mem", "40", "--", *HOLD, "100")
    program.report()
    program.end()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--simulate", "GB10", "--card-memory", "much"), "--card-memory much is no size: .*"),
        (
            ("--simulate", "T4", "--card-memory", "8GiB"),
            "--card-memory is for cards whose driver reports no memory, .*: leave it out",
        ),
    ],
)
def test_configured_size_is_refused_when_it_is_none_or_not_needed(
    station: Workstation, words: tuple[str, ...], sentence: str
) -> None:
    """In one sentence."""
    refused(station.fenka("daemon", *words), 2, sentence)
