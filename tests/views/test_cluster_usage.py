"""A cluster's ledger: pods by namespace and team, elastic nodes at what was paid, and the sum of all."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterSnapshot
from fenka.core.metering import (
    DAY_US,
    HOUR_US,
    SECOND_US,
    LineKind,
    Moment,
    Observation,
    UsageLedger,
    add,
    charges,
    cost,
)
from fenka.history.history_store import Batch, HistoryStore
from fenka.history.series import Holder
from fenka.views.cluster_usage import BusyTime, observe_cluster
from fenka.views.node_figures import NodeFigures, SliceFigures
from tests.builders import T4_MIB, a_node, on_card
from tests.fakes.queue import make

NODE, OTHER = a_node("n", T4_MIB, T4_MIB), a_node("elastic", T4_MIB)
DAY = 20_700
PRICES = {"elastic": 0.9}
LIST_PRICE = 350_000


def holder(name: str, card: int, units: int, node: str = "n", **given: Any) -> Pod:
    """A pod that holds units of a card."""
    return make(name, units, started=0, node=node, annotations=on_card(card, units), **given)


def seen(
    at_s: int,
    *pods: Pod,
    nodes: tuple[Node, ...] = (NODE, OTHER),
    readings: Mapping[str, NodeFigures] | None = None,
    busy: BusyTime | None = None,
    team_label: str = "fenka.io/team",
) -> tuple[Observation, dict[str, Holder]]:
    """The cluster at so many seconds."""
    at_us = at_s * SECOND_US
    moment = Moment(DAY * DAY_US + at_us, at_us, "b", "o")
    snapshot = ClusterSnapshot.of(nodes, pods)
    return observe_cluster(
        snapshot.state, readings or {}, busy or BusyTime(), PRICES, moment, team_label
    )


def test_pods_are_charged_by_their_slices_when_time_passes() -> None:
    """4 of 14 units: 4308 of 15079 MiB. A node with a price of its own is charged what was paid."""
    pods = holder("a", 0, 4), holder("b", 0, 14, "elastic")
    before, holders = seen(0, *pods)
    after, _ = seen(60)
    ledger: UsageLedger = {}
    add(ledger, charges(before, after))
    lines = {
        (line.kind, holders[line.holder].name if line.holder else "", line.node, line.paid): amounts
        for line, amounts in ledger.items()
    }
    assert {key: amounts.card_us / SECOND_US for key, amounts in lines.items()} == {
        (LineKind.HELD, "a", "n", None): 17.141720,
        (LineKind.IDLE, "", "n", None): 102.85828,
        (LineKind.HELD, "b", "elastic", 900_000): 60,
    }
    assert cost(60 * SECOND_US, 900_000) == Fraction(15, 1000)


def test_a_pod_has_its_team_when_its_label_names_one() -> None:
    """The key of the label can be chosen."""
    pod = holder("a", 0, 4, labels={"fenka.io/team": "vision", "team": "audio"})
    for key, team in (("fenka.io/team", "vision"), ("team", "audio"), ("cost-centre", "")):
        (found,) = seen(0, pod, team_label=key)[1].values()
        assert (found.name, found.namespace, found.team) == ("a", pod.metadata.namespace, team)


def test_use_is_counted_when_nodes_report_it() -> None:
    """Half of the card's time in 10 s; a reading that is seen twice counts once."""
    pod = holder("a", 0, 4)
    busy = BusyTime()
    device = seen(0, pod)[0].holdings[0].card

    def reading(at: float, share: float | None) -> dict[str, NodeFigures]:
        return {"n": NodeFigures(at, slices=[SliceFigures(pod.metadata.uid, device, 1000, share)])}

    ledger: UsageLedger = {}
    before, _ = seen(0, pod, readings=reading(5, 0.9), busy=busy)
    for at, read in ((10, reading(15, 0.5)), (20, reading(15, 0.5)), (30, reading(25, None))):
        after, _ = seen(at, pod, readings=read, busy=busy)
        add(ledger, charges(before, after))
        before = after
    (amounts,) = (amounts for line, amounts in ledger.items() if line.holder)
    assert amounts.busy_us == 5 * SECOND_US
    assert amounts.used == 1000 * 30 * SECOND_US


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_all_costs_are_cards_and_time_when_pods_and_nodes_come_and_go(data: st.DataObject) -> None:
    """Shares, idle and unobserved time of all nodes cost what the nodes cost."""
    ledger: UsageLedger = {}
    expected, at = Fraction(0), 0
    before = seen(0)[0]
    for _ in range(data.draw(st.integers(1, 5))):
        step = data.draw(st.integers(0, 90))
        at += step
        nodes = data.draw(st.sampled_from([(NODE, OTHER), (NODE,), (OTHER,), ()]))
        units = data.draw(st.lists(st.integers(1, 14), max_size=3))
        pods = [holder(f"p{number}-{at}", number % 2, size) for number, size in enumerate(units)]
        after = seen(at, *pods, nodes=nodes)[0]
        for card in before.cards:
            price = LIST_PRICE if card.paid is None else card.paid
            expected += Fraction(step * SECOND_US * price, HOUR_US * 10**6)
        add(ledger, charges(before, after))
        before = after
    costs = (
        cost(amounts.card_us, LIST_PRICE if line.paid is None else line.paid)
        for line, amounts in ledger.items()
    )
    assert sum(costs) == expected


def test_the_same_store_keeps_a_cluster_when_its_dashboard_restarts(tmp_path: Path) -> None:
    """Pods by UID, with what was paid for their node."""
    store = HistoryStore(tmp_path / "usage.db", 1 << 24)
    before, holders = seen(0, holder("b", 0, 14, "elastic"))
    after, _ = seen(30)
    usage: UsageLedger = {}
    add(usage, charges(before, after))
    at = DAY * 86400
    assert store.write(Batch(at, [*holders.values()], usage=usage, first=before, last=after))
    records = store.usage(DAY, DAY + 1)
    assert records is not None
    (paid,) = [record for record in records if record.kind is LineKind.HELD]
    assert (paid.node, paid.paid, paid.holder.name) == ("elastic", 900_000, "b")
