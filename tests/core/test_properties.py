"""Properties that hold for every cluster, request and policy."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import Fit, evaluate, place
from fenka.core.inventory import Card, DeviceId, Distance, Links, Node
from fenka.core.ledger import Conflict, Ledger
from fenka.core.policies.scores import SCORES
from fenka.core.reasons import ReasonCode, Unschedulable
from fenka.core.request import Placement, Request
from fenka.core.usage import EmptyUsage, UsageView
from tests.core.builders import T4_MIB, card, clusters, device, requests, units

POLICY = st.sampled_from(sorted(SCORES))
HELD = st.lists(requests(), max_size=8)
MACHINES = settings(deadline=None, max_examples=80)


def filled(cluster: tuple[Node, ...], held: list[Request], policy: str = "spread") -> Ledger:
    """Return a ledger that holds those of the requests that found room."""
    ledger = Ledger(cluster)
    for number, request in enumerate(held):
        verdict = place(ledger, request, policy, cluster)
        if isinstance(verdict, Placement):
            ledger.adopt(str(number), verdict)
    return ledger


@MACHINES
@given(cluster=clusters(), held=HELD, data=st.data())
def test_entries_and_room_are_the_same_when_a_new_ledger_takes_over(
    cluster: tuple[Node, ...], held: list[Request], data: st.DataObject
) -> None:
    """The old one is killed at any moment, and its record is read in any order."""
    ledger = filled(cluster, held)
    for entry_id, entry in ledger.entries.items():
        if data.draw(st.booleans()):
            ledger.release(entry_id)
            ledger.assume(entry_id, entry.placement, data.draw(st.floats(0, 9)))
    again = Ledger(cluster)
    for entry_id, entry in data.draw(st.permutations(list(ledger.entries.items()))):
        again.adopt(entry_id, entry.placement, entry.expires_at)
    assert again.entries == ledger.entries
    assert room(again, cluster) == room(ledger, cluster)
    assert sorted(again.expire(5)) == sorted(ledger.expire(5))


def room(view: UsageView, cluster: Collection[Node]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return free memory and compute of each card, computed without `evaluate`."""
    return {
        (node.name, card.uuid): (
            card.memory_mib - view.card_usage(node.name, card.uuid).memory_mib,
            card.compute - view.card_usage(node.name, card.uuid).compute,
        )
        for node in cluster
        for card in node.cards
    }


@MACHINES
@given(cluster=clusters(), held=HELD, request=requests(), policy=POLICY)
def test_placement_satisfies_the_request_when_there_is_one(
    cluster: tuple[Node, ...], held: list[Request], request: Request, policy: str
) -> None:
    """It has enough different cards of one node, each open, of the right model and with room, and a host."""
    ledger = filled(cluster, held)
    verdict = place(ledger, request, policy, cluster)
    assume(isinstance(verdict, Placement))
    assert isinstance(verdict, Placement)
    (host,) = [node for node in cluster if node.name == verdict.node]
    by_uuid = {each.uuid: each for each in host.cards}
    assert len({piece.uuid for piece in verdict.slices}) == request.cards == len(verdict.slices)
    free = room(ledger, cluster)
    for piece in verdict.slices:
        each = by_uuid[piece.uuid]
        memory, compute = free[host.name, piece.uuid]
        assert each.index == piece.card
        assert request.is_for(each.profile, divided=each.divided)
        assert each.healthy
        assert not each.cordoned
        assert not request.models or each.model in request.models
        assert 0 <= piece.memory_mib <= memory
        assert 0 <= piece.compute <= compute
        if request.whole:
            assert (piece.memory_mib, piece.compute) == (each.memory_mib, each.compute)
        else:
            assert piece.compute == request.compute
            expected = (
                request.memory.mib_on(each.memory_mib, host.unit_mib) if request.memory else 0
            )
            assert piece.memory_mib == expected
    cpu, memory = ledger.host_usage(host.name)
    assert host.cpu_milli is None or cpu + request.cpu_milli <= max(host.cpu_milli, cpu)
    assert host.memory_mib is None or memory + request.host_memory_mib <= max(
        host.memory_mib, memory
    )
    assert (verdict.cpu_milli, verdict.host_memory_mib) == (
        request.cpu_milli,
        request.host_memory_mib,
    )


@MACHINES
@given(cluster=clusters(), held=HELD, request=requests(), policy=POLICY)
def test_decisions_are_as_before_when_a_placement_is_released(
    cluster: tuple[Node, ...], held: list[Request], request: Request, policy: str
) -> None:
    """What is free is as before too."""
    ledger = filled(cluster, held)
    before = room(ledger, cluster), place(ledger, request, policy, cluster)
    verdict = before[1]
    assume(isinstance(verdict, Placement))
    assert isinstance(verdict, Placement)
    ledger.assume("new", verdict, 1)
    assert room(ledger, cluster) != before[0] or not (request.whole or request.memory)
    ledger.release("new")
    assert (room(ledger, cluster), place(ledger, request, policy, cluster)) == before


