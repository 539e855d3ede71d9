"""What place and the queue promise, whatever the cards, the requests and their order."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import Fit, evaluate, never_fits, place
from fenka.core.inventory import Node
from fenka.core.ledger import Ledger
from fenka.core.queue import PendingRequest, SchedulingResult
from fenka.core.reasons import ReasonCode
from fenka.core.request import Placement, Request
from fenka.core.usage import EmptyUsage, UsageTotals
from tests.core.builders import SIZES, NodesBackfill, card, clusters, device, requests

POLICIES = st.sampled_from(["binpack", "spread"])
MANY = st.lists(requests(), max_size=12)


def filled(nodes: tuple[Node, ...], asked: list[Request], policy: str) -> Ledger:
    """A ledger in which of these requests all are held that fit, in order."""
    ledger = Ledger(nodes)
    for number, request in enumerate(asked):
        verdict = place(ledger, request, policy, nodes)
        if isinstance(verdict, Placement):
            ledger.assume(str(number), verdict, 1)
    return ledger


def serve(
    queued: list[Request], ledger: Ledger, policy: str, nodes: tuple[Node, ...]
) -> SchedulingResult:
    """Requests that joined in order of their number, served once."""
    waiting = [PendingRequest(str(number), (it,), number) for number, it in enumerate(queued)]
    return NodesBackfill(nodes, policy).serve(waiting, (), 0, ledger)


@settings(deadline=None)
@given(nodes=clusters(), asked=MANY, request=requests(), policy=POLICIES)
def test_a_placement_is_what_was_asked_for(
    nodes: tuple[Node, ...], asked: list[Request], request: Request, policy: str
) -> None:
    """As many different cards of one node as asked for, of a right model, that admit somebody."""
    verdict = place(filled(nodes, asked, policy), request, policy, nodes)
    if not isinstance(verdict, Placement):
        return
    (its_node,) = (each for each in nodes if each.name == verdict.node)
    cards = {card.uuid: card for card in its_node.cards}
    chosen = [cards[each.uuid] for each in verdict.slices]
    assert chosen == sorted(chosen, key=lambda card: card.rank)
    assert len({card.uuid for card in chosen}) == request.cards == len(chosen)
    for each, on in zip(verdict.slices, chosen, strict=True):
        assert on.index == each.card
        assert request.is_for(on.profile, divided=on.divided)
        assert on.healthy
        assert not on.cordoned
        assert not request.models or on.model in request.models
        if request.whole:
            assert (each.memory_mib, each.compute) == (on.memory_mib, on.compute)
        else:
            wanted = (
                request.memory.mib_on(on.memory_mib, its_node.unit_mib) if request.memory else 0
            )
            assert (each.memory_mib, each.compute) == (wanted, request.compute)


@settings(deadline=None)
@given(nodes=clusters(), asked=MANY, request=requests(), policy=POLICIES, data=st.data())
def test_reasons_cover_every_card_once(
    nodes: tuple[Node, ...],
    asked: list[Request],
    request: Request,
    policy: str,
    data: st.DataObject,
) -> None:
    """So that a sentence's counts add up to the number of cards."""
    uuids = sorted(one.uuid for each in nodes for one in each.cards)
    reserved = data.draw(st.sets(st.sampled_from(uuids)))
    ledger = filled(nodes, asked, policy)
    for each, verdict in zip(
        nodes, evaluate(ledger, request, policy, nodes, reserved), strict=True
    ):
        assert verdict.node == each.name
        if isinstance(verdict, Fit):
            assert not reserved & {it.uuid for it in verdict.cards}
            continue
        assert [reason.card for reason in verdict.reasons] == [one.index for one in each.cards]
        measured = {
            ReasonCode.MEMORY,
            ReasonCode.COMPUTE,
            ReasonCode.CPU,
            ReasonCode.HOST_MEMORY,
            ReasonCode.TOO_FEW,
            ReasonCode.NOT_LINKED,
        }
        for reason in verdict.reasons:
            assert (reason.needed > reason.available >= 0) == (reason.code in measured)


