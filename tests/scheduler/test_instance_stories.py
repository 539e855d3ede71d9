"""Random pods through filter, queue and bind, on nodes with whole and divided cards: none overlap."""

from random import Random

import msgspec
import pytest

from fenka.cluster.objects import Pod
from tests.builders import T4_MIB, Json, node_json, pod_json
from tests.fakes.extender import ExtenderHarness
from tests.fakes.queue import stamp
from tests.mig_builders import inside_pod_json, mig_node_json, mig_pod_json

PROFILES = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb", "1g.6gb", "2g.12gb", "2x1g.5gb")


def pod_of(random: Random, name: str) -> Json:
    """Return a pod for instances, for a slice in one, or for a slice of a card."""
    namespace = random.choice("xy")
    spec = {"priority": random.choice([0, 0, 5])}
    return random.choice(
        [
            mig_pod_json(name, random.choice(PROFILES), uid=name, namespace=namespace, spec=spec),
            inside_pod_json(name, random.choice([1, 4, 9, 17, 30]), uid=name, namespace=namespace),
            pod_json(name, random.choice([2, 6, 12]), uid=name, namespace=namespace),
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_two_pods_overlap_and_nothing_of_an_ended_one_is_left(seed: int) -> None:
    """Some wait, and hold or reserve places; the columnar evaluator is compared with the definition."""
    random = Random(seed)
    cluster = ExtenderHarness(
        [
            mig_node_json("n", "A100", "T4", present={(0, "1g.5gb", 3): "foreign"}),
            mig_node_json("m", "A30", "A100"),
            node_json("k", T4_MIB),
        ]
    )
    pods: dict[str, Pod] = {}
    for step in range(80):
        cluster.now += random.choice([0.1, 1, 5, 40])
        if pods and random.random() < 0.35:
            name = random.choice(sorted(pods))
            del pods[name]
            cluster.gone(name)
            continue
        made = pod_of(random, f"p{step}")
        made["metadata"]["creationTimestamp"] = stamp(cluster.now)
        pods[f"p{step}"] = cluster.put(msgspec.convert(made, Pod))
        assert cluster.start(pods[f"p{step}"])
        for node in "nm":
            assert_apart(cluster, node)
    assert cluster.state.allocations("n") or cluster.state.allocations("m")
    cluster.gone(*pods)
    for node in "nm":
        assert not cluster.state.allocations(node)


def assert_apart(cluster: ExtenderHarness, node: str) -> None:
    """No two instances that pods hold are in one place, and none is in that of the administrator's."""
    shared = cluster.state.shared_node(node)
    assert shared is not None
    places = {card: list(taken) for card, taken in shared.division.taken.items()}
    for allocation in cluster.state.allocations(node):
        for piece in allocation.slices:
            instance = piece.instance
            divided = piece.uuid in shared.division.geometries
            assert not divided
            if instance is None:
                continue
            card = instance.card
            geometry = shared.division.geometries[card]
            place = geometry.place_of(instance)
            assert place is not None
            # Slices may share an instance.
            if place not in places[card]:
                assert not geometry.conflict(places[card], place)
                places[card].append(place)
