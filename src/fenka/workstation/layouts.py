"""Lists the instances of a daemon's cards, and divides cards as an administrator or the option `--mig` says.

A layout's step on an instance in use is done when its programs have ended. Until then the layout is recorded,
and nothing is granted that would delay it.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from fenka.core.errors import FenkaError
from fenka.core.inventory import Card
from fenka.core.mig.geometry import Geometry
from fenka.core.mig.layouts import free_counts
from fenka.formats.mig_parted import CardTarget
from fenka.hardware import nvml_mig
from fenka.hardware.nvml_mig import CardLost, InstanceInUse, MigError
from fenka.mig.instance_driver import InstanceDriver, sentence
from fenka.mig.layouts import CardPlan, LayoutFollower, Progress, plan_card, present_instances
from fenka.mig.manager import InstanceManager, InstanceStatus, is_enabled
from fenka.views.mig_rows import InstanceView, MigCardView
from fenka.workstation import files, protocol
from fenka.workstation.broker import Broker
from fenka.workstation.controller import Controller
from fenka.workstation.lifetime import log

RETRY_S = 1.0
"""After a step failed, or what it needs is used by a program without a lease."""


@dataclass(eq=False)
class Layouts:
    """The layouts of one daemon's cards."""

    controller: Controller
    broker: Broker
    manager: InstanceManager
    _follower: LayoutFollower = field(
        default_factory=lambda: LayoutFollower(time.monotonic, RETRY_S, RETRY_S)
    )
    """Its targets are the layouts that wait for something to end."""
    _logged: str = ""
    """The last failure, to be logged once."""

    def load(self) -> None:
        """Take over the layouts that wait since an earlier daemon. Raises InvalidState."""
        known = {card.uuid for card in self._physical()}
        recorded = files.load_layouts(self.controller.runtime)
        for uuid in recorded.keys() - known:
            log(f"the layout of card {uuid[:60]} waits until the daemon leases that card again")
        self._set(recorded)
        self.controller.changes.settled = self._complete_later

    def describe(self) -> protocol.InstancesListed:
        """Return all cards with their instances. Raises NoDriver."""
        self.controller.observe_cards()
        return protocol.InstancesListed(self.cards())

    def cards(self) -> list[MigCardView]:
        """Return all cards with their instances, as they were observed last. Raises NoDriver."""
        return [self._card(card) for card in self._physical()]

    async def apply(self, request: protocol.ApplyLayout) -> protocol.LayoutApplied:
        """Divide cards as far as nobody uses them, and do the rest later.

        Nothing is changed if any card cannot be what the request says.

        Raises:
            ImpossibleLayout: A card cannot have these instances.
            MigError: A card is not there or has no MIG, or the driver refuses a step after others.
            NoDriver, OSError: The rest is not done.
        """
        await self._driver.finish()
        self.controller.observe_cards()
        return await self._driver.run(self._apply(request))

    def cancel(self) -> protocol.LayoutApplied:
        """Give up the layouts that wait, and return what waited. Raises NoDriver, OSError."""
        given_up = [reason for card in self._physical() for reason in self._waiting(card)]
        self._record({})
        self.controller.observe_cards()
        return protocol.LayoutApplied([], given_up)

    # --- changes ------------------------------------------------------------------------------------

    async def _apply(self, request: protocol.ApplyLayout) -> protocol.LayoutApplied:
        plans = [self._plan(uuid, target) for uuid, target in request.cards.items()]
        if request.dry_run:
            return _answer(
                Progress([str(step) for step in plan.steps], [*plan.waiting]) for plan in plans
            )
        # A daemon that is killed from here on leaves the rest to the next one.
        self._record({**self._follower.targets, **request.cards})
        try:
            return _answer(await self._carry_out(request.cards))
        except (FenkaError, OSError):
            self._forget(request.cards)
            raise

    async def _carry_out(self, targets: Mapping[str, CardTarget]) -> list[Progress]:
        """Make the changes that are possible, and forget the layouts that are complete then."""
        # Nothing is granted on these cards meanwhile.
        self.controller.cards.dividing = set(targets)
        try:
            self.controller.observe_cards()
            progress = {
                uuid: await self._driver.carry_out(partial(self._plan, uuid, target))
                for uuid, target in targets.items()
            }
            for uuid, made in progress.items():
                self._follower.on_progress(uuid, made)
            self._forget([uuid for uuid, made in progress.items() if not made.waiting])
        finally:
            self._observe()
        return [*progress.values()]

    def _observe(self) -> None:
        """Have the broker know the new instances before it grants anything on these cards again."""
        try:
            self.controller.observe_cards()
            self.controller.changes.publish()
        finally:
            self.controller.cards.dividing = set()
        self.controller.observe_cards()

    def _complete_later(self) -> None:
        """Go on with the layouts that wait, as far as what they need is not in use any more."""
        known = {card.uuid for card in self._physical()}
        for uuid in filter(self._follower.is_due, self._follower.targets.keys() & known):
            try:
                plan = self._plan(uuid, self._follower.targets[uuid])
            except FenkaError as why:
                self._on_failure(uuid, str(why))
                continue
            if plan.steps or plan.complete:
                self.controller.spawn(self._driver.run(self._complete(uuid)))

    async def _complete(self, uuid: str) -> None:
        try:
            if target := self._follower.targets.get(uuid):  # It may have been given up.
                (made,) = await self._carry_out({uuid: target})
                for step in made.done:
                    log(f"layout: {step}")
                self._retry_later()
        except (FenkaError, OSError) as why:
            self._on_failure(uuid, sentence(why))

    def _on_failure(self, uuid: str, reason: str) -> None:
        self._follower.on_failure(uuid, reason)
        if reason != self._logged:
            log(f"layout: {reason}; trying again")
            self._logged = reason
        self._retry_later()

    def _retry_later(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_S, self.controller.changes.settle_later)

    def _plan(self, uuid: str, target: CardTarget) -> CardPlan:
        """Return what to change. Raises ImpossibleLayout, MigError, NoDriver."""
        card = next((card for card in self._physical() if card.uuid == uuid), None)
        if card is None:
            raise MigError(f"the daemon leases no card {uuid[:60]}")
        geometry = self._geometry(card)
        existing = self._existing(card) if geometry and card.divided else ()
        present = present_instances(existing, lambda status: self._jobs(status.uuid))
        return plan_card(card, geometry, present, self._jobs(card.uuid), target)

    # --- what waits ---------------------------------------------------------------------------------

    def record(self) -> None:
        """Record again the layouts that wait. Raises OSError."""
        self._record(self._follower.targets)

    def _record(self, targets: Mapping[str, CardTarget]) -> None:
        files.save_layouts(self.controller.runtime, targets)
        self._set(targets)

    def _set(self, targets: Mapping[str, CardTarget]) -> None:
        self._follower.follow(targets)
        self.controller.cards.waiting = set(targets)

    def _forget(self, cards: Iterable[str]) -> None:
        """Forget the layouts of cards that are complete, or whose failure has been reported."""
        targets = self._follower.targets
        left = {uuid: target for uuid, target in targets.items() if uuid not in set(cards)}
        try:
            self._record(left)
        except OSError as why:  # The next daemon would find it complete, or try it once more.
            log(f"layout: {sentence(why)}")
            self._set(left)

    def _waiting(self, card: Card) -> list[str]:
        """Return what the layout of a card waits for. Raises NoDriver."""
        target = self._follower.targets.get(card.uuid)
        if target is None:
            return []
        try:
            return self._follower.waiting(self._plan(card.uuid, target))
        except MigError as why:
            return [str(why)]

    def _physical(self) -> list[Card]:
        return [card for card in self.broker.node.cards if card.parent is None]

    @property
    def _driver(self) -> InstanceDriver:
        return self.controller.changes.driver

    def _geometry(self, card: Card) -> Geometry | None:
        return self.manager.keeper.geometries.get(card.uuid)

    # --- listing ------------------------------------------------------------------------------------

    def _card(self, card: Card) -> MigCardView:
        geometry = self._geometry(card)
        view = MigCardView(
            card.index,
            card.uuid,
            card.model,
            self.manager.pci_ids.get(card.uuid, ""),
            enabled=card.divided,
            profiles=list(geometry.by_name) if geometry else [],
            waiting=self._waiting(card),
        )
        if geometry is None or not card.divided:
            return view
        try:
            instances = self._existing(card)
        except CardLost:
            return view
        view.instances.extend(self._view(instance, geometry) for instance in instances)
        view.free.update(free_counts(geometry, frozenset(instance.place for instance in instances)))
        return view

    def _existing(self, card: Card) -> list[InstanceStatus]:
        """Return the instances that exist on a card, by start. Raises CardLost, NoDriver."""
        statuses = self.manager.statuses(card.uuid, ()) if is_enabled(card.uuid) else ()
        return sorted(
            (status for status in statuses if status.gpu), key=lambda status: status.place.start
        )

    def _view(self, status: InstanceStatus, geometry: Geometry) -> InstanceView:
        profile, record = status.place.profile, status.record
        return InstanceView(
            *(status.place.start, profile.name, profile.memory_mib),
            compute=geometry.compute_percent(profile),
            owner="fenka" if record else "administrator",
            uuid=status.uuid,
            gpu_instance=status.gpu.id if status.gpu else None,
            kept=bool(record and record.kept),
            jobs=self._jobs(status.uuid) if record else [],
        )

    def _jobs(self, uuid: str) -> list[str]:
        return [
            job.name
            for job in self.broker.placed()
            if any(piece.uuid == uuid for piece in job.slices)
        ]


def _answer(progress: Iterable[Progress]) -> protocol.LayoutApplied:
    answer = protocol.LayoutApplied([])
    for made in progress:
        answer.done.extend(made.done)
        answer.waiting.extend(made.waiting)
    return answer


OFF, ALL = "off", "all"
"""Values of the daemon's option `--mig` beside cards."""


def switch(cards: Iterable[Card], wanted: Collection[str], capable: Mapping[str, Geometry]) -> None:
    """Enable MIG on the cards that the administrator names, by index or UUID, or on all that have it.

    A card that is in use stays whole, and is reported in the log. Raises MigError for a card without MIG.
    """
    for card in cards:
        named = not {str(card.index), card.uuid}.isdisjoint(wanted)
        if not named and not (ALL in wanted and card.uuid in capable):
            continue
        if card.uuid not in capable:
            raise MigError(f"card {card.index} ({card.model}) has no MIG: leave it out of --mig")
        if is_enabled(card.uuid):
            continue
        try:
            nvml_mig.set_mig_mode(card.uuid, enabled=True)
        except InstanceInUse:
            log(
                f"card {card.index} stays whole: programs have it open; MIG is pending until they have ended"
            )
