"""The state of divided nodes under any events: no two pods overlap, and it is as from a full list."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterState
from fenka.core.inventory import DeviceId, InstanceId
from fenka.core.mig.geometry import Geometry, Place
from fenka.core.request import Placement
from fenka.dialects import base, nodes, pod_records
from fenka.dialects.mig_records import InstanceState
from tests import builders
from tests.builders import a_pod
from tests.fakes.evaluators import ComparedEvaluator
from tests.mig_builders import MODELS, Present, inside_pod, mig_node, mig_pod

NODES: dict[str, tuple[str, ...]] = {"a": ("A100", "T4"), "b": ("A30", "A30")}
PROFILES = {
    "a": ("1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    "b": ("1g.6gb", "1g.6gb+me", "2g.12gb", "4g.24gb"),
}
UIDS = tuple(f"u{number}" for number in range(9))
SIZES = (1, 5, 9, 17)


def place_of(device: DeviceId) -> tuple[DeviceId, Place]:
    """Return the card and the place of an instance."""
    instance = InstanceId.parse(device)
    assert instance is not None
    index = int(instance.card.rpartition("-")[2])
    geometry = MODELS[NODES[instance.card.split("-")[1]][index]][0]
    assert geometry is not None
    place = geometry.place_of(instance)
    assert place is not None
    return instance.card, place


def view(state: ClusterState, name: str) -> object:
    """Return what a state shows of a node: its cards and instances, and what is used of each."""
    shared = state.shared_node(name)
    assert shared is not None
    return shared, [state.card_usage(name, card.uuid) for card in shared.node.cards]


class InstanceMachine(RuleBasedStateMachine):
    """`pods` are those that hold something, `waiting` is what their objects would be without a node."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.judge = ComparedEvaluator(self.state, "binpack")
        self.nodes: dict[str, Node] = {}
        self.present: dict[str, Present] = {"a": {}, "b": {}}
        self.tenancy = dict.fromkeys(NODES, "namespace")
        self.pods: dict[str, tuple[Pod, tuple[Placement, ...]]] = {}
        self.assumed = set[str]()
        for name in NODES:
            self._publish(name)

    def _publish(self, name: str) -> None:
        labels = {
            nodes.MIG_TENANCY: self.tenancy[name],
            nodes.WHOLE_LABEL: "true",
        }
        self.nodes[name] = mig_node(name, *NODES[name], present=self.present[name], labels=labels)
        self.state.set_node(self.nodes[name])

    # ---- events ----

    @rule(
        name=st.sampled_from(sorted(NODES)),
        card=st.integers(0, 1),
        profile=st.integers(0, 6),
        start=st.integers(0, 7),
        state=st.sampled_from(["own", "leaving", "foreign"]),
    )
    def appear(self, name: str, card: int, profile: int, start: int, state: InstanceState) -> None:
        """An instance is there, where NVML allows it: the administrator knows nothing of pods' plans."""
        geometry = MODELS[NODES[name][card]][0]
        if geometry is None:
            return
        there = {key: value for key, value in self.present[name].items() if key[0] == card}
        places = [Place(geometry.by_name[profile], start) for _, profile, start in there]
        wanted = geometry.by_name[PROFILES[name][profile % len(PROFILES[name])]]
        place = Place(wanted, start)
        if start in wanted.starts and not geometry.conflict(places, place):
            self.present[name] = {**self.present[name], (card, wanted.name, start): state}
            self._publish(name)

    @rule(name=st.sampled_from(sorted(NODES)), keep=st.integers(0, 3))
    def vanish(self, name: str, keep: int) -> None:
        """All but a few instances are gone."""
        self.present[name] = dict(list(self.present[name].items())[:keep])
        self._publish(name)

    @rule(name=st.sampled_from(sorted(NODES)))
    def create_what_pods_hold(self, name: str) -> None:
        """The node creates the instances of its pods, and destroys its own that are in the way."""
        for _, placements in self.pods.values():
            for piece in (piece for it in placements for piece in it.slices):
                card, place = place_of(piece.uuid)
                if not card.startswith(f"GPU-{name}-"):
                    continue
                others = {
                    key: state
                    for key, state in self.present[name].items()
                    if key[0] != piece.card
                    or state == "foreign"
                    or not self._conflicts(name, key, place)
                }
                foreign = [key for key in others if self._conflicts(name, key, place)]
                if not any(key[0] == piece.card for key in foreign):
                    key = piece.card, place.profile.name, place.start
                    self.present[name] = {**others, key: "own"}
        self._publish(name)

    def _conflicts(self, name: str, key: tuple[int, str, int], place: Place) -> bool:
        geometry = MODELS[NODES[name][key[0]]][0]
        assert geometry is not None
        return bool(geometry.conflict([Place(geometry.by_name[key[1]], key[2])], place))

    @rule(name=st.sampled_from(sorted(NODES)), tenancy=st.sampled_from(["namespace", "shared"]))
    def set_tenancy(self, name: str, tenancy: str) -> None:
        """It concerns later pods only."""
        if self.tenancy[name] == "namespace" and tenancy == "shared":
            self.tenancy[name] = tenancy
            self._publish(name)

    @precondition(lambda self: len(self.pods) < len(UIDS))
    @rule(
        data=st.data(),
        name=st.sampled_from(sorted(NODES)),
        profiles=st.lists(st.integers(0, 6), min_size=1, max_size=2),
    )
    def place_whole(self, data: st.DataObject, name: str, profiles: list[int]) -> None:
        """A pod that a legal layout serves is placed, any other is not."""
        names = [PROFILES[name][number % len(PROFILES[name])] for number in profiles]
        uid = data.draw(st.sampled_from(sorted(set(UIDS) - self.pods.keys())))
        servable = self._servable(name, names)
        assert self._place(mig_pod(uid, *names, uid=uid), name) == servable

    @precondition(lambda self: len(self.pods) < len(UIDS))
    @rule(
        data=st.data(),
        name=st.sampled_from(sorted(NODES)),
        gib=st.sampled_from(SIZES),
        namespace=st.sampled_from("xy"),
    )
    def place_inside(self, data: st.DataObject, name: str, gib: int, namespace: str) -> None:
        """A slice goes to an instance of its namespace, or of nobody."""
        uid = data.draw(st.sampled_from(sorted(set(UIDS) - self.pods.keys())))
        self._place(inside_pod(uid, gib, uid=uid, namespace=namespace), name)

    @rule(name=st.sampled_from(sorted(NODES)))
    def requests_of_cards_stay_off_divided_ones(self, name: str) -> None:
        """Slices and whole cards fit the T4 only. Cards count once in the reasons."""
        whole = msgspec.convert(builders.pod("whole", {base.NVIDIA_GPU: "1"}), Pod)
        for request in (a_pod("slice", 3), whole):
            placements = self.judge.placements(request, name)
            if name == "a":
                assert not isinstance(placements, Infeasible)
                assert [piece.card for it in placements for piece in it.slices] == [1]
            else:
                assert isinstance(placements, Infeasible)
                assert "no GPU fits: 2 of 2 are divided into instances" in placements.sentence
        assert self.judge.explain(a_pod("large", 99)) == (
            "no GPU fits: 3 of 4 are divided into instances, 1 has too little memory; the largest card has "
            "14 units, ask for no more"
        )

    def _place(self, pod: Pod, name: str) -> bool:
        verdicts = self.judge.evaluate(pod, [name])
        placements = self.judge.placements(pod, name)
        if isinstance(placements, Infeasible):
            assert placements.sentence
            return False
        assert len(verdicts) == 1
        before = view(self.state, name)
        self.state.assume(pod, placements)
        assert view(self.state, name) != before
        self.state.forget_assumed(pod.metadata.uid)
        assert view(self.state, name) == before
        self.state.assume(pod, placements)
        self.pods[pod.metadata.uid] = pod, placements
        self.assumed.add(pod.metadata.uid)
        return True

    @precondition(lambda self: self.assumed)
    @rule(data=st.data())
    def show_bound(self, data: st.DataObject) -> None:
        """The server shows the pod with its record."""
        uid = data.draw(st.sampled_from(sorted(self.assumed)))
        pod, placements = self.pods[uid]
        shared = self.state.shared_node(placements[0].node)
        dialect = pod.demand().dialect
        assert shared is not None
        assert dialect is not None
        records = pod_records.encode(dialect, pod.request, shared, placements, 0)
        annotations = {**pod.metadata.annotations, **records}
        metadata = msgspec.structs.replace(pod.metadata, annotations=annotations)
        spec = msgspec.structs.replace(pod.spec, node_name=placements[0].node)
        bound = msgspec.structs.replace(pod, metadata=metadata, spec=spec)
        self.state.set_pod(bound)
        self.pods[uid] = bound, placements
        self.assumed.discard(uid)

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """The pod is deleted."""
        uid = data.draw(st.sampled_from(sorted(self.pods)))
        del self.pods[uid]
        self.assumed.discard(uid)
        self.state.forget_pod(uid)

    # ---- what must hold ----

    def _held(self, name: str) -> dict[DeviceId, set[Place]]:
        held: dict[DeviceId, set[Place]] = {}
        for _, placements in self.pods.values():
            for piece in (piece for it in placements for piece in it.slices):
                card, place = place_of(piece.uuid)
                if card.startswith(f"GPU-{name}-"):
                    held.setdefault(card, set()).add(place)
        return held

    def _servable(self, name: str, names: list[str]) -> bool:
        """Return whether instances of these names can be added to what stays, tried exhaustively."""
        held, cards = self._held(name), list[tuple[Geometry, list[Place]]]()
        for index, model in enumerate(NODES[name]):
            geometry = MODELS[model][0]
            if geometry is None:
                continue
            places = set(held.get(DeviceId(f"GPU-{name}-{index}"), ()))
            places |= {
                Place(geometry.by_name[profile], start)
                for (card, profile, start), state in self.present[name].items()
                if card == index and state != "own"
            }
            cards.append((geometry, list(places)))
        return _servable(cards, names)

    @invariant()
    def held_instances_can_be_together(self) -> None:
        """No two places of a card overlap, and no card is asked for more than it has."""
        for name in NODES:
            for card, places in self._held(name).items():
                geometry = MODELS[NODES[name][int(card.rpartition("-")[2])]][0]
                assert geometry is not None
                ordered = list(places)
                assert not any(
                    geometry.conflict(ordered[:number], place)
                    for number, place in enumerate(ordered)
                )

    @invariant()
    def tenants_are_apart(self) -> None:
        """A whole instance has one holder; slices of two namespaces are together where that is allowed."""
        holders: dict[DeviceId, list[tuple[str, bool]]] = {}
        for pod, placements in self.pods.values():
            for placement in placements:
                for piece in placement.slices:
                    holder = pod.metadata.namespace, placement.whole
                    holders.setdefault(piece.uuid, []).append(holder)
        for device, found in holders.items():
            assert len(found) == 1 or not any(whole for _, whole in found)
            shared = self.tenancy[device.split("-")[1]] == "shared"
            assert shared or len({namespace for namespace, _ in found}) == 1

    @invariant()
    def state_is_that_of_a_full_list(self) -> None:
        """A state that is built from the objects agrees."""
        fresh = ClusterState(self.nodes.values())
        for uid, (pod, placements) in self.pods.items():
            if uid in self.assumed:
                fresh.assume(pod, placements)
            else:
                fresh.set_pod(pod)
        for name in NODES:
            assert view(self.state, name) == view(fresh, name)
        for uid in UIDS:
            assert self.state.allocation(uid) == fresh.allocation(uid)

    @invariant()
    def instances_that_are_shown_can_be_together(self) -> None:
        """Idle ones in the place of what a pod holds are not shown."""
        for name, models in NODES.items():
            shared = self.state.shared_node(name)
            assert shared is not None
            assert [card.model for card in shared.physical_cards] == list(models)
            by_card: dict[DeviceId, list[Place]] = {}
            for card in shared.node.cards:
                if card.parent is not None:
                    parent, place = place_of(card.uuid)
                    geometry = shared.division.geometries[parent]
                    assert not geometry.conflict(by_card.setdefault(parent, []), place)
                    by_card[parent].append(place)


def _servable(cards: list[tuple[Geometry, list[Place]]], names: list[str]) -> bool:
    if not names:
        return True
    for geometry, places in cards:
        profile = geometry.by_name.get(names[0])
        for start in profile.starts if profile else ():
            assert profile is not None
            place = Place(profile, start)
            if geometry.conflict(places, place):
                continue
            places.append(place)
            rest = _servable(cards, names[1:])
            places.pop()
            if rest:
                return True
    return False


TestInstances = InstanceMachine.TestCase
TestInstances.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
