"""Memory that no lease uses: what is measured, what counts as taken, and for how long."""

from dataclasses import replace

import pytest

from fenka.isolation.driver_usage import (
    HOLD_S,
    NOTHING_UNLEASED,
    UnleasedMemory,
    UnleasedProgram,
    UnleasedTracker,
    measure,
)

CARD_MIB = 15360
STEP_MIB = 240
PYTHON = UnleasedProgram("python", 12288)
UNKNOWN = UnleasedProgram("python", None)
DESKTOP = UnleasedProgram("Xorg", 300, draws=True)


@pytest.mark.parametrize(
    ("used", "leased", "slices", "programs", "expected"),
    [
        (4000, [4000], 4308, [], NOTHING_UNLEASED),
        (12288, [], 0, [PYTHON], UnleasedMemory(0, 12288, 0, ("python",))),
        (300, [], 0, [DESKTOP], UnleasedMemory(300, 0, 0, ("Xorg",))),
        # 5 % of the card, which is 768 MiB, is left to the driver
        (768, [], 0, [], NOTHING_UNLEASED),
        (769, [], 0, [], UnleasedMemory(unattributed_mib=769)),
        # running leases do not explain memory of nobody, however little they use of their slices
        (4300, [0], 4308, [], UnleasedMemory(unattributed_mib=4300)),
        (14336, [4308], 4308, [], UnleasedMemory(unattributed_mib=10028)),
        # where the driver reports no sizes, only what exceeds all slices is certain
        (9000, [None], 4000, [], UnleasedMemory(unattributed_mib=5000)),
        (4500, [None], 4000, [], NOTHING_UNLEASED),
        (9000, [None], 4000, [UNKNOWN], UnleasedMemory(0, 5000, 0, ("python",))),
        (9000, [], 4000, [replace(UNKNOWN, draws=True)], UnleasedMemory(5000, 0, 0, ("python",))),
    ],
)
def test_memory_is_measured_by_the_drivers_figures(
    used: int,
    leased: list[int | None],
    slices: int,
    programs: list[UnleasedProgram],
    expected: UnleasedMemory,
) -> None:
    """Processes without a lease count as the driver reports them, the rest beyond a tolerance."""
    assert measure(CARD_MIB, used, leased, slices, programs) == expected


def test_unattributed_memory_is_what_exceeds_slices_when_the_driver_does_not_name_all() -> None:
    """In a PID namespace of its own a daemon sees some of the processes only."""
    assert measure(CARD_MIB, 4000, [], 4308, [], names_all=False) == NOTHING_UNLEASED
    rest = measure(CARD_MIB, 9000, [], 4308, [], names_all=False)
    assert rest == UnleasedMemory(unattributed_mib=9000 - 4308)


def test_sentence_names_those_that_use_most() -> None:
    """Two programs are named, and memory of no process is told apart."""
    many = [UnleasedProgram(name, mib) for name, mib in (("a", 1024), ("b", 3072), ("c", 2048))]
    assert (
        measure(CARD_MIB, 6144, [], 0, many).sentence()
        == "6.0 GiB used by b, c and 1 more, no lease"
    )
    assert (
        measure(CARD_MIB, 12288, [], 0, [PYTHON]).sentence() == "12.0 GiB used by python, no lease"
    )
    rest = measure(CARD_MIB, 12288 + 2048, [], 0, [PYTHON]).sentence()
    assert rest == (
        "12.0 GiB used by python, no lease, 2.0 GiB used by no process that the driver names"
    )
    assert NOTHING_UNLEASED.sentence() == ""


def counted(*samples: tuple[float, int]) -> list[int]:
    """Return what counts after each sample of a program's memory. samples: times and MiB."""
    tracker, levels = UnleasedTracker(), []
    for now, mib in samples:
        tracker.update("GPU-0", CARD_MIB, UnleasedMemory(computing_mib=mib), now)
        levels.append(tracker.counted("GPU-0").total_mib)
    return levels


def test_memory_counts_at_once_when_it_grows() -> None:
    """It is rounded up, so that small changes change nothing."""
    assert counted((0, 100), (0, 200), (1, 241)) == [STEP_MIB, STEP_MIB, 2 * STEP_MIB]


def test_memory_counts_for_a_while_when_a_program_frees_some_of_it() -> None:
    """The largest amount of that time counts afterwards."""
    later = HOLD_S + 1
    assert counted((0, 12000), (1, 1000), (5, 2400), (6, 1000), (later, 1000)) == [
        *[12000] * 4,
        2400,
    ]
    assert counted((0, 12000), (1, 1000), (5, 12000), (later, 1000)) == [12000] * 4


def test_memory_is_free_at_once_when_nothing_of_it_is_used() -> None:
    """The program has ended."""
    assert counted((0, 12000), (1, 0)) == [12000, 0]


def test_amount_is_shown_as_measured() -> None:
    """People compare it with other programs' figures."""
    tracker = UnleasedTracker()
    tracker.update("GPU-0", CARD_MIB, measure(CARD_MIB, 12290, [], 0, [PYTHON]), 0)
    assert tracker.shown("GPU-0").computing_mib == 12288
    assert tracker.counted("GPU-0").computing_mib == 12480
    assert tracker.counted("GPU-1") == NOTHING_UNLEASED
