"""Compute feedback: how much each lease may use, and how much it has used."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.request import COMPUTE_MODES, ComputeMode
from fenka.isolation import lease_control
from fenka.isolation.compute_feedback import (
    WITHOUT_COMPUTE,
    ComputeDemand,
    ComputeFeedback,
    allowances,
)
from fenka.isolation.lease_control import Control, Limit, layout

CARD = "GPU-00000000-0000-0000-0000-000000000001"
MS = 1_000_000

HARD40 = ComputeDemand("hard", 40, active=True)
IDLE40 = ComputeDemand("hard", 40, active=False)
SOFT30 = ComputeDemand("soft", 30, active=True)
FREE = ComputeDemand(*WITHOUT_COMPUTE, active=True)
IDLE = ComputeDemand(*WITHOUT_COMPUTE, active=False)
HARD80 = ComputeDemand("hard", 80, active=True)
WHOLE = ComputeDemand("hard", 100, active=True)
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
        (HARD80, [FREE], 80),
        (FREE, [], 100),
        (FREE, [HARD80], 20),  # 100 - 80
        (FREE, [replace(HARD80, active=False)], 100),
        (FREE, [HARD80, FREE], 10),  # half of 20
        (FREE, [HARD80, IDLE], 20),
        (FREE, [SOFT30], 70),
        (FREE, [HARD40, LIGHT], 48),  # 100 of 125, of 60
        (FREE, [replace(HARD80, used_percent=2)], 92),
        (FREE, [WHOLE], 1),  # somebody reserved all of the card
        (WHOLE, [FREE], 100),
        (HEAVY, [WHOLE], 1),
        # What is lightly used leaves the card to others: 2 % claim 2 * 1.5 + 5 = 8.
        (SOFT30, [replace(HARD40, used_percent=2)], 92),
        (SOFT30, [replace(HARD40, used_percent=20)], 65),  # 20 * 1.5 + 5 = 35
        (SOFT30, [replace(HARD40, used_percent=24)], 60),  # 41 is more than its share
        (UPTO60, [replace(HARD40, used_percent=2)], 60),
        (SOFT30, [replace(FREE, used_percent=2)], 30),
        (LIGHT, [replace(HEAVY, used_percent=2)], 92),
        (LIGHT, [replace(HEAVY, used_percent=40)], 35),  # 40 * 1.5 + 5 = 65 is below 75
        (LIGHT, [replace(HEAVY, used_percent=47)], 25),  # 75.5 is not
        (HEAVY, [replace(LIGHT, used_percent=2)], 92),
        (LIGHT, [replace(HARD40, used_percent=2)], 92),
        (LIGHT, [replace(FREE, used_percent=10)], 80),  # 100 - 20
        # HARD40 claims 8 of 100, the other LIGHT 8 of its 18.4: a quarter of 84 is left.
        (LIGHT, [replace(HARD40, used_percent=2), replace(LIGHT, used_percent=2), HEAVY], 21),
    ],
)
def test_allowances_follow_shares_and_weights(
    first: ComputeDemand, others: list[ComputeDemand], percent: float
) -> None:
    """Active leases get their shares first, then the rest is divided."""
    leases = {"first": first} | {str(i): demand for i, demand in enumerate(others)}
    assert allowances(leases)["first"] == pytest.approx(percent)


MODES = st.sampled_from(COMPUTE_MODES)
DEMANDS = st.builds(
    ComputeDemand,
    MODES,
    st.integers(1, 100),
    st.booleans(),
    st.integers(1, 100),
    st.integers(0, 100),
)


@given(st.lists(DEMANDS, min_size=1, max_size=6))
def test_light_use_of_others_only_ever_adds_to_what_a_lease_may_use(
    demands: list[ComputeDemand],
) -> None:
    """Nobody has less than beside others who use all that they may, and hard is never more than its share."""
    leases = {str(number): demand for number, demand in enumerate(demands)}
    busy = {name: replace(demand, used_percent=100) for name, demand in leases.items()}
    now, least = allowances(leases), allowances(busy)
    for name, demand in leases.items():
        assert least[name] - 1e-9 <= now[name] <= 100 + 1e-9
        if demand.mode == "hard":
            assert now[name] == demand.percent


@given(
    st.lists(st.tuples(st.sampled_from(("hard", "soft")), st.integers(1, 25)), max_size=4),
    st.lists(st.integers(1, 100), max_size=4),
    st.integers(0, 3),
)
def test_guaranteed_shares_are_kept_when_everybody_wants_the_card(
    shares: list[tuple[ComputeMode, int]], weights: list[int], without: int
) -> None:
    """Each share gets its percentage, and the others at most the rest, and all of it if it is one percent."""
    others = [ComputeDemand("weight", weight, active=True) for weight in weights]
    others += without * [FREE]
    demands = [ComputeDemand(*share, active=True) for share in shares] + others
    allowed = allowances({str(number): demand for number, demand in enumerate(demands)})
    guaranteed = [percent for _, percent in shares]
    for number, percent in enumerate(guaranteed):
        assert allowed[str(number)] >= percent
        if others:
            assert allowed[str(number)] == percent
    rest = sum(allowed[str(number)] for number in range(len(shares), len(demands)))
    assert rest == pytest.approx(max(100 - sum(guaranteed), 1) if others else 0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_busy_weights_divide_the_card(weights: list[int]) -> None:
    """In proportion, and together all of it."""
    leases = {
        str(number): ComputeDemand("weight", weight, active=True)
        for number, weight in enumerate(weights)
    }
    allowed = allowances(leases)
    assert sum(allowed.values()) == pytest.approx(100)
    for name, demand in leases.items():
        assert allowed[name] == pytest.approx(100 * demand.percent / sum(weights))


class Machine:
    """A card, its clock, and the processes that compute on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_us = folder, 10_000_000
        self.asked: Counter[str] = Counter()
        self.busy: dict[int, int] | None = {}
        self.leases: dict[int, str] = {}
        self.start()

    def start(self) -> None:
        """Start the writer of feedback, as after a crash."""
        self.feedback = ComputeFeedback(
            self.samples, self.leases.get, lambda: self.now_us * 1000, lambda: self.now_us
        )

    def samples(self, uuid: str, since_us: int) -> tuple[int, dict[int, int]] | None:
        """Stand in for `Driver.busy_samples`."""
        self.asked[uuid] += 1
        if self.busy is None:
            return None
        return (self.now_us if self.busy else since_us), self.busy

    def lease(self, name: str, pid: int, limit: Limit, requested: int | None = None) -> None:
        """Add a lease of one process."""
        lease_control.write(self.folder / name, Control(name, (limit,)))
        self.leases[pid] = name
        self.add(name, requested)

    def add(self, name: str, requested: int | None) -> None:
        """Add a lease that has a page, or say what it requested."""
        percents = None if requested is None else {CARD: requested}
        self.feedback.add_lease(name, self.folder / name, requested=percents)

    def beside_share(self) -> None:
        """Add a training without compute and a service with a share of 80."""
        self.lease("training", 1, Limit(CARD, 1), 0)
        self.lease("service", 2, Limit(CARD, 1, 0, 80), 80)

    def yielding_since(self, name: str) -> int:
        """Return since when the lease yields, in microseconds; 0 if it does not."""
        data = (self.folder / name).read_bytes()
        return int(layout().from_buffer("struct fenka_control *", data).yielding_since) // 1000

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
    assert machine.written("a")[1] == 93  # 100 - (1 * 1.5 + 5)
    machine.round(p1=50, p2=30)
    assert machine.written("a")[1] == 60
    machine.round(p1=60, p2=1)
    assert machine.written("a")[1] == 60  # a moment ago it was 30
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


