"""Remembered verdicts are those that would be given afresh."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.evaluate import place
from fenka.core.inventory import DeviceId, Node
from fenka.core.ledger import Ledger
from fenka.core.request import Placement, Request
from fenka.core.verdict_cache import VerdictCache
from tests.core.builders import clusters, requests


@settings(deadline=None)
@given(
    nodes=clusters(),
    asked=st.lists(requests(), min_size=1, max_size=12),
    policy=st.sampled_from(["binpack", "spread"]),
    data=st.data(),
)
def test_cached_verdict_equals_a_new_one(
    nodes: tuple[Node, ...], asked: list[Request], policy: str, data: st.DataObject
) -> None:
    """While leases come and go, cards are reserved, and the same sizes are asked for again and again."""
    ledger, verdicts = Ledger(nodes), VerdictCache(nodes, policy)
    uuids = sorted(card.uuid for node in nodes for card in node.cards)
    for number in range(12):
        busy = sorted(ledger.entries)
        if data.draw(st.booleans()) and busy:
            ledger.release(data.draw(st.sampled_from(busy)))
        for _ in range(2):
            request = data.draw(st.sampled_from(asked))
            reserved = data.draw(st.just(set[DeviceId]()) | st.sets(st.sampled_from(uuids)))
            found = verdicts.place(ledger, request, reserved)
            assert found == place(ledger, request, policy, nodes, reserved)
        if isinstance(found, Placement):
            ledger.adopt(f"lease-{number}", found)