@MACHINES
@given(cluster=clusters(), held=HELD, request=requests(), policy=POLICY)
def test_sentence_counts_every_card_when_none_fits(
    cluster: tuple[Node, ...], held: list[Request], request: Request, policy: str
) -> None:
    """The counts add up to the number of cards."""
    verdict = place(filled(cluster, held), request, policy, cluster)
    if isinstance(verdict, Unschedulable):
        total = sum(len(node.cards) for node in cluster)
        counts = verdict.sentence().removeprefix("no GPU fits: ").split(", ")
        assert f" of {total} " in counts[0]
        assert sum(int(part.split()[0]) for part in counts) == total


@MACHINES
@given(cluster=clusters(), held=HELD, request=requests(), policy=POLICY)
def test_ledger_accepts_no_set_of_cards_when_a_node_is_rejected(
    cluster: tuple[Node, ...], held: list[Request], request: Request, policy: str
) -> None:
    """No set of cards is overlooked."""
    ledger = filled(cluster, held)
    for node, verdict in zip(cluster, evaluate(ledger, request, policy, cluster), strict=True):
        if isinstance(verdict, Fit):
            continue
        willing = [
            each
            for each in node.cards
            if each.healthy
            and not each.cordoned
            and request.is_for(each.profile, divided=each.divided)
            and (not request.models or each.model in request.models)
        ]
        taken = [each for each in willing if self_contained(ledger, node, each, request)]
        sets = combinations((each.uuid for each in taken), request.cards)
        if any(not request.linked or have_nvlink(node, devices) for devices in sets):
            # Only the host can be the reason then.
            whys = {reason.code for reason in verdict.reasons}
            assert whys & {ReasonCode.CPU, ReasonCode.HOST_MEMORY}


def have_nvlink(node: Node, devices: Iterable[DeviceId]) -> bool:
    """Return whether each two of these cards are known to have NVLink."""
    pairs = combinations(devices, 2)
    links = node.links or Links((), b"")
    return all(links.distance(*pair) == Distance.NVLINK for pair in pairs)


def self_contained(ledger: Ledger, node: Node, each: Card, request: Request) -> bool:
    """Return whether the ledger accepts one slice of this request on this card, whatever the host."""
    mib = request.memory.mib_on(each.memory_mib, node.unit_mib) if request.memory else 0
    one = (
        replace(Request(whole=True), instance=request.instance)
        if request.whole
        else replace(request, cards=1)
    )
    if mib is None:
        return False
    found = place(
        EmptyUsage(),
        replace(one, cpu_milli=0, host_memory_mib=0),
        "binpack",
        [Node(node.name, (replace(each, healthy=True, cordoned=False),), unit_mib=node.unit_mib)],
    )
    if not isinstance(found, Placement):
        return False
    try:
        ledger.adopt("probe", found)
    except Conflict:
        return False
    ledger.release("probe")
    return True


@MACHINES
@given(cluster=clusters(), held=HELD, request=requests(), policy=POLICY)
def test_decision_is_the_same_when_nodes_are_listed_in_another_order(
    cluster: tuple[Node, ...], held: list[Request], request: Request, policy: str
) -> None:
    """fenka breaks ties itself."""
    ledger = filled(cluster, held)
    verdict = place(ledger, request, policy, cluster)
    backwards = place(ledger, request, policy, cluster[::-1])
    if isinstance(verdict, Placement):
        assert backwards == verdict
    else:
        assert isinstance(backwards, Unschedulable)
        assert backwards.sentence() == verdict.sentence()


@MACHINES
@given(cluster=clusters(), held=HELD, request=requests(), policy=POLICY)
def test_request_fits_by_every_policy_when_it_fits_by_one(
    cluster: tuple[Node, ...], held: list[Request], request: Request, policy: str
) -> None:
    """Policies choose among what fits."""
    ledger = filled(cluster, held)
    fits = {name: isinstance(place(ledger, request, name, cluster), Placement) for name in SCORES}
    assert len(set(fits.values())) == 1


@MACHINES
@given(cluster=clusters(), held=HELD, request=requests(), policy=POLICY, data=st.data())
def test_reserved_cards_are_not_given_when_a_request_is_placed(
    cluster: tuple[Node, ...],
    held: list[Request],
    request: Request,
    policy: str,
    data: st.DataObject,
) -> None:
    """What fits beside reservations fits without them."""
    ledger = filled(cluster, held)
    uuids = [each.uuid for node in cluster for each in node.cards]
    reserved = data.draw(st.sets(st.sampled_from(uuids)))
    verdict = place(ledger, request, policy, cluster, reserved)
    if isinstance(verdict, Placement):
        assert reserved.isdisjoint(piece.uuid for piece in verdict.slices)
        assert isinstance(place(ledger, request, policy, cluster), Placement)


@pytest.mark.parametrize("amount", [1, 2, 5, 7])
def test_card_stays_empty_when_binpack_places_two_requests_that_fit_on_one(amount: int) -> None:
    """spread uses both cards."""
    nodes = (Node("a", (card(0), card(1))),)
    left = {}
    for policy in ("binpack", "spread"):
        ledger = filled(nodes, [units(amount), units(amount)], policy)
        left[policy] = sum(ledger.card_usage("a", device(index)).holders == 0 for index in (0, 1))
        # Both hold the same: 15079 * amount // 14, twice.
        held = sum(ledger.card_usage("a", device(index)).memory_mib for index in (0, 1))
        assert held == 2 * (T4_MIB * amount // 14)
    assert left == {"binpack": 1, "spread": 0}