def test_process_has_demand_when_it_uses_a_card_outside_of_its_lease(machine: Machine) -> None:
    """It has got round its limits, and nobody limits it on that card."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30, "soft"))
    machine.lease("b", 2, Limit(CARD[:-1] + "2", 1, 0, 30))
    machine.round(p1=50, p2=50)
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
    assert machine.asked[CARD] == 2
    lease_control.update(machine.folder / "a", Control("a", (Limit(CARD, 1, 0, 20),)))
    machine.round(p1=50)
    machine.round(p1=50)
    assert machine.asked[CARD] == 4


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
    assert lease_control.read(machine.folder / "a").limits == (Limit(CARD, 1, 0, 30),)
    lease_control.update(machine.folder / "a", Control("a", (Limit(CARD, 2, 0, 50),)))
    assert machine.written("a") == before


def test_no_feedback_is_written_when_the_lease_was_removed(machine: Machine) -> None:
    """Its page is not written any more."""
    machine.lease("a", 1, Limit(CARD, 1, 0, 30))
    machine.feedback.remove_lease("a")
    machine.feedback.remove_lease("a")
    machine.round(p1=50)
    assert machine.asked[CARD] == 0
    machine.feedback.close()


def test_lease_without_compute_yields_when_a_share_is_beside_it(machine: Machine) -> None:
    """It has the rest while the share is used, and all of the card otherwise."""
    machine.beside_share()
    machine.round(p1=50, p2=80)
    assert machine.written("training")[1] == 20
    assert machine.yielding_since("training") == machine.now_us
    assert machine.yielding_since("service") == 0
    for _ in range(4):
        machine.round(p1=20)
    assert machine.written("training")[1] == 100
    assert machine.yielding_since("training") == machine.now_us - 400_000


@pytest.mark.parametrize(
    ("beside", "requested", "since"),
    [
        (None, 0, False),
        (Limit(CARD, 1), 0, False),  # nor has that one
        (Limit(CARD, 1), None, False),  # an unlimited one has no share
        (Limit(CARD, 1), 100, True),  # all of the card was requested
        (Limit(CARD, 1, 0, 1), 1, True),
        (Limit(CARD, 1, 0, 100, "soft"), 100, True),
        (Limit(CARD, 1, 0, 100, "weight"), 0, True),
        (Limit(CARD.replace("1", "2"), 1, 0, 80), 80, False),  # on another card
    ],
)
def test_lease_without_compute_yields_to_shares_and_weights_only(
    machine: Machine, beside: Limit | None, requested: int | None, since: bool
) -> None:
    """Also before they use the card; and only then the driver is read ten times a second for it."""
    machine.lease("a", 1, Limit(CARD, 1), 0)
    if beside:
        machine.lease("b", 2, beside, requested)
    for _ in range(11):
        machine.round(p1=50)
    assert bool(machine.yielding_since("a")) == since
    assert machine.written("a")[1] == 100
    assert machine.asked[CARD] == (11 if since else 3)


@pytest.mark.parametrize("requested", [100, None])
def test_lease_is_not_delayed_when_it_requested_all_of_the_card(
    machine: Machine, requested: int | None
) -> None:
    """Nor if it is exempt from limits."""
    machine.lease("a", 1, Limit(CARD, 1), requested)
    machine.lease("b", 2, Limit(CARD, 1, 0, 80), 80)
    machine.round(p1=50, p2=50)
    assert machine.written("a")[1] == 100
    assert machine.yielding_since("a") == 0


def test_lease_is_delayed_no_more_when_the_share_has_left(machine: Machine) -> None:
    """Or has become another lease without compute. A later share counts from its own beginning."""
    machine.beside_share()
    machine.round(p1=50, p2=80)
    machine.feedback.remove_lease("service")
    for _ in range(5):
        machine.round(p1=20)
    assert machine.yielding_since("training") == 0
    machine.add("service", 80)
    machine.round(p1=20, p2=80)
    assert machine.yielding_since("training") == machine.now_us
    lease_control.update(machine.folder / "service", Control("service", (Limit(CARD, 1),)))
    machine.add("service", 0)
    for _ in range(5):
        machine.round(p1=20, p2=80)
    assert machine.yielding_since("training") == 0
    assert machine.written("training")[1] == 100


def test_lease_yields_no_more_when_it_was_resized_to_a_share(machine: Machine) -> None:
    """Its page then has a limit of its own; a request of all of the card has none."""
    machine.lease("a", 1, Limit(CARD, 1), 0)
    machine.lease("b", 2, Limit(CARD, 1, 0, 20, "weight"), 0)
    machine.round(p1=50, p2=50)
    assert machine.yielding_since("a") == machine.now_us
    machine.add("a", 100)
    for _ in range(5):
        machine.round(p1=50, p2=50)
    assert machine.yielding_since("a") == 0
    machine.add("a", 0)
    machine.round(p1=50, p2=50)
    assert machine.yielding_since("a") == machine.now_us
    lease_control.update(machine.folder / "a", Control("a", (Limit(CARD, 1, 0, 60),)))
    machine.round(p1=50, p2=50)
    assert machine.yielding_since("a") == 0


def test_lease_goes_on_yielding_when_the_writer_was_killed(machine: Machine) -> None:
    """Programs have measured all the time, so the beginning stays; what has left meanwhile is noticed."""
    machine.beside_share()
    machine.round(p1=50, p2=80)
    began = machine.now_us
    machine.start()
    machine.add("training", 0)
    machine.add("service", 80)
    machine.round(p1=50, p2=80)
    assert machine.yielding_since("training") == began
    assert machine.written("training")[1] == 20
    machine.start()
    machine.add("training", 0)
    machine.round(p1=50)
    assert machine.yielding_since("training") == 0
    assert machine.written("training")[1] == 100


def test_lease_yields_when_any_of_its_cards_is_shared(machine: Machine) -> None:
    """Beside others without compute it keeps the whole of its other card."""
    other = CARD.replace("1", "2")
    for name in ("a", "b"):
        lease_control.write(machine.folder / name, Control(name, (Limit(CARD, 1), Limit(other, 1))))
        machine.feedback.add_lease(name, machine.folder / name, requested={CARD: 0, other: 0})
    machine.lease("c", 3, Limit(CARD, 1, 0, 80), 80)
    machine.leases |= {1: "a", 2: "b"}
    machine.round(p1=50, p2=50, p3=80)
    assert machine.yielding_since("a") == machine.now_us
    data = (machine.folder / "a").read_bytes()
    cards = layout().from_buffer("struct fenka_control *", data).cards
    assert [card.allowed // 100 for card in cards[0:2]] == [10, 100]


def test_page_is_valid_when_its_lease_yields(machine: Machine) -> None:
    """Whoever resizes it reads its limits, and leaves feedback alone."""
    machine.beside_share()
    machine.round(p1=50, p2=80)
    page = machine.folder / "training"
    assert lease_control.read(page).limits == (Limit(CARD, 1),)
    lease_control.update(page, Control("training", (Limit(CARD, 2),)))
    assert machine.yielding_since("training") == machine.now_us
    assert machine.written("training")[1] == 20