@settings(deadline=None)
@given(nodes=clusters(), asked=MANY, request=requests(), policy=POLICIES, data=st.data())
def test_another_card_never_hurts(
    nodes: tuple[Node, ...],
    asked: list[Request],
    request: Request,
    policy: str,
    data: st.DataObject,
) -> None:
    """What could be placed can be placed when a node gets one more card, whatever it is."""
    ledger = filled(nodes, asked, policy)
    before = place(ledger, request, policy, nodes)
    which = data.draw(st.integers(0, len(nodes) - 1))
    grown, model = nodes[which], data.draw(st.sampled_from(sorted(SIZES)))
    more = card(len(grown.cards), SIZES[model], node=grown.name, model=model)
    larger = list(nodes)
    larger[which] = replace(grown, cards=(*grown.cards, more))
    if isinstance(before, Placement):
        assert isinstance(place(ledger, request, policy, larger), Placement)


@settings(deadline=None)
@given(nodes=clusters(), asked=MANY, request=requests(), policy=POLICIES)
def test_what_never_fits_does_not_fit(
    nodes: tuple[Node, ...], asked: list[Request], request: Request, policy: str
) -> None:
    """Neither on cards in use nor on empty ones; and what fits now is never said not to."""
    if never_fits(request, nodes):
        assert not isinstance(place(EmptyUsage(), request, policy, nodes), Placement)
        assert not isinstance(
            place(filled(nodes, asked, policy), request, policy, nodes), Placement
        )


@settings(deadline=None)
@given(nodes=clusters(), asked=MANY, queued=MANY, policy=POLICIES)
def test_serving_keeps_the_order(
    nodes: tuple[Node, ...], asked: list[Request], queued: list[Request], policy: str
) -> None:
    """Everybody is told once, in order; the ledger takes what is placed; nothing else has changed."""
    ledger = filled(nodes, asked, policy)
    before = ledger.entries
    step = serve(queued, ledger, policy, nodes)
    placed = [int(name) for name, _ in step.placed]
    waiting = [int(it.id) for it in step.pending]
    assert placed == sorted(placed)
    assert waiting == sorted(waiting)
    assert [it.position for it in step.pending] == list(range(1, len(waiting) + 1))
    assert sorted(placed + waiting) == list(range(len(queued)))
    assert ledger.entries == before
    for name, (placement,) in step.placed:
        ledger.assume(f"served-{name}", placement, 1)


@settings(deadline=None)
@given(nodes=clusters(), asked=MANY, queued=MANY, policy=POLICIES)
def test_the_first_is_placed_as_if_alone(
    nodes: tuple[Node, ...], asked: list[Request], queued: list[Request], policy: str
) -> None:
    """Those behind make no difference to it."""
    ledger = filled(nodes, asked, policy)
    step = serve(queued, ledger, policy, nodes)
    if queued:
        alone = place(ledger, queued[0], policy, nodes)
        verdicts = {name: found[0] for name, found in step.placed}
        refusals = {it.id: it.unschedulable for it in step.pending}
        assert (verdicts | refusals)["0"] == alone


@settings(deadline=None)
@given(nodes=clusters(), asked=MANY, policy=POLICIES)
def test_counting_out_undoes_counting_in(
    nodes: tuple[Node, ...], asked: list[Request], policy: str
) -> None:
    """In any order: totals end as nothing."""
    placements = [each.placement for each in filled(nodes, asked, policy).entries.values()]
    tally = UsageTotals()
    for each in placements:
        tally.add(each)
    for each in placements:
        tally.remove(each)
    for it in nodes:
        assert tally.host_usage(it.name) == (0, 0)
        assert all(
            tally.card_usage(it.name, one.uuid) == EmptyUsage().card_usage("", device(0, ""))
            for one in it.cards
        )
