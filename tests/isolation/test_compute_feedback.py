"""Compute feedback: how much each lease may use, and how much it has used."""

from pathlib import Path

import pytest

from fenka.isolation import control
from fenka.isolation.compute_feedback import ComputeDemand, ComputeFeedback, allowances
from fenka.isolation.control import Control, Limit
from fenka.isolation.layout import layout

CARD = "GPU-00000000-0000-0000-0000-000000000001"
MS = 1_000_000

HARD40 = ComputeDemand("hard", 40, active=True)
IDLE40 = ComputeDemand("hard", 40, active=False)
SOFT30 = ComputeDemand("soft", 30, active=True)
FREE = ComputeDemand("hard", 100, active=True)
IDLE = ComputeDemand("hard", 100, active=False)
HEAVY = ComputeDemand("weight", 75, active=True)
LIGHT = ComputeDemand("weight", 25, active=True)
UPTO60 = ComputeDemand("soft", 30, active=True, burst_percent=60)


@pytest.mark.parametrize(
    ("first", "others", "percent"),
    [
        (HARD40, [], 40),
        (HARD40, [IDLE], 40),
        (SOFT30, [], 100),
        (SOFT30, [IDLE40, IDLE], 100),
        (SOFT30, [HARD40], 60),  # 100 - 40
        (SOFT30, [HARD40, HARD40], 30),  # 100 - 80 is less than its own
        (SOFT30, [FREE], 30),
        (SOFT30, [LIGHT], 30),
        (UPTO60, [], 60),  # all of the card is idle
        (UPTO60, [IDLE40], 60),
        (UPTO60, [HARD40], 60),  # 100 - 40 is just as much
        (UPTO60, [HARD40, SOFT30], 30),  # 100 - 40 - 30
        (UPTO60, [ComputeDemand("hard", 55, active=True)], 45),  # 100 - 55
        (UPTO60, [HARD40, HARD40], 30),  # 100 - 80 is less than its own
        (UPTO60, [FREE], 30),
        (SOFT30, [UPTO60], 70),  # what is promised counts, not what may be had beyond
        (ComputeDemand("soft", 30, active=True, burst_percent=30), [], 30),
        (
            ComputeDemand("soft", 30, active=True, burst_percent=20),
            [],
            30,
        ),  # a ceiling takes no promise away
        (
            ComputeDemand("hard", 30, active=True, burst_percent=60),
            [],
            30,
        ),  # nor gives what is hard more
        (HEAVY, [], 100),
        (HEAVY, [IDLE40], 100),
        (HEAVY, [LIGHT], 75),
        (LIGHT, [HEAVY], 25),
        (LIGHT, [FREE], 20),  # 25 of 125
        (HEAVY, [LIGHT, HARD40], 45),  # three quarters of 60
    ],
)
def test_allowances_follow_shares_and_weights(
    first: ComputeDemand, others: list[ComputeDemand], percent: float
) -> None:
    """Active leases get their shares first, then the rest is divided."""
    leases = {"first": first} | {str(i): demand for i, demand in enumerate(others)}
    assert allowances(leases)["first"] == pytest.approx(percent)


class Machine:
    """A card, its clock, and the processes that compute on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_us, self.asked = folder, 10_000_000, 0
        self.busy: dict[int, int] | None = {}
        self.leases: dict[int, str] = {}
        self.feedback = ComputeFeedback(
            self.samples, self.leases.get, lambda: self.now_us * 1000, lambda: self.now_us
        )

    def samples(self, uuid: str, since_us: int) -> tuple[int, dict[int, int]] | None:
        """Stand in for `Driver.busy_samples`."""
        assert uuid == CARD
        self.asked += 1
        if self.busy is None:
            return None
        return (self.now_us if self.busy else since_us), self.busy

    def lease(self, name: str, pid: int, limit: Limit) -> None:
        """Add a lease of one process."""
        control.write(self.folder / name, Control(name, (limit,)))
        self.leases[pid] = name
        self.feedback.add_lease(name, self.folder / name)

    def round(self, **busy: int) -> None:
        """Run a round after 100 ms in which processes used these percentages."""
        self.now_us += 100_000
        self.busy = {int(pid[1:]): percent for pid, percent in busy.items()}
        self.feedback.update()

    def written(self, name: str) -> tuple[int, int]:
        """Return the used milliseconds and the allowed percentage on the lease's page."""
        data = (self.folder / name).read_bytes()
        card = layout().from_buffer("struct fenka_control *", data).cards[0]
        assert card.feedback_seq % 2 == 0
        assert card.feedback_at in (0, self.now_us * 1000)
        return card.busy_ns // MS, card.allowed // 100


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine without leases."""
    return Machine(tmp_path)


def test_busy_time_is_summed_over_the_processes_of_a_lease(machine: Machine) -> None:
    """And survives the end of one."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30))
    machine.leases[2] = "a"
    machine.round(p1=10, p2=20)
    first = machine.written("a")[0]
    machine.round(p1=10, p2=20)
    machine.round(p1=10)
    assert machine.written("a")[0] - first == 30 + 10


