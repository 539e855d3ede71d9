"""The ledger of usage: whatever happens, shares, idle and unobserved time are cards × time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId
from fenka.core.metering import (
    DAY_US,
    HOUR_US,
    MAX_GAP_US,
    SECOND_US,
    Amounts,
    Holding,
    Line,
    LineKind,
    MeteredCard,
    Observation,
    UsageLedger,
    add,
    charges,
    cost,
    elapsed_us,
)

T4 = MeteredCard(DeviceId("GPU-0"), "Tesla T4", 15079)
A100 = MeteredCard(DeviceId("GPU-1"), "NVIDIA A100-SXM4-40GB", 40536)
NOON = 20_000 * DAY_US + 12 * HOUR_US
FOUR_UNITS = Holding("a", T4.uuid, 4308)


def observed(
    at_s: float, *holdings: Holding, cards: Sequence[MeteredCard] = (T4,), **more: str
) -> Observation:
    """An observation so many seconds after noon, of one boot and observer."""
    at_us = int(at_s * SECOND_US)
    names = {"boot": "b", "observer": "o", **more}
    return Observation(NOON + at_us, at_us, names["boot"], names["observer"], cards, holdings)


def ledger_of(*observations: Observation) -> UsageLedger:
    """The ledger of successive observations."""
    ledger: UsageLedger = {}
    for before, after in pairwise(observations):
        add(ledger, charges(before, after))
    return ledger


def seconds(ledger: UsageLedger) -> dict[str, float]:
    """The charged seconds by holder, or by kind where there is none."""
    charged: dict[str, float] = {}
    for line, amounts in ledger.items():
        name = line.holder or line.kind.value
        charged[name] = charged.get(name, 0) + amounts.card_us / SECOND_US
    return charged


# 4308 of 15079 MiB are 28.57 % of the card: 17.141720 of 60 s.
# 60 % of compute with 4308 MiB: 36 s.
# 14 units of memory and 50 % of compute by another: 60 : 30 of 60 s, so 40 and 20.
@pytest.mark.parametrize(
    ("holdings", "expected"),
    [
        ([], {"idle": 60}),
        ([FOUR_UNITS], {"a": 17.141720, "idle": 42.858280}),
        ([FOUR_UNITS._replace(compute=60)], {"a": 36, "idle": 24}),
        ([Holding("a", T4.uuid, 0, 25)], {"a": 15, "idle": 45}),
        ([Holding("a", T4.uuid, 15000, 100)], {"a": 60}),
        ([Holding("a", T4.uuid, 15079), Holding("b", T4.uuid, 100, 50)], {"a": 40, "b": 20}),
        ([Holding("a", DeviceId("GPU-gone"), 4308)], {"idle": 60}),
    ],
)
def test_a_slice_is_charged_its_larger_share_when_it_is_held(
    holdings: list[Holding], expected: dict[str, float]
) -> None:
    """The share of memory, or of compute if it is larger; scaled down to the card; the rest is idle."""
    assert seconds(ledger_of(observed(0, *holdings), observed(60))) == expected


def test_instances_share_their_card_when_a_job_holds_several() -> None:
    """Two instances of one job on one card are one holding, beside another's."""
    held = (
        Holding("a", A100.uuid, 10134, 14),
        Holding("a", A100.uuid, 10134, 14),
        Holding("b", A100.uuid, 4864, 14),
    )
    charged = seconds(ledger_of(observed(0, *held, cards=[A100]), observed(40, cards=[A100])))
    assert charged["a"] == 20
    assert charged["b"] == pytest.approx(40 * 0.14)


