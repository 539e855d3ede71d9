"""Who waits, in the order of their requests.

A waiter that does not fit keeps the cards it could ever use for itself, so that a stream of small
requests cannot starve a large one; requests behind it may still use the other cards.
"""

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass

from fenka.core.cards import Node
from fenka.core.evaluate import Policy, usable
from fenka.core.ledger import Ledger, Tally
from fenka.core.reasons import Rejected
from fenka.core.requests import Placement, Request
from fenka.core.verdicts import Verdicts


@dataclass(frozen=True, slots=True, order=True)
class Waiter:
    """A request in the queue; equal times are ordered by id."""

    requested_at: float
    id: str


@dataclass(frozen=True, slots=True)
class Step:
    """What serving the queue once comes to: who is placed, and who is not, both in order."""

    placed: tuple[tuple[str, Placement], ...]
    rejected: tuple[tuple[str, Rejected], ...]

    @property
    def waiting(self) -> tuple[tuple[str, str], ...]:
        """Who waits on, and the sentence that says why."""
        return tuple((waiter_id, why.sentence()) for waiter_id, why in self.rejected)


class WaitingQueue:
    """Requests by time. Serving it changes neither the queue nor the ledger."""

    def __init__(self) -> None:
        self._order: list[Waiter] = []
        self._requests: dict[str, Request] = {}
        self._verdicts: dict[Policy, Verdicts] = {}
        """Nothing but remembered: see there."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, waiter_id: str, request: Request, requested_at: float) -> None:
        """Join the queue. Raises ValueError if the id is in it."""
        if waiter_id in self._requests:
            raise ValueError(f"{waiter_id} waits already")
        self._requests[waiter_id] = request
        insort(self._order, Waiter(requested_at, waiter_id))

    def remove(self, waiter_id: str) -> None:
        """Leave the queue. Raises KeyError if the id is not in it."""
        del self._requests[waiter_id]
        self._order = [waiter for waiter in self._order if waiter.id != waiter_id]

    def position(self, waiter_id: str) -> int:
        """1 is served next. Raises KeyError if the id is not in the queue."""
        for position, waiter in enumerate(self._order, start=1):
            if waiter.id == waiter_id:
                return position
        raise KeyError(waiter_id)

    def serve(self, ledger: Ledger, policy: Policy, nodes: Collection[Node]) -> Step:
        """Place in order what fits now, each on what those before it leave."""
        return self._serve(ledger.tally(), set(), policy, nodes)

    def ask(
        self, request: Request, ledger: Ledger, policy: Policy, nodes: Collection[Node]
    ) -> Placement | Rejected:
        """What a request would get if it joined the queue now, behind all who wait; or why nothing."""
        view, reserved = ledger.tally(), set[str]()
        self._serve(view, reserved, policy, nodes)
        return self._verdicts[policy].place(view, request, reserved)

    def _serve(
        self, view: Tally, reserved: set[str], policy: Policy, nodes: Collection[Node]
    ) -> Step:
        """Leaves in `view` what is held then, and in `reserved` the cards that are waited for."""
        placed: list[tuple[str, Placement]] = []
        rejected: list[tuple[str, Rejected]] = []
        verdicts = self._verdicts.setdefault(policy, Verdicts(nodes, policy))
        verdicts.set_nodes(nodes)
        verdicts.renew(view)
        # Many who wait want the same. They wait for the same cards, and are refused for the same reasons
        # as long as nothing else was placed or reserved since: so much was when the refusal was made.
        waited_for: set[Request] = set()
        refused: dict[Request, tuple[tuple[int, int], Rejected]] = {}
        for waiter in self._order:
            request = self._requests[waiter.id]
            known = refused.get(request)
            if known is not None and known[0] == (len(placed), len(reserved)):
                rejected.append((waiter.id, known[1]))
                continue
            state = len(placed), len(reserved)
            verdict = verdicts.place(view, request, reserved)
            if isinstance(verdict, Placement):
                view.add(verdict)
                verdicts.forget(verdict.node)
                placed.append((waiter.id, verdict))
            else:
                rejected.append((waiter.id, verdict))
                refused[request] = state, verdict
                if request not in waited_for:
                    waited_for.add(request)
                    reserved |= usable(request, nodes)
        return Step(tuple(placed), tuple(rejected))
