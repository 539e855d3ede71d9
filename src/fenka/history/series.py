"""Figures over time, events, and usage: values of a history that travel in messages."""

from typing import Literal

import msgspec

from fenka.core.metering import Amounts, LineKind

NOT_RECORDED = "history is not recorded"
"""The beginning of a problem that lasts."""

UsageGroup = Literal["user", "namespace", "team", "job"]
"""Whose usage is added up."""


class Holder(msgspec.Struct, frozen=True):
    """A job or pod, as bills name it.

    Attributes:
        id: No later one has the same.
        name: Later ones may have the same.
        user, uid: Its owner; on a cluster empty and -1.
        team: As its user named it.
        namespace: On a workstation the user.
        kind: run, notebook, training or service.
        asks: The request, in a few words.
    """

    id: str
    name: str = ""
    user: str = ""
    uid: int = -1
    team: str = ""
    namespace: str = ""
    kind: str = ""
    asks: str = ""


class HistoryEvent(msgspec.Struct, frozen=True):
    """A change of a job or a card. at: Unix seconds.

    subject: The job's id or the card's UUID.
    kind: asked, granted, resized, ended, lost, returned or xid.
    """

    at: int
    subject: str
    kind: str
    detail: str = ""


class FigureSeries(msgspec.Struct, frozen=True):
    """Figures of one program or card over time.

    Attributes:
        start: Unix seconds of the first interval.
        step: Seconds of an interval.
        mean, most: By the name of a figure, a value for each interval; None where none is known.
    """

    start: int
    step: int
    mean: dict[str, list[float | None]] = {}
    most: dict[str, list[int | None]] = {}


class UsageRecord(msgspec.Struct, frozen=True):
    """Amounts of the ledger.

    Attributes:
        day: The days from 1970, in UTC; -1 for several days.
        kind: Whose time it was.
        holder: A job, or with the fields that several have in common; empty unless the time was held.
        node, model: Of the cards.
        paid: What an hour of the card costs, as `MeteredCard` has it; None: by a price list.
        amounts: The sums.
    """

    day: int
    kind: LineKind
    holder: Holder
    node: str
    model: str
    paid: int | None
    amounts: Amounts