def test_held_and_used_are_kept_apart_when_the_use_is_known() -> None:
    """Memory in use counts against the held memory of which it is known; busy time is by the counter."""
    before = observed(0, FOUR_UNITS._replace(used_mib=1000, busy_us=5 * SECOND_US))
    after = observed(10, FOUR_UNITS._replace(used_mib=9999, busy_us=7 * SECOND_US))
    last = observed(20, FOUR_UNITS)
    of_holder = [amounts for line, amounts in ledger_of(before, after, last).items() if line.holder]
    ten = 10 * SECOND_US
    assert of_holder == [
        Amounts(
            *(2 * 2_856_953, 2 * 4308 * ten, 0),
            *(1000 * ten + 4308 * ten, 2 * 4308 * ten),  # never more than is held
            *(2 * SECOND_US, 2_856_953),
        )
    ]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (observed(300, observer="next"), {"unobserved": 300}),
        (observed(2, observer="next"), {"unobserved": 2}),
        (observed(61), {"unobserved": 61}),
        (observed(60, FOUR_UNITS, cards=[]), {"a": 17.141720, "idle": 42.858280}),
    ],
)
def test_time_is_unobserved_when_nobody_watched(
    after: Observation, expected: dict[str, float]
) -> None:
    """After a restart of the observer, and after a gap. A card that is lost counts until it is."""
    assert seconds(ledger_of(observed(0, FOUR_UNITS), after)) == expected


def test_the_uptime_counts_when_the_clock_is_set() -> None:
    """A clock that is set back or forth changes the day that time counts for, not the time."""
    before, after = observed(0, FOUR_UNITS), observed(10)
    for shift in (-400 * DAY_US, -3 * SECOND_US, 9 * HOUR_US, 90 * DAY_US):
        moved = after._replace(at_us=after.at_us + shift)
        assert seconds(ledger_of(before, moved)) == {"a": 2.856953, "idle": 7.143047}


@pytest.mark.parametrize(
    ("absence_us", "expected"), [(-5, 0), (HOUR_US, HOUR_US), (999 * DAY_US, 0)]
)
def test_the_clock_counts_when_the_machine_has_restarted(absence_us: int, expected: int) -> None:
    """A machine that begins without a time of day does not add decades."""
    after = observed(0, boot="next")._replace(at_us=NOON + absence_us)
    assert elapsed_us(observed(0), after) == expected


def test_time_is_divided_among_days_when_midnight_passes() -> None:
    """Days are UTC's; each gets its own time and its part of the busy time."""
    before = observed(12 * 3600 - 10, FOUR_UNITS._replace(busy_us=0))
    after = observed(12 * 3600 + 30, FOUR_UNITS._replace(busy_us=4 * SECOND_US))
    ledger = ledger_of(before, after)
    of_day = {day: [line for line in ledger if line.day == day] for day in (20_000, 20_001)}
    first, second = (
        next(ledger[line] for line in lines if line.holder) for lines in of_day.values()
    )
    assert (first.memory, second.memory) == (4308 * 10 * SECOND_US, 4308 * 30 * SECOND_US)
    assert (first.busy_us, second.busy_us) == (1 * SECOND_US, 3 * SECOND_US)


