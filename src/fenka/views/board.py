"""Messages of the dashboard's server to its page.

A workstation and a cluster have the same messages. Three numbers of a slice are never mixed: what is *held*,
what is *used* of it, and how long the card was *busy* for it. An unknown value is None, never 0. Sentences
are those of the command line, by the same functions.

`web/src/messages.ts` is generated from these types, so an attribute has one name on both sides.
Times are Unix seconds, sizes MiB, shares 0 to 1.
"""

from typing import Literal

import msgspec

from fenka.core.request import ComputeMode

MESSAGES = 1
"""Version of the messages. A page of another version reloads itself once, then says so."""

Place = Literal["workstation", "cluster"]
ProgramState = Literal["waiting", "starting", "running"]


class SliceTile(msgspec.Struct, frozen=True):
    """A slice on a card, drawn as wide as its share of the card's memory.

    Attributes:
        program: the id of the program that holds it; empty for one that this viewer may not see.
        user: on a cluster the namespace.
        compute: percent of the card's time; 0 for no limit.
        busy: share of the card's time that it had.
        profile: of the MIG instance that it is in or takes; empty for a slice of a card.
    """

    program: str
    name: str
    user: str
    held_mib: int
    used_mib: int | None = None
    compute: int = 0
    compute_mode: ComputeMode = "hard"
    busy: float | None = None
    profile: str = ""
    start: int = 0


class CardTile(msgspec.Struct, frozen=True):
    """A card and its slices.

    Attributes:
        id: `INDEX` on a workstation, `NODE/INDEX` on a cluster.
        units, free_units: all of it, and what no program holds or takes.
        note: why it takes nothing new; empty if it does.
        unleased: who uses memory of it without a lease, in a sentence.
        xids: the last errors that its driver reported, the newest first, in sentences.
        readable: why the driver's figures are unknown; empty if they are known.
    """

    id: str
    node: str
    index: int
    uuid: str
    model: str
    memory_mib: int
    units: int
    free_units: int
    healthy: bool
    held_mib: int
    used_mib: int | None = None
    busy: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    unleased_mib: int = 0
    unleased: str = ""
    note: str = ""
    xids: list[str] = []
    readable: str = ""
    slices: list[SliceTile] = []


class ProgramLine(msgspec.Struct, frozen=True):
    """A program: a job of a workstation, a pod of a cluster.

    Attributes:
        id: its identity; a name that is used twice has two.
        kind: run, training, notebook or service.
        group: the gang, the training or the service that it belongs to; empty for none.
        cards: ids of the cards that it holds parts of.
        busy: share of one card's time, added over its cards.
        idle_s: seconds since it last had card time; None if it is not idle, or that is not known.
        starts: ids of the waiting programs that would start if it ended.
        violations: sentences about exceeded limits.
        own: whether the viewer may stop and resize it.
        address: a notebook's or service's URL, without any token.
        priority: larger numbers are served first; None on a cluster, where it cannot be changed.
    """

    id: str
    name: str
    user: str
    kind: str
    state: ProgramState
    asks: str
    requested_at: float
    started_at: float | None = None
    deadline: float | None = None
    group: str = ""
    cards: list[str] = []
    held_mib: int = 0
    used_mib: int | None = None
    busy: float | None = None
    compute: int = 0
    compute_mode: ComputeMode = "hard"
    idle_s: float | None = None
    starts: list[str] = []
    violations: list[str] = []
    own: bool = False
    address: str = ""
    priority: int | None = None


class WaitingLine(msgspec.Struct, frozen=True):
    """A request that waits.

    Attributes:
        asks: as its user wrote it.
        reserved: ids of the cards that are kept for it.
        starts_by: when these are free at the latest.
        why: why it waits, in a sentence.
        helps: what would let it start, in sentences.
    """

    id: str
    position: int
    name: str
    user: str
    asks: str
    priority: int
    since: float
    reserved: list[str] = []
    starts_by: float | None = None
    why: str = ""
    helps: list[str] = []
    own: bool = False


class WorkloadLine(msgspec.Struct, frozen=True):
    """A training, a notebook or a version of a service.

    Attributes:
        state: as `fenka ps` prints it.
        ready, desired: replicas of a service.
        requests_per_s, waiting_requests: of a service; None if that is not known.
        loss: steps and values of a training's loss, from its TensorBoard files; empty without them.
    """

    name: str
    user: str
    kind: str
    state: str
    created: float
    version: str = ""
    address: str = ""
    why: str = ""
    ready: int | None = None
    desired: int | None = None
    requests_per_s: float | None = None
    waiting_requests: int | None = None
    loss: list[tuple[int, float]] = []
    programs: list[str] = []


class PersonLine(msgspec.Struct, frozen=True):
    """A user or a namespace: what it holds, uses and waits for now.

    Attributes:
        busy: cards that were busy for it, added over all.
        waiting: how many of its requests wait. oldest: since when the first of them does.
        idle_mib: held by its programs that are idle.
    """

    user: str
    held_mib: int
    used_mib: int | None
    busy: float | None
    waiting: int = 0
    oldest: float | None = None
    idle_mib: int = 0


