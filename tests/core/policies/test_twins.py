"""The columnar form of each policy orders nodes as its definition does, on random histories."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fenka.core.columnar import Judgement
from fenka.core.evaluate import Fit, evaluate
from fenka.core.inventory import Node
from fenka.core.policies.candidates import TargetPolicy
from fenka.core.policies.column_keys import COLUMN_KEYS
from fenka.core.policies.scores import SCORES
from fenka.core.policies.target import ExpectedWorkload
from fenka.core.policies.workload import LearnedWorkload, Typical
from fenka.core.request import Request
from tests.core.builders import clusters, requests
from tests.core.test_columnar_twins import World, reserved_cards

HOSTS = st.builds(
    lambda cpu, memory: Request(cards=0, cpu_milli=cpu, host_memory_mib=memory),
    *(st.integers(1, 4000), st.sampled_from([0, 8000])),
)


def test_every_policy_but_the_two_simple_ones_has_a_twin() -> None:
    """binpack and spread have theirs in `columnar.py`."""
    assert set(SCORES) - set(COLUMN_KEYS) == {"binpack", "spread"}


@settings(deadline=None, max_examples=60)
@given(
    nodes=clusters(),
    asked=st.lists(requests() | HOSTS, min_size=1, max_size=8),
    name=st.sampled_from(sorted(COLUMN_KEYS)),
    data=st.data(),
)
def test_twin_orders_nodes_as_the_definition(
    nodes: tuple[Node, ...], asked: list[Request], name: str, data: st.DataObject
) -> None:
    """Which nodes fit, in which order, also with reserved cards, changed prices and no expected workload."""
    expected = data.draw(st.lists(st.builds(Typical, requests() | HOSTS, st.integers(1, 9))))
    target = ExpectedWorkload(
        tuple({typical.request: typical for typical in expected}.values()), seed=7
    )
    known = data.draw(st.booleans())
    policy = TargetPolicy(name, target) if known else name
    world = World(nodes, data)
    for request in asked:
        world.change(request, policy)
        if known:
            target.turn += 1
            target.prices.improve(world.columns, steps=1)
        reserved = data.draw(reserved_cards(nodes))
        columns, names = world.columns, sorted(world.nodes)
        there = [world.nodes[node] for node in names]
        verdicts = evaluate(world.totals, request, policy, there, reserved)
        fits = [verdict for verdict in verdicts if isinstance(verdict, Fit)]
        in_order = [fit.node for fit in sorted(fits, key=lambda fit: (fit.score, fit.node))]
        judgement = Judgement(columns, request, columns.mask_of(reserved))
        order = judgement.order(policy, columns.slots(names)).tolist()
        assert [node.name for slot in order if (node := columns.nodes[slot])] == in_order
        assert judgement.best(policy) == (order[0] if order else None)


@given(st.lists(st.lists(requests(), min_size=1, max_size=4), min_size=1, max_size=20))
def test_learned_workload_covers_what_came(seen: list[list[Request]]) -> None:
    """95 % of the requests at least, the most frequent kind first."""
    learned = LearnedWorkload(half_life=10_000)
    for together in seen:
        learned.observe(together)
    workload = learned.typical()
    weights = [typical.weight for typical in workload]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) >= 0.94 * 1_000_000
    assert not any(typical.request.host_memory_mib for typical in workload)
