"""Shapes of instance types: which source counts, and what is taken off."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as structs_replace

from fenka.autoscaler.node_shapes import new_shapes
from fenka.autoscaler.snapshot import Shape, UnknownShape, shape_of, without_daemons
from fenka.cluster.autoscaling import CloudType, Slot
from fenka.core.inventory import Taint, Toleration
from fenka.core.nodes.case import CaseRequest, NewCard
from fenka.core.nodes.plan import make_plan
from tests.autoscaler.snapshots import T4, T4_CARD, config, elastic_node, snapshot
from tests.autoscaler.snapshots import group as group_config
from tests.autoscaler.test_plan_case import order
from tests.builders import T4_MIB
from tests.core.nodes.builders import case, group, request

CLOUD = CloudType(
    name="ecs.gn6i-c4g1.xlarge",
    cpu_milli=4000,
    memory_mib=15000,
    cards=1,
    model="NVIDIA T4",
    card_mib=16384,
)
SEEN, CONFIGURED = Shape(cpu_milli=1, memory_mib=1), Shape(cpu_milli=2, memory_mib=2)


def test_shape_is_that_of_a_node_seen_before_anything_else() -> None:
    """Then the configuration's, then the cloud's."""
    assert shape_of("t", seen=SEEN, configured=CONFIGURED, cloud=CLOUD) is SEEN
    assert shape_of("t", configured=CONFIGURED, cloud=CLOUD) is CONFIGURED


def test_shape_is_refused_when_nobody_knows_it() -> None:
    """The sentence says where to write it."""
    with pytest.raises(UnknownShape, match=r"the shape of t is not known: say shape: for it"):
        shape_of("t")


@pytest.mark.parametrize(
    ("model", "cloud_mib", "card"),
    [
        ("NVIDIA T4", 16384, ("Tesla T4", 15079)),
        ("T4", 16384, ("Tesla T4", 15079)),
        ("NVIDIA V100", 16384, ("Tesla V100-SXM2-16GB", 16130)),
        ("NVIDIA V100", 32768, ("Tesla V100-SXM2-32GB", 32510)),
        ("Tesla T4", 15079, ("Tesla T4", 15079)),
        # A T4 of half the size is none that is known.
        ("NVIDIA T4", 8192, ("NVIDIA T4", 7536)),
        ("A10G", 24576, ("A10G", 22609)),
        ("", 1000, ("", 920)),
    ],
)
def test_card_has_the_drivers_memory_or_8_percent_less_than_the_clouds(
    model: str, cloud_mib: int, card: tuple[str, int]
) -> None:
    """By name and size, since one name has several sizes."""
    cloud = CloudType(name="x", cpu_milli=1, memory_mib=1, cards=2, model=model, card_mib=cloud_mib)
    expected = NewCard(model=card[0], memory_mib=card[1])
    assert shape_of("x", cloud=cloud).cards == (expected, expected)


def test_host_is_8_percent_less_than_the_clouds() -> None:
    """What is reserved for the system is not known before a node is there."""
    shape = shape_of("x", cloud=CLOUD)
    assert (shape.cpu_milli, shape.memory_mib, shape.pods) == (3680, 13800, 110)


def test_no_node_is_bought_when_a_pod_fits_by_the_clouds_number_only() -> None:
    """15 units are 15360 MiB, and the driver shows 14."""
    offer = replace(group(), cards=shape_of("x", cloud=CLOUD).cards)
    assert make_plan(case(request(units=15), groups=(offer,)), lambda: 1.0).nodes == ()
    assert make_plan(case(request(units=14), groups=(offer,)), lambda: 1.0).nodes != ()


def test_daemons_take_their_part_only_where_they_run() -> None:
    """One tolerates the taint, the other one does not."""
    taints = (Taint(key="gpu", effect="NoSchedule"),)
    daemons = [
        CaseRequest(
            name="agent",
            cards=0,
            cpu_milli=100,
            memory_mib=200,
            resources={"x": 1},
            tolerations=(Toleration(operator="Exists"),),
        ),
        CaseRequest(name="other", cards=0, cpu_milli=5000),
    ]
    spot = group(taints=taints, resources={"x": 1, "y": 2}, capacity="spot")
    left = without_daemons(spot, daemons)
    assert (left.cpu_milli, left.memory_mib, left.pods) == (15900, 65336, 109)
    assert left.resources == {"x": 0, "y": 2}


def test_shape_is_learnt_once_when_nodes_of_a_type_differ() -> None:
    """They have the same order; otherwise each pass would write the other one's shape."""
    nodes = [elastic_node(name, T4_MIB, provider_id=f"sim:///a/{name}") for name in ("m", "n")]
    for node, memory in zip(nodes, ("16001Mi", "16000Mi"), strict=True):
        node["status"]["allocatable"] |= {"memory": memory}
        node["metadata"]["labels"] |= {"serial": memory, "disk": "ssd"}
    slots = (Slot(state="offering", node=name, instance=name) for name in ("m", "n"))
    seen = snapshot(nodes=tuple(nodes), orders={"t4-1": order(*slots)})
    learnt = new_shapes(seen)
    assert (learnt["t4.x"].memory_mib, learnt["t4.x"].labels["disk"]) == (16000, "ssd")
    assert "serial" not in learnt["t4.x"].labels
    assert new_shapes(replace(seen, shapes=learnt)) == {}


@pytest.mark.parametrize(
    ("whole", "learnt"),
    [("0", {}), ("1", {}), ("2", {"t4.x": (T4_CARD,) * 2})],
)
def test_cards_stay_known_when_a_node_does_not_show_them(
    whole: str, learnt: dict[str, tuple[NewCard, ...]]
) -> None:
    """Of whole cards only the number is shown, and nothing while no program offers cards.

    Without its cards no node of the type would ever be bought again.
    """
    node = elastic_node("m", T4_MIB, T4_MIB, provider_id="sim:///a/m")
    node["status"]["allocatable"] |= {"aliyun.com/gpu-mem": "0", "nvidia.com/gpu": whole}
    pair = config(group_config(shape=structs_replace(T4, cards=T4.cards * 2)))
    slot = Slot(state="offering", node="m", instance="m")
    seen = snapshot(nodes=(node,), orders={"t4-1": order(slot)}, config=pair)
    assert {kind: shape.cards for kind, shape in new_shapes(seen).items()} == learnt