def test_soft_lease_is_limited_when_another_uses_the_card(machine: Machine) -> None:
    """And let go a moment after that one has stopped."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30, "soft"))
    machine.lease("b", 2, Limit(CARD, 1, 0, 40))
    machine.round(p1=99)
    assert machine.written("a")[1] == 100
    machine.round(p1=99, p2=1)
    assert machine.written("a")[1] == 60
    for _ in range(4):
        machine.round(p1=60)
    assert machine.written("a")[1] == 100


def test_soft_lease_is_limited_to_its_burst_when_the_card_is_idle(machine: Machine) -> None:
    """Told for the lease, and changed while it runs."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30, "soft"))
    machine.feedback.add_lease("a", machine.folder / "a", 60)
    machine.round(p1=60)
    assert machine.written("a")[1] == 60
    machine.feedback.add_lease("a", machine.folder / "a", 80)
    machine.round(p1=60)
    assert machine.written("a")[1] == 80


def test_process_is_counted_when_its_lease_is_known_later(machine: Machine) -> None:
    """Until then it is a stranger, whose time is nobody's."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30))
    machine.round(p2=50)
    first = machine.written("a")[0]
    machine.leases[2] = "a"
    machine.round(p2=50)
    assert machine.written("a")[0] - first == 50


def test_unleased_process_has_demand_when_it_uses_the_card(machine: Machine) -> None:
    """A process in no lease is not limited by anybody."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30, "soft"))
    machine.round(p1=50, p9=50)
    assert machine.written("a") == (machine.written("a")[0], 30)


def test_no_feedback_is_written_when_the_driver_reports_no_samples(machine: Machine) -> None:
    """Then programs rely on what they measure."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30))
    machine.now_us += 100_000
    machine.busy = None
    machine.feedback.update()
    assert machine.written("a") == (0, 0)


def test_driver_is_read_seldom_when_no_lease_is_limited(machine: Machine) -> None:
    """It costs little until somebody is; a limit that is set later is seen."""
    machine.lease("a", 1, Limit(CARD, 1))
    for _ in range(10):
        machine.round(p1=50)
    assert machine.asked == 2
    control.update(machine.folder / "a", Control("a", (Limit(CARD, 1, 0, 20),)))
    machine.round(p1=50)
    machine.round(p1=50)
    assert machine.asked == 4


def test_lease_of_a_process_is_looked_up_once_when_no_lease_is_limited(machine: Machine) -> None:
    """The answer is kept between two readings of the card."""
    machine.lease("a", 1, Limit(CARD, 1))
    machine.round(p1=50)
    machine.leases.clear()
    first = machine.written("a")[0]
    for _ in range(5):
        machine.round(p1=50)
    assert machine.written("a")[0] > first


def test_use_is_written_when_no_lease_is_limited(machine: Machine) -> None:
    """All samples since the last reading count, at most those of a second."""
    machine.lease("a", 1, Limit(CARD, 1))
    machine.round(p1=50)
    machine.now_us += 400_000
    machine.round(p1=50)
    assert machine.written("a") == (500 + 250, 100)


def test_limits_are_unchanged_when_feedback_is_written(machine: Machine) -> None:
    """What is told is no limit; and changing limits leaves it alone."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30))
    machine.round(p1=50)
    before = machine.written("a")
    assert control.read(machine.folder / "a").limits == (Limit(CARD, 1, 0, 30),)
    control.update(machine.folder / "a", Control("a", (Limit(CARD, 2, 0, 50),)))
    assert machine.written("a") == before


def test_no_feedback_is_written_when_the_lease_was_removed(machine: Machine) -> None:
    """Its page is not written any more."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30))
    machine.feedback.remove_lease("a")
    machine.feedback.remove_lease("a")
    machine.round(p1=50)
    assert machine.asked == 0
    machine.feedback.close()
