"""Cases and plans for MIG as JSON: what `fenka mig plan` reads and writes (docs/do/plan-mig.md)."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Annotated, Literal

import msgspec

from fenka.core.errors import InvalidCase
from fenka.core.mig import case
from fenka.core.mig.geometry import TABLES, Geometry, Place, SliceSize
from fenka.formats import documents

MODELS = ("A100-40G", "H100-80G", "B200", "A30")
"""The models of version 1."""

MOST_VALUE = 2**45
"""Of all requests together: so far, the search compares values without error."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
Memory = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Value = Annotated[int, msgspec.Meta(ge=0, le=10**9)] | Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Budget = Annotated[int, msgspec.Meta(ge=0, le=10**6)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _CaseSlice(_Record, frozen=True):
    memory_mib: Memory
    compute: Percent = 0


class _CaseInstance(_Record, frozen=True):
    profile: Name
    start: Annotated[int, msgspec.Meta(ge=0, le=63)]
    state: case.State
    id: Name | None = None
    slices: tuple[_CaseSlice, ...] = ()


class _CaseCard(_Record, frozen=True):
    id: Name
    model: Name
    mig: bool
    busy: bool = False
    instances: tuple[_CaseInstance, ...] = ()


class _Request(_Record, frozen=True):
    id: Name
    profile: Name | None = None
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    compute: Percent | None = None
    value: Value = 1


class _Allow(_Record, frozen=True):
    moves: Budget = 0
    conversions: Budget = 0


class _Case(_Record, frozen=True):
    version: Literal[1]
    cards: Annotated[tuple[_CaseCard, ...], msgspec.Meta(max_length=1000)]
    requests: Annotated[tuple[_Request, ...], msgspec.Meta(max_length=10_000)]
    allow: _Allow = _Allow()


def decode_case(text: bytes) -> case.MigCase:
    """Return a case. Raises InvalidCase with a sentence that names the field, card, profile or request."""
    try:
        record = documents.convert(msgspec.json.decode(text), _Case, "the case")
    except documents.InvalidDocument as why:
        raise InvalidCase(f"the case is not understood: {str(why)[:200]}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as why:
        raise InvalidCase(
            f"the case is not understood: it is no valid JSON ({str(why)[:200]})"
        ) from None
    values = _whole_values([request.value for request in record.requests])
    return case.MigCase(
        tuple(_card(card) for card in record.cards),
        tuple(_request(name, value) for name, value in zip(record.requests, values, strict=True)),
        record.allow.moves,
        record.allow.conversions,
    )


def _card(record: _CaseCard) -> case.PlannedCard:
    if record.model not in MODELS:
        raise InvalidCase(
            f"card {record.id!r}: model {record.model!r} is unknown; known are {', '.join(MODELS)}"
        )
    geometry = TABLES[record.model]
    instances = tuple(_instance(record.id, geometry, instance) for instance in record.instances)
    return case.PlannedCard(record.id, geometry, record.mig, record.busy, instances)


def _instance(card: str, geometry: Geometry, record: _CaseInstance) -> case.PlannedInstance:
    profile = geometry.by_name.get(record.profile)
    if profile is None:
        raise InvalidCase(
            f"card {card!r}: {geometry.model} has no profile {record.profile!r}, "
            f"but {', '.join(geometry.by_name)}"
        )
    slices = tuple(SliceSize(slice_.memory_mib, slice_.compute) for slice_ in record.slices)
    return case.PlannedInstance(Place(profile, record.start), record.state, record.id or "", slices)


def _whole_values(values: Sequence[float]) -> list[int]:
    """Return whole numbers in the values' proportions, rounded where those would be too large."""
    # As they are written: 0.1 and 0.2 together are worth 0.3.
    exact = [Fraction(str(value)) for value in values]
    scale = Fraction(lcm(*(value.denominator for value in exact)))
    total = sum(exact, Fraction(0))
    if total * scale > MOST_VALUE:
        scale = MOST_VALUE / total
    return [round(value * scale) for value in exact]


def _request(record: _Request, value: int) -> case.ProfileRequest | case.PlannedSlice:
    if (record.profile is None) == (record.memory_mib is None):
        raise InvalidCase(f"request {record.id!r} needs either profile or memory_mib")
    if record.memory_mib is not None:
        return case.PlannedSlice(
            record.id, SliceSize(record.memory_mib, record.compute or 0), value
        )
    if record.compute is not None:
        raise InvalidCase(
            f"request {record.id!r} has a profile, which fixes its compute: leave it out"
        )
    assert record.profile is not None
    return case.ProfileRequest(record.id, record.profile, value)


def plan_record(plan: case.MigPlan) -> dict[str, object]:
    """Return a plan as version 1 has it."""
    return {
        "version": 1,
        "steps": [_step(step) for step in plan.steps],
        "served": {name: [target.card, target.start] for name, target in plan.served.items()},
        "moved": {name: [target.card, target.start] for name, target in plan.moved.items()},
    }


def _step(step: case.Step) -> dict[str, object]:
    match step:
        case case.Enable(card):
            return {"do": "enable", "card": card}
        case case.Destroy(card, place):
            return {"do": "destroy", "card": card, "start": place.start}
        case case.Create(card, place):
            profile = place.profile.name
            return {"do": "create", "card": card, "profile": profile, "start": place.start}
