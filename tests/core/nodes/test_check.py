"""The last step of planning: no placement passes that `evaluate` would not make."""

import pytest

from fenka.core.inventory import Taint, Toleration
from fenka.core.nodes.case import (
    CaseNode,
    CaseRequest,
    Gang,
    Held,
    HeldCard,
    PlanningCase,
)
from fenka.core.nodes.plan import PlannedPod, checked
from tests.core.nodes.builders import T4_MIB, case, held, node, request


def passed(what: PlanningCase, *pods: tuple[str, str, tuple[int, ...]]) -> list[str]:
    """Return the requests whose placements pass."""
    slots = {each.name: each for each in what.nodes}
    return [pod.request for pod in checked(what, slots, [PlannedPod(*pod) for pod in pods])]


TAINTED = (Taint(key="k", value="v", effect="NoSchedule"),)

ALONE: list[tuple[CaseRequest, CaseNode, tuple[int, ...], bool]] = [
    # 14 units are the card.
    (request(units=14), node("n", held()), (0,), True),
    (request(units=15), node("n", held()), (0,), False),
    # 10 units are 10770 MiB; 4309 remain beside 10770, 4308 are wanted.
    (request(units=4), node("n", held(10770)), (0,), True),
    (request(units=4), node("n", held(10772)), (0,), False),
    (request(compute=50), node("n", held(held_compute=50)), (0,), True),
    (request(compute=51), node("n", held(held_compute=50)), (0,), False),
    (request(units=0, whole=True), node("n", held()), (0,), True),
    (request(units=0, whole=True), node("n", held(1)), (0,), False),
    (request(), node("n", held(whole=True)), (0,), False),
    (request(), node("n", held(closed=True)), (0,), False),
    (request(models=("A",)), node("n", held()), (0,), False),
    (request(cards=2), node("n", held(), held()), (0, 1), True),
    (request(cards=2), node("n", held(), held()), (0,), False),
    (request(cards=2), node("n", held(), held()), (0, 0), False),
    (request(), node("n", held()), (1,), False),
    (request(cpu_milli=16001), node("n", held()), (0,), False),
    (request(memory_mib=65537), node("n", held()), (0,), False),
    (request(units=0, cards=0, cpu_milli=16000), node("n"), (), True),
    (request(units=0, cards=0, cpu_milli=16001), node("n"), (), False),
    (request(units=0, cards=0, memory_mib=1), node("n", held=Held(memory_mib=65536)), (), False),
    (request(), node("n", held(), held=Held(pods=110)), (0,), False),
    (request(resources={"x": 1}), node("n", held(), resources={"x": 1}), (0,), True),
    (request(resources={"x": 2}), node("n", held(), resources={"x": 1}), (0,), False),
    (request(selector={"a": "b"}), node("n", held(), labels={"a": "b"}), (0,), True),
    (request(selector={"a": "b"}), node("n", held()), (0,), False),
    (request(selector={"fenka.io/group": "g"}), node("n", held(), group="g"), (0,), True),
    (request(), node("n", held(), taints=TAINTED), (0,), False),
    (request(tolerations=(Toleration(operator="Exists"),)), node("n", held(), taints=TAINTED), (0,), True),
    (request(), node("n", held(), capacity="spot"), (0,), False),
    (request(interruptible=True), node("n", held(), capacity="spot"), (0,), True),
    (request(duration_s=60), node("n", held(), capacity="spot", protected_s=60), (0,), True),
    (request(duration_s=61), node("n", held(), capacity="spot", protected_s=60), (0,), False),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "there", "cards", "passes"), ALONE)
def test_placement_passes_only_when_the_node_admits_it(
    asked: CaseRequest, there: CaseNode, cards: tuple[int, ...], passes: bool
) -> None:
    """Cards, host, labels, taints, spot."""
    what = case(asked, nodes=(there,))
    assert passed(what, ("r", "n", cards)) == (["r"] if passes else [])


def test_placements_are_judged_in_turn() -> None:
    """Three of 4 units leave room for no fourth."""
    what = case(request(count=4), nodes=(node("n", held()),))
    pod = ("r", "n", (0,))
    assert passed(what, pod, pod, pod, pod) == ["r", "r", "r"]


def test_placement_does_not_pass_when_the_node_is_unknown() -> None:
    """A plan may name only what it has."""
    assert passed(case(request()), ("r", "n", (0,))) == []


def test_gang_does_not_pass_when_a_member_does_not() -> None:
    """The members that would fit go too, others stay."""
    members = request("a", gang="g"), request("b", 15, gang="g"), request("c")
    what = case(*members, nodes=(node("n", held()),))
    assert passed(what, *((name, "n", (0,)) for name in "abc")) == ["c"]


@pytest.mark.parametrize(("zone", "passes"), [("same", False), ("any", True)])
def test_gang_passes_only_in_one_zone_when_it_wants_that(zone: str, passes: bool) -> None:
    """Two zones are enough for any other gang."""
    gangs = {"g": Gang(zone=zone)}  # type: ignore[arg-type]
    there = node("n", held(), zone="a"), node("m", held(), zone="b")
    what = case(request(count=2, gang="g"), nodes=there, gangs=gangs)
    assert bool(passed(what, ("r", "n", (0,)), ("r", "m", (0,)))) == passes


def test_gang_passes_only_in_one_rack_when_its_rule_names_one() -> None:
    """A node without the label is of none."""
    gangs = {"g": Gang(same=("rack",))}
    there = [
        node(name, held(), labels={"rack": rack} if rack else {})
        for name, rack in {"n": "r1", "m": "r1", "o": "r2", "p": ""}.items()
    ]
    what = case(request(count=2, gang="g"), nodes=tuple(there), gangs=gangs)
    for pair, passes in {"nm": True, "no": False, "pp": False, "np": False}.items():
        assert bool(passed(what, *(("r", name, (0,)) for name in pair))) == passes


def test_held_memory_beyond_the_card_leaves_nothing() -> None:
    """Foreign records may overcommit a card."""
    card = HeldCard(model="Tesla T4", memory_mib=T4_MIB, held_mib=2 * T4_MIB)
    what = case(request(units=1), nodes=(node("n", card),))
    assert passed(what, ("r", "n", (0,))) == []
