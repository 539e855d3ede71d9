"""Finds what would let pending requests start, by serving the queue on a copy of the ledger.

Nothing is reserved.

The same sentences are printed by `fenka why` and shown by the dashboard.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Memory
from fenka.hardware.card_spec import BadSpec, model_called
from fenka.views.board import WhatIf, WhatIfAnswer
from fenka.workstation.broker import Broker

MAX_PENDING = 20
"""Requests, the first of the queue, for which helps are looked for."""

MAX_ENDED = 64
"""Programs whose end is tried."""

MAX_TOGETHER = 4
"""Programs that a sentence names to be ended together."""

MAX_NAMED = 3

MAX_ADDED = 64
"""Cards that a question may add."""


class InvalidQuestion(FenkaError):
    """The question names something that does not exist."""

    exit_code = INVALID_INPUT


@dataclass(frozen=True, slots=True)
class Helps:
    """The changes of which each alone would let a pending request start.

    Attributes:
        ends: Queue ids of which the end of each helps.
        together: Queue ids that help if all of them end; empty if `ends` has any.
        units: The largest size that would start at once; 0 for none, and for requests without units.
        models: Models of which one more card helps.
    """

    ends: Sequence[str] = ()
    together: Sequence[str] = ()
    units: int = 0
    models: Sequence[str] = ()


NO_HELPS = Helps()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What helps pending requests, and what the end of running programs starts. Both by queue id."""

    helps: Mapping[str, Helps] = field(default_factory=dict)
    starts: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Rehearsals:
    """Answers for one broker. The outlook is kept until the queue is served again."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._outlook, self._made_at = Outlook(), -1

    def outlook(self, now: float) -> Outlook:
        """Return what would help. now: Unix seconds."""
        if self._made_at != self.broker.changes:
            self._made_at = self.broker.changes
            self._outlook = self._look(now)
        return self._outlook

    def _look(self, now: float) -> Outlook:
        broker = self.broker
        pending = [status.id for status in broker.pending[:MAX_PENDING]]
        if not pending:
            return Outlook()
        running = list(dict.fromkeys(job.queue_id for job in broker.placed()))[:MAX_ENDED]
        starts = {
            queue_id: [id_ for id_ in self._started([queue_id], now) if id_ in pending]
            for queue_id in running
        }
        models = {card.model: card for card in broker.node.cards if card.parent is None}
        by_model = {
            model: self._started((), now, [_another(card, 0)]) for model, card in models.items()
        }
        helps = {}
        for id_ in pending:
            ends = [queue_id for queue_id, started in starts.items() if id_ in started]
            helps[id_] = Helps(
                ends,
                () if ends else self._together(id_, running, now),
                self._units(id_, now),
                [model for model, started in by_model.items() if id_ in started],
            )
        return Outlook(helps, {id_: started for id_, started in starts.items() if started})

    def _started(self, ended: Collection[str], now: float, added: Sequence[Card] = ()) -> list[str]:
        result = self.broker.rehearse(ended, added, now, MAX_PENDING)
        return [queue_id for queue_id, _ in result.placed]

    def _together(self, id_: str, running: Sequence[str], now: float) -> Sequence[str]:
        """Return a smallest set of programs whose end starts a request, though not the smallest of all."""
        if id_ not in self._started(running, now):
            return ()
        needed = list(running)
        # The latest are tried to be left running first: what ran longest is nearest to its end.
        for queue_id in reversed(running):
            fewer = [other for other in needed if other != queue_id]
            if id_ in self._started(fewer, now):
                needed = fewer
        return needed if len(needed) <= MAX_TOGETHER else ()

    def _units(self, id_: str, now: float) -> int:
        """Return the largest number of units with which a request of units would start at once."""
        requests = self.broker.requests_of(id_)
        memory = requests[0].memory
        if len(set(requests)) != 1 or type(memory) is not Memory or memory.unit_mib == 1:
            return 0
        most, fitting, too_many = [status.id for status in self.broker.pending], 0, memory.amount
        while too_many - fitting > 1:
            units = (fitting + too_many) // 2
            smaller = tuple(
                replace(request, memory=replace(memory, amount=units)) for request in requests
            )
            # Requests behind it change nothing.
            served = most.index(id_) + 1
            result = self.broker.rehearse((), (), now, served, {id_: smaller})
            if any(queue_id == id_ for queue_id, _ in result.placed):
                fitting = units
            else:
                too_many = units
        return fitting

    def sentences(self, helps: Helps) -> list[str]:
        """Return what helps, in sentences without a full stop."""
        names = [self._name(queue_id) for queue_id in helps.ends]
        together = [self._name(queue_id) for queue_id in helps.together]
        found = []
        if names:
            found.append(f"the end of {_either(names)}")
        if together:
            found.append(f"the end of {' and '.join(together)}")
        if helps.units:
            found.append(f"asking for at most {helps.units} unit{'s' if helps.units > 1 else ''}")
        found += [f"one more {model}" for model in helps.models]
        return found

    def _name(self, queue_id: str) -> str:
        return self.broker.jobs_of(queue_id)[0].display_name

    def answer(self, question: WhatIf, now: float) -> WhatIfAnswer:
        """Answer a question about all that waits. Raises InvalidQuestion."""
        ended = {self._queue_id(id_) for id_ in question.end}
        result = self.broker.rehearse(ended, self._cards(question.add), now)
        starts = [self._name(queue_id) for queue_id, _ in result.placed]
        waits = [(self._name(status.id), status.reason) for status in result.pending]
        return WhatIfAnswer(starts, waits, _sentence(starts, waits))

    def _queue_id(self, id_: str) -> str:
        jobs = self.broker.jobs_of(id_)
        if not jobs:
            raise InvalidQuestion(f"no program has the id {id_[:80]}: it has ended")
        return jobs[0].queue_id

    def _cards(self, wanted: Mapping[str, int]) -> list[Card]:
        """Return cards to add by their models. Raises InvalidQuestion."""
        if not all(0 <= count <= MAX_ADDED for count in wanted.values()) or (
            sum(wanted.values()) > MAX_ADDED
        ):
            raise InvalidQuestion(f"a question adds 0 to {MAX_ADDED} cards")
        here = {card.model: card for card in self.broker.node.cards if card.parent is None}
        added = list[Card]()
        for model, count in wanted.items():
            example = here.get(model) or _example(model, here)
            added += [_another(example, len(added) + number) for number in range(count)]
        return added


def _example(model: str, here: Iterable[str]) -> Card:
    """Return a card of a model that this machine does not have. Raises InvalidQuestion."""
    try:
        known = model_called(model)
    except BadSpec as why:
        raise InvalidQuestion(f"{why}; here are {', '.join(here)}") from None
    return Card(0, DeviceId(""), known.name, known.memory_mib)


def _another(card: Card, number: int) -> Card:
    """Return a further card of this model, empty and healthy. number: of the further cards."""
    return Card(
        index=1_000 + number,
        uuid=DeviceId(f"what-if-{number}"),
        model=card.model,
        memory_mib=card.memory_mib,
    )


def _either(names: Sequence[str]) -> str:
    """Return `a, b or c`, or the first of many and how many others there are."""
    shown = list(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        more = len(names) - MAX_NAMED
        shown.append(f"{more} other{'s' if more > 1 else ''}")
    *first, last = shown
    return f"{', '.join(first)} or {last}" if first else last


def _sentence(starts: Sequence[str], waits: Sequence[tuple[str, str]]) -> str:
    """Return `2 of 3 start: a, b. c: 0/3 GPUs fit: …`."""
    total = len(starts) + len(waits)
    if not total:
        return "nothing waits"
    first = f"{len(starts)} of {total} start{'s' if len(starts) == 1 else ''}"
    first += f": {', '.join(starts)}" if starts else ""
    return ". ".join([first, *(f"{name}: {reason}" for name, reason in waits)])