def test_cost_is_exact_when_it_is_a_fraction() -> None:
    """0.35 for an hour; a third of an hour costs a third of that."""
    assert cost(HOUR_US // 3, 350_000) == Fraction(35, 300)


# --- histories ----------------------------------------------------------------------------------------


@dataclass
class World:
    """A machine with cards and jobs, whose observer sees every change of them."""

    at_us: int = NOON
    uptime_us: int = 0
    boot: int = 0
    observer: int = 0
    cards: dict[DeviceId, MeteredCard] = field(
        default_factory=lambda: {T4.uuid: T4, A100.uuid: A100}
    )
    jobs: dict[str, Holding] = field(default_factory=dict)
    started: int = 0

    def observe(self) -> Observation:
        """The machine as it is now."""
        return Observation(
            *(self.at_us, self.uptime_us, str(self.boot), str(self.observer)),
            tuple(self.cards.values()),
            tuple(self.jobs.values()),
        )


GAPS = st.one_of(
    st.integers(0, 20 * SECOND_US), st.integers(0, 3 * DAY_US), st.just(MAX_GAP_US), st.just(0)
)
EVENTS = st.sampled_from(
    [
        *["start", "end", "resize", "tick"] * 3,
        "lose",
        "return",
        "restart",
        "boot",
        "set clock",
        "price",
    ]
)


def happen(world: World, event: str, data: st.DataObject) -> None:
    """Change the machine."""
    draw = data.draw
    some_card = st.sampled_from(sorted(world.cards) or [T4.uuid])
    memory, compute = st.integers(0, 50_000), st.integers(0, 100)
    some_job = st.sampled_from(sorted(world.jobs)) if world.jobs else st.none()
    match event:
        case "start":
            world.started += 1
            busy = draw(st.one_of(st.none(), st.integers(0, DAY_US)))
            used = draw(st.one_of(st.none(), memory))
            held = Holding(
                str(world.started), draw(some_card), draw(memory), draw(compute), used, busy
            )
            world.jobs[held.holder] = held
        case "end" if name := draw(some_job):
            del world.jobs[name]
        case "resize" if name := draw(some_job):
            busy = (world.jobs[name].busy_us or 0) + draw(st.integers(0, DAY_US))
            changed = world.jobs[name]._replace(memory_mib=draw(memory), busy_us=busy)
            world.jobs[name] = changed
        case "lose" if world.cards:
            del world.cards[draw(some_card)]
        case "return":
            world.cards = {T4.uuid: T4, A100.uuid: A100}
        case "restart":
            world.observer += 1
        case "boot":
            world.boot, world.uptime_us, world.observer = world.boot + 1, 0, world.observer + 1
        case "set clock":
            world.at_us += draw(st.integers(-90 * DAY_US, 90 * DAY_US))
        case "price":
            world.cards = {
                uuid: card._replace(paid=draw(st.one_of(st.none(), st.integers(0, 10**8))))
                for uuid, card in world.cards.items()
            }


def shares_by_fractions(before: Observation) -> dict[tuple[str, DeviceId], Fraction]:
    """The share of each job, by the definition instead of by integers."""
    shares = dict[tuple[str, DeviceId], Fraction]()
    for card in before.cards:
        on_card = [held for held in before.holdings if held.card == card.uuid]
        each_share = [
            min(
                max(Fraction(held.memory_mib, card.memory_mib), Fraction(held.compute, 100)),
                Fraction(1),
            )
            for held in on_card
        ]
        scale = max(sum(each_share, Fraction(0)), Fraction(1))
        shares |= {
            (held.holder, card.uuid): share / scale
            for held, share in zip(on_card, each_share, strict=True)
        }
    return shares


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_everything_adds_up_to_cards_and_time_when_anything_happens(data: st.DataObject) -> None:
    """The sum of all shares, idle and unobserved time is cards × time, and costs the same, exactly."""
    world = World()
    ledger: UsageLedger = {}
    prices = {T4.model: 350_000, A100.model: 3_123_457}
    card_us, expected_cost = 0, Fraction(0)
    expected: dict[str, Fraction] = {}
    intervals = 0
    before = world.observe()
    for _ in range(data.draw(st.integers(1, 25))):
        gap = data.draw(GAPS)
        world.at_us, world.uptime_us = world.at_us + gap, world.uptime_us + gap
        boot = world.boot
        happen(world, data.draw(EVENTS), data)
        after = world.observe()
        span = gap if world.boot == boot else max(after.at_us - before.at_us, 0)
        for card in before.cards:
            card_us += span
            price = prices[card.model] if card.paid is None else card.paid
            expected_cost += Fraction(span * price, 3600 * 10**12)
        if before.observer == after.observer and span <= MAX_GAP_US:
            intervals += 2  # at most one midnight is in it
            for (holder, _), share in shares_by_fractions(before).items():
                expected[holder] = expected.get(holder, Fraction(0)) + share * span
        charged = list(charges(before, after))
        assert all(min(amounts) >= 0 for _, amounts in charged)
        add(ledger, charged)
        before = after

    assert sum(amounts.card_us for amounts in ledger.values()) == card_us
    costs = (cost(amounts.card_us, _price(line, prices)) for line, amounts in ledger.items())
    assert sum(costs) == expected_cost
    held: dict[str, int] = {}
    for line, amounts in ledger.items():
        assert (line.kind is LineKind.HELD) == bool(line.holder)
        assert amounts.used <= amounts.measured <= amounts.memory
        if line.holder:
            held[line.holder] = held.get(line.holder, 0) + amounts.card_us
    for holder in expected.keys() | held.keys():
        assert abs(held.get(holder, 0) - expected.get(holder, Fraction(0))) <= intervals


def _price(line: Line, prices: dict[str, int]) -> int:
    return prices[line.model] if line.paid is None else line.paid
