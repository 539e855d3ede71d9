"""One change of instances follows the other, and nobody is given what is about to change."""

import asyncio
from collections.abc import Callable, Collection

import pytest

from fenka.core.inventory import Card, InstanceId
from fenka.formats.mig_parted import CardTarget
from fenka.hardware.nvml import Hardware
from fenka.hardware.nvml_mig import NoRoomForInstance
from fenka.mig.instance_driver import InstanceDriver
from fenka.mig.keeper import GpuInstanceRecord
from fenka.mig.layouts import CardPlan, Step, plan_card
from fenka.mig.manager import InstanceManager, is_enabled
from tests.mig.machine import Machine


class Program:
    """A program whose leases name devices, and what it was shown."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.leased = machine, set[str]()
        self.shown: list[tuple[list[tuple[str, int, int]], list[str]]] = []
        """What existed, and the profiles of what was about to be destroyed."""
        self.on_show: Callable[[], object] = lambda: None
        manager = InstanceManager(Hardware(lambda: machine.driver), machine.keeper())
        self.keeper = manager.keeper
        self.driver = InstanceDriver(manager, lambda: self.leased, self._show)

    async def _show(self, leaving: Collection[GpuInstanceRecord]) -> None:
        self.shown.append((self.machine.layout(), [record.profile for record in leaving]))
        self.on_show()

    def make(self, profile: str, start: int) -> GpuInstanceRecord:
        """Create an instance."""
        return self.keeper.create(self.machine.card, self.machine.place(profile, start))


@pytest.fixture
def program(machine: Machine) -> Program:
    """Return a program with one card in MIG mode."""
    return Program(machine)


async def test_instance_is_shown_as_leaving_before_it_is_destroyed(program: Program) -> None:
    """What a lease names stays, and nothing changes a second time."""
    used, unused = program.make("1g.5gb", 0), program.make("2g.10gb", 4)
    program.leased.add(used.uuid)
    seen: list[frozenset[InstanceId]] = []
    program.on_show = lambda: seen.append(program.driver.changing)
    for _ in range(2):
        assert await program.driver.run(program.driver.destroy_unused()) == []
    assert program.shown == [([("1g.5gb", 0, 1), ("2g.10gb", 4, 1)], ["2g.10gb"])]
    assert seen == [frozenset({unused.instance})]
    assert program.machine.layout() == [("1g.5gb", 0, 1)]
    assert not program.driver.changing


async def test_instance_stays_when_a_lease_comes_while_unused_ones_are_sought(
    program: Program,
) -> None:
    """The driver is read in a thread, and the program gives leases away meanwhile."""
    record, read = program.make("1g.5gb", 0), program.keeper.unused

    def unused(leased: Collection[str]) -> list[GpuInstanceRecord]:
        found = read(leased)
        program.leased.add(record.uuid)
        return found

    program.keeper.unused = unused  # type: ignore[method-assign]
    assert await program.driver.run(program.driver.destroy_unused()) == []
    assert (program.machine.layout(), program.shown) == ([("1g.5gb", 0, 1)], [])


async def test_created_instance_has_its_lease_before_it_is_shown(program: Program) -> None:
    """Else it could be given to another; an unused one in its place is destroyed first."""
    program.make("1g.5gb", 0)
    place = program.machine.place("4g.20gb", 0)
    instance = place.on(program.driver.manager.hardware.driver.cards()[0].uuid)
    create = program.driver.create(
        [instance],
        lambda *_: program.keeper.create(instance.card, place),
        lambda record: program.leased.add(record.uuid),
    )
    await program.driver.run(create)
    assert program.shown == [([("1g.5gb", 0, 1)], ["1g.5gb"]), ([("4g.20gb", 0, 1)], [])]
    assert await program.driver.run(program.driver.destroy_unused()) == []
    assert program.machine.layout() == [("4g.20gb", 0, 1)]


async def test_what_there_is_is_shown_when_a_creation_fails(program: Program) -> None:
    """Nothing counts as changing afterwards."""
    program.machine.administrator("7g.40gb", 0)
    card = program.machine.card
    place = program.machine.place("1g.5gb", 0)
    with pytest.raises(NoRoomForInstance):
        await program.driver.run(
            program.driver.create([place.on(card)], lambda *_: program.keeper.create(card, place))
        )
    assert program.shown == [([("7g.40gb", 0, 1)], [])]
    assert not program.driver.changing
    assert not program.driver.busy


async def test_plan_of_a_layout_is_made_after_earlier_changes(program: Program) -> None:
    """One that is cancelled before its turn changes nothing."""
    card = Card(0, program.machine.card, "A100", 40960, divided=True)

    def plan() -> CardPlan:
        wanted = CardTarget(True, {"1g.5gb": 1})
        present = {program.machine.place(*key[:2]): list[str]() for key in program.machine.layout()}
        return plan_card(card, program.machine.geometry, present, [], wanted)

    driver = program.driver
    turns = [asyncio.create_task(driver.run(driver.carry_out(plan))) for _ in range(3)]
    await asyncio.sleep(0)
    turns[1].cancel()
    first, _, last = await asyncio.gather(*turns, return_exceptions=True)
    await driver.finish()
    assert not isinstance(first, BaseException)
    assert not isinstance(last, BaseException)
    assert len(first.done) == 1
    assert (last.done, last.waiting) == ([], [])
    assert [name for name, *_ in program.machine.layout()] == ["1g.5gb"]


async def test_card_keeps_its_mode_when_the_driver_does_not_switch_it(program: Program) -> None:
    """Also later, when what has prevented that has ended."""
    uuid = program.machine.card
    card = Card(0, uuid, "A100", 40960, divided=True)
    disable = CardPlan(card, frozenset(), (Step("disable", card),))
    record = program.make("1g.5gb", 0)
    refused = await program.driver.run(program.driver.carry_out(lambda: disable))
    assert (refused.done, refused.in_use) == ([], True)
    await asyncio.to_thread(program.keeper.destroy, record)
    assert is_enabled(uuid)
    switched = await program.driver.run(program.driver.carry_out(lambda: disable))
    assert switched.done == ["disable MIG on card 0"]
    assert not is_enabled(uuid)