class NodeLine(msgspec.Struct, frozen=True):
    """A node of a cluster, without its cards.

    Attributes:
        state: as `fenka top node` prints it.
        note: why it takes nothing new, or what is planned for it.
        price: of an elastic node, an hour; None if it is not known.
        seen_at: the time of its last reading.
    """

    name: str
    state: str
    model: str
    cards: int
    units: int
    free_units: int
    unit_mib: int
    note: str = ""
    price: float | None = None
    seen_at: float | None = None


class World(msgspec.Struct, frozen=True, tag="world"):
    """All that one look shows. The message `world`.

    Attributes:
        name: of the machine, or of the cluster's context.
        cards: all cards; none where there are more than 64: then `fleet` has them.
        programs: all that hold something; where `fleet` has the cards, those that are idle and hold most.
        programs_total: how many hold something.
        largest_mib: the largest slice that starts at once. free_mib: what is free in all.
        problems: sentences about what is not known now, such as a daemon that does not answer.
        actions: whether this viewer may stop and resize.
        currency: of prices; empty where there are none.
    """

    at: float
    place: Place
    name: str
    version: str
    simulated: bool
    unit_mib: int
    cards: list[CardTile]
    programs: list[ProgramLine]
    waiting: list[WaitingLine]
    waiting_total: int
    workloads: list[WorkloadLine] = []
    people: list[PersonLine] = []
    nodes: list[NodeLine] = []
    free_mib: int = 0
    largest_mib: int = 0
    problems: list[str] = []
    actions: bool = False
    currency: str = ""
    programs_total: int = 0
    messages: int = MESSAGES


class Fleet(msgspec.Struct, frozen=True, tag="fleet"):
    """The cards of many nodes, three bytes a card. The message `fleet`.

    Attributes:
        nodes: their names in the order of `cards`. counts: how many cards each has.
        cards: for each card the share held and the share busy, of 254, or 255 if unknown. Then its flags:
            1 lost, 2 takes nothing new, 4 idle, 8 hot, 16 in MIG mode.
    """

    at: float
    nodes: list[str]
    counts: list[int]
    cards: bytes


class ProgramDetail(msgspec.Struct, frozen=True):
    """One program in full.

    Attributes:
        explanation: the whole of `fenka why`, line by line.
        events: time and sentence: asked, granted, resized, errors, ended; the newest last.
        refused: how often memory beyond its slice was refused; None if that is not known.
        throttled_s: seconds that its launches waited for their share; None if that is not known.
        logs: whether `api/logs/ID` has its output for this viewer.
    """

    program: ProgramLine | None
    waiting: WaitingLine | None
    explanation: list[str]
    events: list[tuple[float, str]] = []
    refused: int | None = None
    throttled_s: float | None = None
    logs: bool = False
    mates: list[str] = []


class Series(msgspec.Struct, frozen=True):
    """Figures at a constant step. mean, highest: None where nothing was recorded.

    unit: MiB, share, celsius or watt. limit: what is drawn dashed beside it; empty for none.
    """

    name: str
    unit: str
    start: float
    step: float
    mean: list[float | None]
    highest: list[float | None]
    limit: list[float | None] = []


class HistoryAnswer(msgspec.Struct, frozen=True):
    """Figures over a span. problem: why there is nothing; empty if there is."""

    series: list[Series]
    marks: list[tuple[float, str]] = []
    problem: str = ""


class UsageLine(msgspec.Struct, frozen=True):
    """The part of the cards' time that a user or a namespace had, or that nobody had.

    Attributes:
        kind: held, idle or unobserved.
        name: of the user or namespace; empty unless it was held.
        card_hours, held_gib_hours: as `fenka usage` has them.
        used_share: the used part of the held memory; None if that is not known.
        cost: in the currency; None without a price.
    """

    kind: Literal["held", "idle", "unobserved"]
    name: str
    card_hours: float
    held_gib_hours: float
    used_share: float | None
    cost: float | None


class WaitSums(msgspec.Struct, frozen=True):
    """How requests waited that were granted in a span.

    Attributes:
        granted: how many were granted. waited: how many of them not at once; None if that is not known.
        mean_s, longest_s: seconds until they were granted; None if that is not known.
        reasons: why requests waited, and how many at a time on average, the most frequent first.
    """

    granted: int
    waited: int | None = None
    mean_s: float | None = None
    longest_s: float | None = None
    reasons: list[tuple[str, float]] = []


class Sums(msgspec.Struct, frozen=True):
    """Sums of this month and of today in UTC, and how requests waited in the last 24 hours.

    Attributes:
        currency: of costs.
        since: the first recorded day's beginning, in Unix seconds; None if nothing is recorded.
        waits: None if that is not recorded.
        problem: why there are no sums; empty if there are.
    """

    month: list[UsageLine] = []
    today: list[UsageLine] = []
    currency: str = ""
    since: float | None = None
    waits: WaitSums | None = None
    problem: str = ""


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question: what starts if programs end and cards are added?

    end: ids of programs. add: number of cards by model.
    """

    end: list[str] = []
    add: dict[str, int] = {}


class WhatIfAnswer(msgspec.Struct, frozen=True):
    """starts: names of what would start. waits: name and reason of what would not. sentence: both in one."""

    starts: list[str]
    waits: list[tuple[str, str]]
    sentence: str
