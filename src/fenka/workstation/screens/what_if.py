"""Finds what would let pending requests start, by serving the queue on a copy of the ledger.

Nothing is reserved.

The same sentences are printed by `fenka why` and shown by the dashboard.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fenka.core.backfill import Steps
from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.inventory import Card, DeviceId
from fenka.core.request import Memory
from fenka.hardware.card_spec import BadSpec, model_called
from fenka.views.board import WhatIf, WhatIfAnswer
from fenka.views.board_sums import MAX_ADDED, what_if_sentence
from fenka.workstation.broker import Broker

MAX_PENDING = 20
"""Requests, the first of the queue, for which helps are looked for."""

MAX_ENDED = 64
"""Programs whose end is tried."""

MAX_DETAILED = 4
"""Requests for which smaller sizes and ends of several programs are tried, too."""

MAX_TOGETHER = 4
"""Programs that a sentence names to be ended together."""

MAX_CARDS = 8
"""Cards whose programs are tried to be ended together."""

PAUSE_FACTOR = 4.0
"""Between two rehearsals there is a pause of this many times as long as one takes."""

ATTEMPTS = 3
"""At an answer about one request while the queue changes."""

MAX_NAMED = 3


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
    """Changes that help pending requests, and requests that the end of programs starts, by queue id."""

    helps: Mapping[str, Helps] = field(default_factory=dict)
    starts: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Rehearsals:
    """Answers for one broker. A rehearsal takes milliseconds, and many are made with pauses between them."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._outlook, self._made_at = Outlook(), -1
        self._looking = False

    @property
    def outlook(self) -> Outlook:
        """Return what would help; nothing before `look` has found it for the present state."""
        return self._outlook if self._made_at == self.broker.changes else Outlook()

    async def look(self) -> bool:
        """Find what would help, in a part of this program's time. Return whether there is something new.

        It is given up when the queue is served again meanwhile.
        """
        changes = self.broker.changes
        if self._looking or self._made_at == changes:
            return False
        self._looking = True
        try:
            steps, begun = look_ahead(self.broker, time.time()), time.perf_counter()
            while self.broker.changes == changes:
                try:
                    next(steps)
                except StopIteration as end:
                    self._outlook, self._made_at = end.value, changes
                    return True
                await asyncio.sleep(PAUSE_FACTOR * (time.perf_counter() - begun))
                begun = time.perf_counter()
            return False
        finally:
            self._looking = False

    async def helps(self, queue_id: str) -> list[str]:
        """Return what would let one pending request start, in sentences; none if it does not wait.

        A request that no single change starts gets one sentence, which says so.
        """
        for _ in range(ATTEMPTS):
            changes = self.broker.changes
            if queue_id not in {status.id for status in self.broker.pending}:
                return []
            steps = look_ahead(self.broker, time.time(), [queue_id])
            while self.broker.changes == changes:
                try:
                    next(steps)
                except StopIteration as end:
                    found: Outlook = end.value
                    return self.sentences(found.helps[queue_id]) or [self._nothing_alone(queue_id)]
                await asyncio.sleep(0)
        return []

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

    def _nothing_alone(self, queue_id: str) -> str:
        """Return the sentence for a pending request that no single change starts."""
        order = [status.id for status in self.broker.pending]
        before = order.index(queue_id)
        if not before:
            return "nothing alone: it starts when several programs have ended"
        first = self._name(order[0])
        waiting = f"{before} requests wait" if before > 1 else "one request waits"
        return (
            f"nothing alone: {waiting} before it, and `fenka why {first}` says what helps the first"
        )

    def _name(self, queue_id: str) -> str:
        return self.broker.jobs_of(queue_id)[0].display_name

    def answer(self, question: WhatIf, now: float) -> WhatIfAnswer:
        """Answer a question about all that waits. Raises InvalidQuestion."""
        ended = dict.fromkeys(self._queue_id(id_) for id_ in question.end)
        result = self.broker.rehearse(ended, self._cards(question.add), now)
        starts = [self._name(queue_id) for queue_id, _ in result.placed]
        waits = [(self._name(status.id), status.reason) for status in result.pending]
        return WhatIfAnswer(starts, waits, what_if_sentence(starts, waits))

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


