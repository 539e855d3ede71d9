"""Whatever comes in whatever order: nothing is overcommitted, and the world is as from a full list."""

import itertools
import json
from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Node, Pod
from fenka.cluster.state import ClusterState
from fenka.core.request import Placement
from fenka.core.units import units_to_mib
from fenka.dialects import base, gpushare, nodes
from tests.builders import GIB, T4_MIB, a_node, a_pod
from tests.core.builders import device
from tests.fakes.evaluators import ComparedEvaluator

NAMES = ("a", "b")
SIZES = (T4_MIB, 7611, 16 * GIB)


class Machine(RuleBasedStateMachine):
    """`unbound`, `sent` and `bound` are the truth; `seen`, `assumed` and `nodes` what the world was told."""

    def __init__(self) -> None:
        super().__init__()
        self.world = ClusterState()
        self.judge = ComparedEvaluator(self.world, "binpack")
        self.ids = itertools.count()
        self.unbound: dict[str, Pod] = {}
        self.sent: dict[str, tuple[Pod, Placement]] = {}
        self.assumed: dict[str, tuple[Pod, Placement]] = {}
        self.written: dict[str, tuple[Pod, Placement]] = {}
        self.bound: dict[str, Pod] = {}
        self.seen: dict[str, Pod] = {}
        self.nodes: dict[str, Node] = {}
        self.sick: dict[str, frozenset[int]] = {}
        for name in NAMES:
            self.set_node(name, 3, frozenset(), "")

    # ---- the API server ----

    @rule(units=st.integers(1, 14), cards=st.sampled_from([1, 1, 2]), init=st.integers(0, 16))
    def create(self, units: int, cards: int, init: int) -> None:
        """A pod that nobody has placed."""
        uid = f"u{next(self.ids)}"
        labels = {gpushare.COUNT: str(cards)} if cards > 1 else {}
        # Names are used again, UIDs are not.
        name = f"web-{int(uid[1:]) % 3}"
        self.unbound[uid] = a_pod(
            name, units * cards, uid=uid, labels=labels, init=(init * cards,) if init else ()
        )

    @precondition(lambda self: self.unbound)
    @rule(data=st.data(), node=st.sampled_from(NAMES))
    def send(self, data: st.DataObject, node: str) -> None:
        """A binding begins: what is assumed must have room beside all that truly is there."""
        uid = data.draw(st.sampled_from(sorted(self.unbound)))
        placements = self.judge.placements(self.unbound[uid], node)
        if isinstance(placements, Infeasible) or not placements:
            return
        (placement,) = placements
        share = self.world.shared_node(node)
        assert share is not None
        cards = {card.index: card for card in share.node.cards}
        for piece in placement.slices:
            card = cards[piece.card]
            assert self.truly_held(node, piece.card) + piece.memory_mib <= card.memory_mib
            assert card.healthy
            assert not card.cordoned
        pod = self.unbound.pop(uid)
        self.world.assume(pod, placements)
        self.sent[uid] = self.assumed[uid] = self.written[uid] = pod, placement

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), done=st.booleans())
    def answer(self, data: st.DataObject, done: bool) -> None:
        """The server has bound it, or never will."""
        uid = data.draw(st.sampled_from(sorted(self.sent)))
        pod, placement = self.sent.pop(uid)
        if not done:
            before = self.others(placement.node, uid)
            self.world.forget_assumed(uid)
            assert self.others(placement.node, uid) == before
            assert not self.world.is_assumed(uid)
            del self.assumed[uid], self.written[uid]
            self.unbound[uid] = pod
            return
        share = self.world.shared_node(placement.node)
        unit = share or nodes.decode_node(placement.node, *self.first(placement.node))
        assert unit is not None
        copied = a_pod(
            pod.metadata.name,
            *[
                ask.units
                for ask in pod.request.container_units(gpushare.MEMORY)
                if ask.kind is base.ContainerKind.APP
            ],
            node=placement.node,
            uid=uid,
            labels=pod.metadata.labels,
            init=tuple(
                ask.units
                for ask in pod.request.container_units(gpushare.MEMORY)
                if ask.kind is base.ContainerKind.INIT
            ),
            annotations=gpushare.encode_placement(
                unit, placement, pod.request.container_units(gpushare.MEMORY), 1
            ),
        )
        self.bound[uid] = copied

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Gone from the server; the world has not heard."""
        del self.bound[data.draw(st.sampled_from(sorted(self.bound)))]

    # ---- what the world is told, in any order ----

    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        """One pod as it is, or that it is gone."""
        there = self.there()
        known = sorted({*there, *self.seen, *self.assumed})
        if not known:
            return
        uid = data.draw(st.sampled_from(known))
        if uid in there:
            self.seen[uid] = there[uid]
            self.world.set_pod(there[uid])
        else:
            self.seen.pop(uid, None)
            self.written.pop(uid, None)
            self.world.forget_pod(uid)
        if uid in self.bound or uid not in there:
            self.assumed.pop(uid, None)

    @rule()
    def resync(self) -> None:
        """A full list."""
        self.seen = self.there()
        self.assumed = {uid: it for uid, it in self.assumed.items() if uid in self.sent}
        self.written = {uid: it for uid, it in self.written.items() if uid in self.seen}
        self.world.replace_pods(self.seen.values())

    @rule(
        name=st.sampled_from(NAMES),
        cards=st.integers(1, 3),
        cordoned=st.sets(st.integers(0, 2)).map(frozenset),
        label=st.sampled_from(["", "", "true", "false"]),
    )
    def set_node(self, name: str, cards: int, cordoned: frozenset[int], label: str) -> None:
        """Cards go and come back, are cordoned; labels flip."""
        node = a_node(
            name,
            *SIZES[:cards],
            labels={"gpushare": label} if label else {},
            annotations={nodes.CORDONED: ",".join(map(str, cordoned))},
        )
        self.nodes[name] = node
        self.world.set_node(node)

    @rule(name=st.sampled_from(NAMES))
    def forget_node(self, name: str) -> None:
        """Its pods' claims stay."""
        self.nodes.pop(name, None)
        self.world.forget_node(name)

    @rule(name=st.sampled_from(NAMES), indexes=st.sets(st.integers(0, 2)).map(frozenset))
    def fall_sick(self, name: str, indexes: frozenset[int]) -> None:
        """By gpushare's ConfigMap."""
        self.sick[name] = indexes
        self.world.set_unhealthy(name, indexes)

    # ---- truth ----

    def first(self, name: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The node with all its cards."""
        node = a_node(name, *SIZES)
        return node.metadata.annotations, node.status.allocatable

    def there(self) -> dict[str, Pod]:
        """The server's list."""
        waiting = {uid: pod for uid, (pod, _) in self.sent.items()}
        return {**self.unbound, **waiting, **self.bound}

    def truly_held(self, node: str, card: int) -> int:
        """MiB, by the records alone."""
        total = 0
        for pod in self.bound.values():
            if pod.spec.node_name == node:
                cards = {int(it) for it in json.loads(pod.metadata.annotations[base.CARDS])}
                units = gpushare.peak_units(pod.request.container_units(gpushare.MEMORY)) // len(
                    cards
                )
                if card in cards:
                    total += units_to_mib(units, SIZES[card], GIB)
        for _, placement in self.sent.values():
            if placement.node == node:
                total += sum(it.memory_mib for it in placement.slices if it.card == card)
        return total

    def others(self, node: str, uid: str) -> list[str]:
        """Who else holds of the node."""
        uids = [it.pod.metadata.uid for it in self.world.allocations(node)]
        return [it for it in uids if it != uid]

    @invariant()
    def the_same_as_from_a_full_list(self) -> None:
        """And nothing below nothing."""
        fresh = ClusterState(self.nodes.values())
        for name, indexes in self.sick.items():
            fresh.set_unhealthy(name, indexes)
        # What it has placed itself it remembers, whatever records say.
        for pod, placement in self.written.values():
            fresh.assume(pod, (placement,))
        for pod in self.seen.values():
            fresh.set_pod(pod)
        for name, card in itertools.product(NAMES, range(3)):
            assert self.world.card_usage(name, device(card, name)) == fresh.card_usage(
                name, device(card, name)
            )
            assert self.world.card_usage(name, device(card, name)).memory_mib >= 0


TestWorld = Machine.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=40)
