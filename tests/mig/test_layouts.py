"""Cards come to fixed layouts around what is in use, also if the program is killed between two steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import Card, DeviceId
from fenka.core.mig.geometry import TABLES, Geometry, Place
from fenka.core.mig.layouts import Layout, all_layouts
from fenka.formats.mig_parted import CardTarget
from fenka.hardware.nvml import Hardware
from fenka.hardware.nvml_mig import MigError
from fenka.mig.keeper import InstanceKeeper
from fenka.mig.layouts import Progress, carry_out, plan_card
from fenka.mig.manager import InstanceManager
from tests.hardware.client import Client
from tests.killing import INSTANCE_STEPS, KilledAt
from tests.mig.machine import Killed, Machine

A100 = TABLES["A100-40G"]
CARD = Card(0, DeviceId("GPU-1"), "A100", 40960)
DIVIDED = replace(CARD, divided=True)
SEVEN = CardTarget(True, {"7g.40gb": 1})
WHOLE = CardTarget(False, {})


def place(name: str, start: int) -> Place:
    """Return a place of an A100."""
    return Place(A100.by_name[name], start)


HALF, SMALL = place("3g.20gb", 4), place("1g.5gb", 0)


@pytest.mark.parametrize(
    ("card", "present", "holders", "target", "steps", "waiting"),
    [
        (CARD, {}, [], SEVEN, ["enable MIG on card 0", "create 0/0 7g.40gb"], []),
        (CARD, {}, ["a", "b"], SEVEN, [], ["enable MIG on card 0: a, b must end"]),
        (CARD, {}, ["a"], WHOLE, [], []),
        (DIVIDED, {}, [], WHOLE, ["disable MIG on card 0"], []),
        (
            DIVIDED,
            {HALF: [], SMALL: ["a"]},
            [],
            WHOLE,
            ["destroy 0/4 3g.20gb"],
            [
                "disable MIG on card 0: its instances are in use",
                "destroy 0/0 1g.5gb is held by a",
            ],
        ),
        (
            DIVIDED,
            {HALF: ["a", "b"], SMALL: None},
            [],
            SEVEN,
            [],
            [
                "create 0/0 7g.40gb: 0/0 1g.5gb is an administrator's, destroy it with nvidia-smi mig, "
                "0/4 3g.20gb is held by a, b",
                "destroy 0/0 1g.5gb is an administrator's, destroy it with nvidia-smi mig",
                "destroy 0/4 3g.20gb is held by a, b",
            ],
        ),
        (DIVIDED, {HALF: ["a"]}, [], CardTarget(True, {"3g.20gb": 1}), [], []),
    ],
)
def test_plan_has_what_can_be_done_now_and_what_the_rest_waits_for(
    card: Card,
    present: dict[Place, Sequence[str] | None],
    holders: list[str],
    target: CardTarget,
    steps: list[str],
    waiting: list[str],
) -> None:
    """As sentences."""
    plan = plan_card(card, A100, present, holders, target)
    assert [str(step) for step in plan.steps] == steps
    assert list(plan.waiting) == waiting
    assert plan.complete == (not steps and not waiting)


def test_card_without_mig_stays_whole_or_is_refused() -> None:
    """With its model."""
    assert plan_card(CARD, None, {}, ["a"], WHOLE).complete
    with pytest.raises(MigError, match=r"card 0 \(A100\) has no MIG"):
        plan_card(CARD, None, {}, [], SEVEN)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Geometry, Layout, Layout]:
    """Return a model, and two of its layouts."""
    geometry = draw(st.sampled_from([A100, TABLES["A30"]]))
    layouts = st.sampled_from(all_layouts(geometry))
    return geometry, draw(layouts), draw(layouts)


@given(change=changes(), users=st.integers(0, 127))
def test_what_is_in_use_stays_and_each_step_is_legal(
    change: tuple[Geometry, Layout, Layout], users: int
) -> None:
    """When all programs have ended, one further plan completes the layout."""
    geometry, before, wanted = change
    target = CardTarget(True, Counter(each.profile.name for each in wanted))
    names = {
        each: ["a"] * (users >> number & 1)
        for number, each in enumerate(sorted(before, key=lambda each: each.start))
    }
    there = set(before)

    def proceed(present: dict[Place, list[str]]) -> None:
        for step in plan_card(DIVIDED, geometry, present, [], target).steps:
            assert step.place is not None
            if step.action == "destroy":
                assert not present[step.place]
                there.remove(step.place)
            else:
                assert not geometry.conflict(there, step.place)
                there.add(step.place)

    proceed(names)
    assert {each for each in before if names[each]} <= there
    proceed({each: [] for each in there})
    assert Counter(each.profile.name for each in there) == target.counts
    assert plan_card(DIVIDED, geometry, {each: [] for each in there}, [], target).complete


def advance(keeper: InstanceKeeper, machine: Machine, target: CardTarget) -> Progress:
    """Do what is possible now, when nobody holds an instance."""
    manager = InstanceManager(Hardware(lambda: machine.driver), keeper)
    card = Card(0, machine.card, "A100", 40960, divided=True)
    present: dict[Place, Sequence[str] | None] = {
        each.place: [] if each.record else None
        for each in manager.statuses(machine.card, ())
        if each.gpu
    }
    return carry_out(manager, plan_card(card, machine.geometry, present, [], target))


def test_kill_between_any_two_steps_is_made_up_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next program completes the layout; an administrator's instance is not touched."""
    first = CardTarget(True, {"3g.20gb": 1, "1g.5gb": 1})
    second = CardTarget(True, {"2g.10gb": 1, "1g.5gb": 2})
    machine.administrator("1g.5gb", 6)
    for step in range(200):
        keeper = machine.keeper()
        advance(keeper, machine, first)
        with monkeypatch.context() as patched:
            killing = KilledAt(patched, step, INSTANCE_STEPS, Killed)
            try:
                advance(machine.keeper(), machine, second)
                done = killing.left > 0
            except Killed:
                done = False
        again = machine.keeper()
        again.settle(())
        assert advance(again, machine, second).waiting == []
        counts = Counter(name for name, *_ in machine.layout())
        assert counts == {"2g.10gb": 1, "1g.5gb": 2}, step
        assert [each.kept for each in again.records] == [True, True]
        assert again.settle(()) == []
        assert Counter(name for name, *_ in machine.layout()) == counts
        if done:
            return
    raise AssertionError("the change has more steps than this test tries")


def test_instance_that_a_program_without_a_lease_uses_stays(machine: Machine) -> None:
    """What comes after it waits, and is done when the program has ended."""
    keeper = machine.keeper()
    used = keeper.create(machine.card, machine.place("3g.20gb", 4), kept=True)
    client = Client(machine.node.library_dir, CUDA_VISIBLE_DEVICES=used.uuid).enter()
    progress = advance(keeper, machine, SEVEN)
    reason = "a program that has not ended uses 0/4 3g.20gb"
    assert progress == Progress(
        [], [f"destroy 0/4 3g.20gb: {reason}", f"create 0/0 7g.40gb: {reason}"], in_use=True
    )
    client.kill()
    assert advance(keeper, machine, SEVEN).waiting == []
    assert machine.layout() == [("7g.40gb", 0, 1)]
