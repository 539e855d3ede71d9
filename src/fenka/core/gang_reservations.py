"""The reservations of gangs.

A reservation covers all members of a gang or none. It holds all its cards from the start, so two gangs never
each hold a part of what the other needs. If a member is still missing when it expires, all of it ends, and
the caller evicts the members that have started: a gang restarts as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fenka.core.evaluate import Policy
from fenka.core.gangs import NO_LIMITS, Limits, Placer, place_all
from fenka.core.reasons import Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import UsageOverlay, UsageView


@dataclass(frozen=True, slots=True)
class GangReservation:
    """The placements of a gang's members. expires_at: when all must have started, in the caller's time."""

    placements: Mapping[str, Placement]
    """By member."""
    expires_at: float
    started: frozenset[str] = field(default_factory=frozenset)

    @property
    def outstanding(self) -> tuple[Placement, ...]:
        """Return the placements of members that have not started."""
        return tuple(it for name, it in self.placements.items() if name not in self.started)


class GangReservations:
    """The reservations of gangs whose members have not all started.

    Attributes:
        usage: the view that it is given, with the members added that have not started. Members that have
            started are in the view itself.
    """

    def __init__(self, under: UsageView) -> None:
        self.usage = UsageOverlay(under)
        self._reservations: dict[str, GangReservation] = {}

    def get(self, gang: str) -> GangReservation | None:
        """Return the gang's reservation, if it has one."""
        return self._reservations.get(gang)

    def outstanding(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of members that have not started, by gang."""
        return {gang: each.outstanding for gang, each in self._reservations.items()}

    def reserve(  # noqa: PLR0913
        self,
        gang: str,
        members: Mapping[str, Request],
        policy: Policy,
        placer: Placer,
        expires_at: float,
        limits: Limits = NO_LIMITS,
        *,
        fixed: Mapping[str, Placement] | None = None,
    ) -> GangReservation | Unschedulable:
        """Return the gang's reservation, made now if it has none; or why there can be none.

        Args:
            gang: its key.
            members: their requests.
            policy: a name in SCORES.
            placer: the nodes, with `usage`.
            expires_at: when all members must have started, in the caller's time.
            limits: what no member may use.
            fixed: placements of members that are not to be placed elsewhere. They are possible together.
        """
        if gang in self._reservations:
            return self._reservations[gang]
        fixed = fixed or {}
        rest = {name: request for name, request in members.items() if name not in fixed}
        for placement in fixed.values():
            placer.add(placement)
        placed = place_all(placer, list(rest.values()), policy, limits)
        for placement in fixed.values():
            placer.remove(placement)
        if isinstance(placed, Unschedulable):
            return placed
        placements = {**fixed, **dict(zip(rest, placed, strict=True))}
        reservation = GangReservation(placements, expires_at)
        for placement in placements.values():
            self.usage.add(placement)
        self._reservations[gang] = reservation
        return reservation

    def mark_started(self, gang: str, member: str) -> None:
        """Record that a member has started and is in the view itself from now on.

        The reservation ends with the last member.

        Raises:
            KeyError: if the gang or the member has no reservation.
        """
        reservation = self._reservations[gang]
        if member in reservation.started:
            return
        self.usage.remove(reservation.placements[member])
        reservation = replace(reservation, started=reservation.started | {member})
        self._reservations[gang] = reservation
        if not reservation.outstanding:
            del self._reservations[gang]

    def release(self, gang: str) -> None:
        """End a reservation, if there is one. Its members that have started must end too."""
        reservation = self._reservations.pop(gang, None)
        for placement in reservation.outstanding if reservation else ():
            self.usage.remove(placement)

    def overdue(self, now: float) -> list[str]:
        """Return the gangs whose reservations have expired."""
        return [
            gang
            for gang, reservation in self._reservations.items()
            if reservation.expires_at <= now
        ]