def look_ahead(broker: Broker, now: float, wanted: Collection[str] | None = None) -> Steps[Outlook]:
    """Find what would help, with a step for each rehearsal. The broker must not change in between.

    Args:
        broker: The jobs.
        now: Unix seconds.
        wanted: Queue ids of the requests; None for the first of the queue.
    """
    order = [status.id for status in broker.pending]
    pending = order[:MAX_PENDING] if wanted is None else [id_ for id_ in order if id_ in wanted]
    if not pending:
        return Outlook()
    served = order.index(pending[-1]) + 1  # Requests behind change nothing.
    held: Counter[str] = Counter()
    for job in broker.placed():
        held[job.queue_id] += sum(piece.memory_mib for piece in job.slices)
    starts: dict[str, list[str]] = {}
    for queue_id in list(held)[:MAX_ENDED]:
        yield
        started = _started(broker, [queue_id], now, served)
        starts[queue_id] = [id_ for id_ in started if id_ in pending]
    by_model: dict[str, list[str]] = {}
    for model, card in {card.model: card for card in broker.node.cards if not card.parent}.items():
        yield
        by_model[model] = _started(broker, (), now, served, [_another(card, 0)])
    helps: dict[str, Helps] = {}
    for id_ in pending:
        helps[id_] = Helps(
            [queue_id for queue_id, started in starts.items() if id_ in started],
            models=[model for model, started in by_model.items() if id_ in started],
        )
    for id_ in pending[:MAX_DETAILED]:
        units = yield from _units(broker, id_, now)
        sets = () if helps[id_].ends else (yield from _together(broker, id_, held, now))
        helps[id_] = replace(helps[id_], units=units, together=sets)
    return Outlook(helps, {queue_id: started for queue_id, started in starts.items() if started})


def _started(
    broker: Broker, ended: Collection[str], now: float, most: int, added: Sequence[Card] = ()
) -> list[str]:
    result = broker.rehearse(ended, added, now, most)
    return [queue_id for queue_id, _ in result.placed]


def _together(broker: Broker, id_: str, held: Counter[str], now: float) -> Steps[Sequence[str]]:
    """Return the fewest programs of one card, the largest first, whose end starts a request; else none."""
    served = [status.id for status in broker.pending].index(id_) + 1
    on_card: dict[str, list[str]] = {}
    for queue_id, _ in held.most_common():
        for uuid in {piece.uuid for job in broker.jobs_of(queue_id) for piece in job.slices}:
            on_card.setdefault(uuid, []).append(queue_id)
    for count in range(2, MAX_TOGETHER + 1):
        for programs in list(on_card.values())[:MAX_CARDS]:
            if len(programs) >= count:
                yield
                if id_ in _started(broker, programs[:count], now, served):
                    return programs[:count]
    return ()


def _units(broker: Broker, id_: str, now: float) -> Steps[int]:
    """Return the largest number of units with which a request of units would start at once."""
    requests = broker.requests_of(id_)
    memory = requests[0].memory
    if len(set(requests)) != 1 or type(memory) is not Memory or memory.unit_mib == 1:
        return 0
    served = [status.id for status in broker.pending].index(id_) + 1
    fitting, too_many = 0, memory.amount
    while too_many - fitting > 1:
        yield
        units = (fitting + too_many) // 2
        less = tuple(replace(request, memory=replace(memory, amount=units)) for request in requests)
        result = broker.rehearse((), (), now, served, {id_: less})
        if any(queue_id == id_ for queue_id, _ in result.placed):
            fitting = units
        else:
            too_many = units
    return fitting


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
