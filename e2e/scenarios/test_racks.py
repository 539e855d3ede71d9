"""Test gangs on racks and zones, which labels of nodes without a kubelet name (virtual_nodes.py)."""

from collections.abc import Iterator

import pytest

from e2e.cluster import wait_until
from e2e.scenarios.containers import installed_with
from e2e.scenarios.virtual_nodes import UNITS, Json, VirtualNodes, node_object
from fenka.cluster.pod_groups import MINIMUM_LABEL, NAME_LABELS, REQUIRED_TOPOLOGY

ZONE, RACK = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack"
LEVELS = f'scheduler.topologyLevels=["{ZONE}","{RACK}"]'


@pytest.fixture
def racks(virtual: VirtualNodes) -> Iterator[VirtualNodes]:
    """Provide two zones of two racks of two nodes with two cards: a rack has four cards, and a zone eight.

    Node `z1-r2-b` is in rack r2 of zone z1; racks of equal names in two zones are two racks.
    """
    places = [(zone, rack, end) for zone in ("z1", "z2") for rack in ("r1", "r2") for end in "ab"]
    with installed_with(virtual.installation, LEVELS):
        nodes = [
            node_object("-".join(place), 2, {ZONE: place[0], RACK: place[1]}) for place in places
        ]
        virtual.add_all(2, nodes)
        wait_until("the extender knows them", lambda: len(virtual.reported_units()) == len(places))
        yield virtual


def gang(racks: VirtualNodes, name: str, size: int, **annotations: str) -> list[Json]:
    """Return the pods of a gang, each for a whole card of 16 units."""
    pods = [racks.pod(f"{name}-{number}", UNITS, annotations=annotations) for number in range(size)]
    for pod in pods:
        pod["metadata"]["labels"] = {NAME_LABELS[0]: name, MINIMUM_LABEL: str(size)}
    return pods


def rack_of(racks: VirtualNodes, name: str) -> set[str]:
    """Return the racks of a gang's placed pods."""
    return {
        node.rpartition("-")[0]
        for pod, (node, _) in racks.placed().items()
        if pod.startswith(f"{name}-")
    }


@pytest.mark.full
def test_gangs_are_in_one_rack_and_wait_where_that_is_required(racks: VirtualNodes) -> None:
    """Three cards are in one rack, eight in one zone. Five cannot be in one rack of four."""
    racks.create(*gang(racks, "small", 3))
    racks.wait_for_placed(3)
    (rack,) = rack_of(racks, "small")
    racks.create(*gang(racks, "wide", 8))
    racks.wait_for_placed(11)
    (zone,) = {other.partition("-")[0] for other in rack_of(racks, "wide")}
    assert not rack.startswith(zone)
    required = {REQUIRED_TOPOLOGY: RACK}
    racks.create(*gang(racks, "never", 5, **required))
    said = racks.wait_for_event("never-4", "4 of the gang's 5")
    assert RACK in said
    # Five cards are free: one beside the small gang, and the four of the other rack.
    racks.create(*gang(racks, "four", 4, **required))
    racks.wait_for_placed(15)
    (other,) = rack_of(racks, "four")
    assert other.partition("-")[0] == rack.partition("-")[0] != zone
    assert other != rack
    # A member that is replaced returns to the others.
    forced = ("--grace-period=0", "--force")  # no kubelet confirms its end
    racks.cluster.kubectl("-n", racks.namespace, "delete", "pod", "small-1", *forced)
    racks.create(gang(racks, "small", 3)[1])
    racks.wait_for_placed(15)
    assert rack_of(racks, "small") == {rack}
    assert racks.placed().keys().isdisjoint({f"never-{number}" for number in range(5)})
