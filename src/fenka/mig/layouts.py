"""Divides cards as fixed layouts say, one instance after the other: what is in use stays until it has ended.

`plan_card` has the steps that are possible now, and what the others wait for. `LayoutFollower` says when they
are tried. The workstation's daemon and the node program connect both to the driver of changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fenka.core.errors import listed
from fenka.core.inventory import Card
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.mig.layout_changes import plan_layout
from fenka.core.mig.layouts import Layout
from fenka.formats.mig_parted import CardTarget
from fenka.hardware import nvml_mig
from fenka.hardware.nvml_mig import InstanceInUse, MigError, ResetRequired
from fenka.mig.keeper import GpuInstanceRecord, InstanceKeeper
from fenka.mig.manager import InstanceManager, InstanceStatus
from fenka.procfs import process_name

MAX_NAMED = 3
"""Processes that a reason names at most."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a card. place: the instance that is destroyed or created."""

    action: Literal["destroy", "disable", "enable", "create"]
    card: Card
    place: Place | None = None

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.action} MIG on card {self.card.index}"
        return f"{self.action} {self.place.name(self.card.index)}"


@dataclass(frozen=True, slots=True)
class CardPlan:
    """How a card comes nearer to its target.

    Attributes:
        card: the card.
        layout: the instances that it has in the end; None while it cannot be switched to MIG.
        steps: the steps that are possible now, in order.
        waiting: the others, each as a sentence that names what must end.
    """

    card: Card
    layout: Layout | None = None
    steps: tuple[Step, ...] = ()
    waiting: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the card has reached its target."""
        return not self.steps and not self.waiting


@dataclass(frozen=True, slots=True)
class Progress:
    """The steps that were made, and those that wait for something to end, in sentences.

    in_use: whether a step failed because a program without a lease uses the instance or the card.
    """

    done: list[str]
    waiting: list[str]
    in_use: bool = False


def plan_card(
    card: Card,
    geometry: Geometry | None,
    present: Mapping[Place, Sequence[str] | None],
    holders: Sequence[str],
    target: CardTarget,
) -> CardPlan:
    """Return the fewest changes to what a card is to be.

    Args:
        card: the card, marked if it is in MIG mode.
        geometry: what it can be divided into; None without MIG.
        present: its instances, each with the names of what holds it; None for an administrator's.
        holders: names of what holds slices of the card itself.
        target: what it is to be.

    Raises:
        ImpossibleLayout: The card cannot have these instances.
        MigError: It has no MIG.
    """
    if geometry is None:
        if target.enabled:
            raise MigError(f"card {card.index} ({card.model}) has no MIG")
        return CardPlan(card)
    idle = [place for place, names in present.items() if names is not None and not names]
    used = [place for place in present if place not in idle]
    change = plan_layout(geometry, target.counts, idle, used)
    steps = [Step("destroy", card, place) for place in change.destroy]
    waiting = list[str]()
    if target.enabled != card.divided:
        switch = Step("enable" if target.enabled else "disable", card)
        if holders:
            waiting.append(f"{switch}: {', '.join(holders)} must end")
            return CardPlan(card, None, tuple(steps), tuple(waiting))
        if change.leaving:
            waiting.append(f"{switch}: its instances are in use")
        else:
            steps.append(switch)
    steps += [Step("create", card, place) for place in change.create]
    for place, ways in change.blocked.items():
        in_the_way = ", ".join(_holder(card, way, present[way]) for way in ways)
        waiting.append(f"create {place.name(card.index)}: {in_the_way}")
    waiting += [f"destroy {_holder(card, place, present[place])}" for place in change.leaving]
    return CardPlan(card, change.layout, tuple(steps), tuple(waiting))


def present_instances(
    statuses: Iterable[InstanceStatus], names: Callable[[InstanceStatus], Sequence[str]]
) -> dict[Place, Sequence[str] | None]:
    """Return what `plan_card` takes as present. names: returns what holds an instance of fenka's."""
    present = dict[Place, Sequence[str] | None]()
    for status in statuses:
        holders = None if status.state == "foreign" else names(status)
        if status.gpu is not None or holders or holders is None:
            present[status.place] = holders
    return present


@dataclass(frozen=True, slots=True)
class Attempt:
    """How the last change of a card ended.

    Attributes:
        retry_at: when the next one may begin, in seconds of the follower's clock.
        waiting: the steps that waited for something to end, in sentences.
        failure: why the driver refused a step; empty if it did not.
    """

    retry_at: float
    waiting: Sequence[str] = ()
    failure: str = ""


