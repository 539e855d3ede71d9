"""The health of cards: lost and returned ones, reported errors, and indexes."""

from dataclasses import replace
from pathlib import Path

from fenka.core.inventory import Card, Distance
from fenka.hardware.nvml import Reading
from fenka.hardware.xids import APPLICATION_XIDS, INFO_XIDS, is_fatal_xid
from fenka.node.inventory import CardHealth
from tests.node.harness import FakeHardware, card


def test_card_is_healthy_again_when_it_was_lost_and_returns() -> None:
    """That is how a reset looks. An XID of a program changes nothing."""
    hardware = FakeHardware((card(0), card(1)))
    health = CardHealth(hardware)  # type: ignore[arg-type]
    health.refresh()
    health.report_xid(card(0).uuid, 13)
    assert health.error(card(0).uuid) is None
    health.report_xid(card(0).uuid, 48)
    assert [shown.healthy for shown in health.cards(())] == [False, True]
    hardware.lost.add(card(0).uuid)
    health.refresh()
    assert health.error(card(0).uuid) == "it has fallen off the bus"
    hardware.lost.clear()
    health.refresh()
    assert health.error(card(0).uuid) is None
    assert [shown.cordoned for shown in health.cards({1})] == [False, True]
    assert isinstance(health.readings[card(0).uuid], Reading)


def test_distances_are_read_again_when_a_card_returns() -> None:
    """The driver shows none of a lost card."""
    hardware = FakeHardware((card(0),))
    health = CardHealth(hardware)  # type: ignore[arg-type]
    health.restore([card(0), card(1)])
    health.refresh()
    assert health.links is None
    hardware.cards = (card(0), card(1))
    health.refresh()
    assert health.links is not None
    assert health.links.distance(card(0).uuid, card(1).uuid) == Distance.NVLINK


def test_reported_error_is_kept_when_the_program_restarts(tmp_path: Path) -> None:
    """It is kept until a user resets the card, or the node reboots."""
    record = tmp_path / "health.json"
    hardware = FakeHardware((card(0), card(1)))

    def started() -> CardHealth:
        health = CardHealth(hardware, record)  # type: ignore[arg-type]
        health.refresh()
        return health

    started().report_xid(None, 48)
    assert [started().error(card(n).uuid) for n in (0, 1)] == ["XID 48"] * 2
    started().reset({1, 7})
    assert [started().error(card(n).uuid) for n in (0, 1)] == ["XID 48", None]
    record.unlink()
    assert started().error(card(0).uuid) is None
    record.write_text("[]")
    assert started().error(card(0).uuid) is None


def test_card_is_known_when_it_was_lost_before_the_start() -> None:
    """The node's published inventory has it."""
    hardware = FakeHardware((card(0),))
    health = CardHealth(hardware)  # type: ignore[arg-type]
    health.restore([card(0), card(1)])
    health.refresh()
    assert [(shown.index, shown.healthy) for shown in health.cards(())] == [(0, True), (1, False)]
    hardware.cards = (card(0), card(1))
    health.refresh()
    assert all(shown.healthy for shown in health.cards(()))
    hardware.lost.add(card(1).uuid)
    health.refresh()
    health.forget_lost()
    assert health.known == (card(0),)


def test_card_keeps_its_index_when_another_one_is_lost() -> None:
    """A new card takes a lost card's index. Otherwise the driver's indexes count."""
    published = [card(0), card(1), card(2)]

    def after(*shown: Card) -> list[tuple[int, str, bool]]:
        health = CardHealth(FakeHardware(shown))  # type: ignore[arg-type]
        health.restore(published)
        health.refresh()
        return [(shown.index, shown.uuid, shown.healthy) for shown in health.cards(())]

    a, b, c, new = (card(n).uuid for n in range(4))
    moved = replace(card(2), index=1)
    assert after(card(0), moved) == [(0, a, True), (1, b, False), (2, c, True)]
    assert after(card(0), moved, replace(card(3), index=2)) == [
        (0, a, True),
        (1, new, True),
        (2, c, True),
    ]
    swapped = (replace(card(1), index=0), replace(card(0), index=1), card(2))
    assert [shown[:2] for shown in after(*swapped)] == [(0, b), (1, a), (2, c)]


def test_xids_of_programs_are_not_fatal() -> None:
    """NVIDIA's own plugin has the same list: 13, 31, 43, 45, 68 and 109. 79 is a lost card."""
    assert {13, 31, 43, 45, 68, 109} <= set(APPLICATION_XIDS)
    assert not any(map(is_fatal_xid, (*APPLICATION_XIDS, *INFO_XIDS)))
    assert all(map(is_fatal_xid, (48, 62, 64, 74, 79, 95, 119, 120, 99999)))
