"""The order of a resize: killed at any moment, nothing is in force that is not recorded."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fenka.core.inventory import DeviceId
from fenka.core.request import Slice
from fenka.isolation.limit_changes import InUse, ResizePlan, Sizes

CARD = DeviceId("GPU-0")
Pair = tuple[Sizes, Sizes]


class Killed(Exception):
    """The process ends here."""


@st.composite
def sizes(draw: st.DrawFn) -> Pair:
    """Draw the sizes of up to three leases on up to two cards, before and after a resize."""
    before: dict[str, list[Slice]] = {}
    after: dict[str, list[Slice]] = {}
    for lease in "abc"[: draw(st.integers(1, 3))]:
        cards = range(draw(st.integers(1, 2)))
        for drawn in (before, after):
            drawn[lease] = [
                Slice(
                    card, DeviceId(f"GPU-{card}"), draw(st.integers(1, 4)), draw(st.integers(0, 4))
                )
                for card in cards
            ]
    return before, after


class Machine:
    """What is recorded and in force. It rejects the leases in `refused`, and ends after some changes."""

    def __init__(self, before: Sizes, refused: str, changes: int) -> None:
        self.in_force = {lease: [*slices] for lease, slices in before.items()}
        self.recorded = {lease: [*slices] for lease, slices in before.items()}
        self._before, self._refused, self._changes = before, refused, changes

    def resize(self, plan: ResizePlan) -> None:
        """Execute the plan as the daemon and the node program do."""
        if plan.grows:
            self.record(plan.reserved)
        try:
            plan.enforce(self.apply)
        except InUse:
            self.record(plan.before)
        else:
            self.record(plan.after)

    def record(self, recorded: Sizes) -> None:
        """Write the records."""
        self._change()
        self.recorded = {lease: [*slices] for lease, slices in recorded.items()}
        self._check()

    def apply(self, lease: str, slices: Sequence[Slice]) -> None:
        """Put slices in force, unless programs hold too much."""
        self._change()
        shrinks = any(
            new.memory_mib < old.memory_mib
            for old, new in zip(self.in_force[lease], slices, strict=True)
        )
        if lease in self._refused and shrinks and [*slices] != [*self._before[lease]]:
            raise InUse("in use")
        self.in_force[lease] = [*slices]
        self._check()

    def _change(self) -> None:
        if self._changes == 0:
            raise Killed
        self._changes -= 1

    def _check(self) -> None:
        for lease, slices in self.in_force.items():
            for used, recorded in zip(slices, self.recorded[lease], strict=True):
                assert used.memory_mib <= recorded.memory_mib
                assert used.compute <= recorded.compute


@given(sizes(), st.text("abc", max_size=2), st.integers(0, 12))
def test_resize_leaves_nothing_unrecorded_when_killed_anywhere(
    drawn: Pair, refused: str, changes: int
) -> None:
    """The machine checks that after every change."""
    plan = ResizePlan(*drawn)
    machine = Machine(plan.before, refused, changes)
    try:
        machine.resize(plan)
    except Killed:
        return
    assert machine.recorded == machine.in_force
    assert machine.in_force in ({**plan.before}, {**plan.after})


def test_leases_that_shrink_are_changed_first() -> None:
    """Only these can be refused."""
    before = {name: [Slice(0, CARD, 4, 0)] for name in "abc"}
    after = {
        "a": [Slice(0, CARD, 6, 0)],
        "b": [Slice(0, CARD, 4, 0)],
        "c": [Slice(0, CARD, 2, 0)],
    }
    changed: list[str] = []
    ResizePlan(before, after).enforce(lambda lease, _: changed.append(lease))
    assert changed == ["c", "a"]