@dataclass(eq=False)
class LayoutFollower:
    """Says which cards may be changed now. The program makes the changes, and reports how they ended.

    Attributes:
        clock: Returns seconds.
        in_use_retry_s: Pause after a program without a lease kept a step from being made.
        failure_retry_s: Pause after the driver refused a step.
        targets: The cards' targets by UUID.
        attempts: The last changes by the cards' UUIDs.
    """

    clock: Callable[[], float]
    in_use_retry_s: float
    failure_retry_s: float
    targets: Mapping[str, CardTarget] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)

    def follow(self, targets: Mapping[str, CardTarget]) -> None:
        """Replace all targets. A card with another target than before may be changed at once."""
        for uuid in self.attempts.keys() & (self.targets.keys() | targets.keys()):
            if self.targets.get(uuid) != targets.get(uuid):
                del self.attempts[uuid]
        self.targets = targets

    def is_due(self, uuid: str) -> bool:
        """Return whether a card may be changed now."""
        attempt = self.attempts.get(uuid)
        return attempt is None or attempt.retry_at <= self.clock()

    def on_progress(self, uuid: str, progress: Progress) -> None:
        """Note that a card was changed."""
        pause_s = self.in_use_retry_s if progress.in_use else 0.0
        self.attempts[uuid] = Attempt(self.clock() + pause_s, progress.waiting)

    def on_failure(self, uuid: str, reason: str) -> None:
        """Note that the driver refused a step."""
        self.attempts[uuid] = Attempt(self.clock() + self.failure_retry_s, (), reason)

    def waiting(self, plan: CardPlan) -> list[str]:
        """Return what a card waits for, in sentences."""
        attempt = self.attempts.get(plan.card.uuid)
        tried = attempt.waiting if attempt and plan.steps else ()
        return list(dict.fromkeys([*tried, *plan.waiting]))


def carry_out(manager: InstanceManager, plan: CardPlan) -> Progress:
    """Make the changes that are possible now. An instance that is in use after all stays, and later steps
    wait.

    Raises:
        MigError: The driver refuses a step; the rest is not done.
        DriverLost, OSError: The same.
    """
    keeper, done, waiting, in_use = manager.keeper, list[str](), list(plan.waiting), False
    for number, step in enumerate(plan.steps):
        try:
            _make(keeper, step)
        except (InstanceInUse, ResetRequired) as why:
            reason = str(why) if isinstance(why, ResetRequired) else _user(manager, step)
            waiting[:0] = [f"{step}: {reason}" for step in plan.steps[number:]]
            in_use = True
            break
        done.append(str(step))
    for record, kept in marks(keeper, plan):
        keeper.keep(record, kept=kept)
    return Progress(done, waiting, in_use)


def marks(keeper: InstanceKeeper, plan: CardPlan) -> list[tuple[GpuInstanceRecord, bool]]:
    """Return which records must change: the layout's instances stay, the others go with their programs."""
    return [
        (record, kept)
        for record in keeper.records
        if plan.layout is not None and record.card == plan.card.uuid
        for kept in [any(_is_at(record, place) for place in plan.layout)]
        if kept != record.kept
    ]


def _make(keeper: InstanceKeeper, step: Step) -> None:
    card = step.card.uuid
    match step:
        case Step("create", place=Place() as place):
            keeper.create(card, place, kept=True)
        case Step("destroy", place=Place() as place):
            for record in keeper.records:
                if record.card == card and _is_at(record, place):
                    keeper.destroy(record)
        case Step(action):
            try:
                nvml_mig.set_mig_mode(card, enabled=action == "enable")
            except ResetRequired:
                raise
            except MigError:
                # Else the driver would switch by itself, also when the target is another one by then.
                nvml_mig.set_mig_mode(card, enabled=action != "enable")
                raise


def _is_at(record: GpuInstanceRecord, place: Place) -> bool:
    return (record.profile, record.start) == (place.profile.name, place.start)


def _user(manager: InstanceManager, step: Step) -> str:
    if step.place is not None:
        return f"a program that has not ended uses {step.place.name(step.card.index)}"
    named = [
        f"process {pid} ({process_name(pid)})" for pid in sorted(manager.users(step.card.uuid))
    ]
    users = listed(named, MAX_NAMED) or "programs"
    return f"{users} {'has' if len(named) == 1 else 'have'} card {step.card.index} open"


def _holder(card: Card, place: Place, names: Sequence[str] | None) -> str:
    if names is None:
        return f"{place.name(card.index)} is an administrator's, destroy it with nvidia-smi mig"
    return f"{place.name(card.index)} is held by {', '.join(names)}"
