"""The state of the cluster under any events in any order: consistent, and as from a full list."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.cluster.node_admission import Infeasible
from fenka.cluster.objects import Condition, Node, Pod
from fenka.cluster.placement import PodEvaluator
from fenka.cluster.state import ClusterState, PodAllocation
from fenka.core.inventory import DeviceId
from fenka.core.request import Placement, Slice
from fenka.core.usage import NO_USAGE, CardUsage
from fenka.dialects import base, gpushare, lease_records, nodes
from fenka.dialects.lease_records import LeaseReport, Lingering
from tests.builders import GIB, T4_MIB, a_node, a_pod, on_card
from tests.core.builders import device

NODES = ("a", "b")
SIZES = (T4_MIB, 7611, 16384)
UIDS = tuple(f"u{number}" for number in range(4))
RECORDS: dict[str, dict[str, str]] = {
    "none": {},
    "card 0": on_card(0, 4),
    "card 1": on_card(1, 4),
    "card 2": on_card(2, 4),
    "another node's card": {**on_card(0, 4), base.CARDS: '{"0":"GPU-former"}'},
    "a card that is not there": on_card(9, 4),
    "more than it requests": {gpushare.ALLOCATION: '{"0":{"0":14,"1":7}}'},
    "nonsense": {gpushare.ALLOCATION: "x"},
}
LABELS: tuple[dict[str, str], ...] = (
    {},
    {"gpushare": "true"},
    {"gpushare": "false"},
    {"gpushare": "true", "cgpu": "false"},
    {nodes.MODE_LABEL: "core_mem"},
    {nodes.PLACEMENT_LABEL: "spread"},
)
slices = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 4308, T4_MIB]), st.sampled_from([0, 100])),
    max_size=2,
    unique_by=lambda it: it[0],
)


def reported(node: str, parts: list[tuple[int, int, int]]) -> tuple[Slice, ...]:
    """Return these slices, as the program of the node reports them."""
    return tuple(Slice(card, device(card, node), mib, compute) for card, mib, compute in parts)


def totals(allocations: list[PodAllocation]) -> dict[DeviceId, CardUsage]:
    """Add up allocations without the code of the core."""
    usage: dict[DeviceId, CardUsage] = {}
    for allocation in allocations:
        for placement in allocation.placements:
            for piece in placement.slices:
                known = usage.get(piece.uuid, NO_USAGE)
                usage[piece.uuid] = CardUsage(
                    known.memory_mib + piece.memory_mib,
                    known.compute + piece.compute,
                    known.holders + 1,
                    known.whole + placement.whole,
                )
    return usage


class StateMachine(RuleBasedStateMachine):
    """`nodes`, `pods`, `assumed` and `unhealthy` are what the state was told, and nothing else is true."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.changed = set[str]()
        self.state.watch(self.changed)
        self.judge = PodEvaluator(self.state, "binpack")
        self.nodes: dict[str, Node] = {}
        self.reports: dict[str, LeaseReport] = {}
        self.unhealthy: dict[str, frozenset[int]] = {}
        self.pods: dict[str, Pod] = {}
        self.assumed: dict[str, tuple[Placement, ...]] = {}
        self.written: dict[str, tuple[Placement, ...]] = {}
        self.before: dict[str, object] = {}
        self.versions: dict[str, int] = {}
        for name in NODES:
            self.set_node(name, 3, {}, frozenset(), "")
        self.bind("u0", 4, "card 0", "a")
        self.bind("u1", 8, "card 1", "b")

    # ---- nodes ----

    @rule(
        name=st.sampled_from(NODES),
        cards=st.integers(0, 3),
        labels=st.sampled_from(LABELS),
        cordoned=st.frozensets(st.integers(0, 2)),
        unreadable=st.sampled_from(["", "", "", "{", "[]"]),
    )
    def set_node(
        self,
        name: str,
        cards: int,
        labels: dict[str, str],
        cordoned: frozenset[int],
        unreadable: str,
    ) -> None:
        """Cards go and come back, labels change, the inventory may be nonsense; the report stays."""
        annotations = {nodes.CORDONED: ",".join(map(str, sorted(cordoned)))}
        if unreadable:
            annotations[base.CARDS] = unreadable
        report = self.reports.get(name)
        if report is not None:
            annotations[lease_records.REPORT] = lease_records.encode_report(report)
        self.nodes[name] = a_node(name, *SIZES[:cards], labels=labels, annotations=annotations)
        self.state.set_node(self.nodes[name])

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), ready=st.sampled_from(["True", "False", "Unknown"]))
    def set_ready(self, data: st.DataObject, ready: str) -> None:
        """The kubelet or the node controller says how the node is."""
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        condition = msgspec.convert({"type": "Ready", "status": ready}, Condition)
        status = msgspec.structs.replace(self.nodes[name].status, conditions=[condition])
        self.nodes[name] = msgspec.structs.replace(self.nodes[name], status=status)
        self.state.set_node(self.nodes[name])

    @rule(name=st.sampled_from(NODES))
    def forget_node(self, name: str) -> None:
        """The pods' bindings stay; the report was on the node."""
        self.nodes.pop(name, None)
        self.reports.pop(name, None)
        self.state.forget_node(name)

    @rule(gone=st.none() | st.sampled_from(NODES))
    def replace_nodes(self, gone: str | None) -> None:
        """List the nodes again: those that are not in the list are gone."""
        if gone is not None:
            self.nodes.pop(gone, None)
            self.reports.pop(gone, None)
        self.state.replace_nodes(self.nodes.values())

    @rule(name=st.sampled_from(NODES), indexes=st.frozensets(st.integers(0, 2)))
    def set_unhealthy(self, name: str, indexes: frozenset[int]) -> None:
        """A health daemon names cards, also of a node that is unknown."""
        self.unhealthy[name] = indexes
        self.state.set_unhealthy(name, indexes)

    @precondition(lambda self: self.nodes)
    @rule(
        data=st.data(),
        pods=st.dictionaries(st.sampled_from(UIDS), slices, max_size=2),
        lingering=st.dictionaries(st.sampled_from(UIDS), slices, max_size=2),
        readable=st.booleans(),
    )
    def report(
        self,
        data: st.DataObject,
        pods: dict[str, list[tuple[int, int, int]]],
        lingering: dict[str, list[tuple[int, int, int]]],
        readable: bool,
    ) -> None:
        """The node program reports, in a version that is understood or not."""
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        report = LeaseReport(
            {uid: reported(name, parts) for uid, parts in pods.items()},
            {uid: Lingering(f"ns/{uid}", reported(name, it)) for uid, it in lingering.items()},
        )
        self.reports.pop(name, None)
        text = "newer"
        if readable:
            self.reports[name] = report
            text = lease_records.encode_report(report)
        node = self.nodes[name]
        annotations = {**node.metadata.annotations, lease_records.REPORT: text}
        metadata = msgspec.structs.replace(node.metadata, annotations=annotations)
        self.nodes[name] = msgspec.structs.replace(node, metadata=metadata)
        self.state.set_node(self.nodes[name])

    # ---- pods ----

    @rule(
        uid=st.sampled_from(UIDS),
        units=st.sampled_from([0, 4, 8]),
        record=st.sampled_from(sorted(RECORDS)),
        name=st.sampled_from(NODES),
    )
    def bind(self, uid: str, units: int, record: str, name: str) -> None:
        """The server shows a pod on a node, with whatever its owner has written."""
        known = self.pods.get(uid)
        if known is not None and known.spec.node_name:
            # A pod's limits and node never change.
            name, units = known.spec.node_name, _limit(known)
        elif known is not None:
            units = _limit(known)
        self.pods[uid] = a_pod(uid, units, uid=uid, node=name, annotations=RECORDS[record])
        assumed = self.assumed.pop(uid, None)
        if assumed is not None and assumed[0].node != name:
            del self.written[uid]
        self.state.set_pod(self.pods[uid])

    @precondition(lambda self: self.assumed)
    @rule(data=st.data(), record=st.sampled_from(sorted(RECORDS)), name=st.sampled_from(NODES))
    def show_bound(self, data: st.DataObject, record: str, name: str) -> None:
        """The server shows an assumed pod bound, perhaps by another scheduler to another node."""
        self.bind(data.draw(st.sampled_from(sorted(self.assumed))), 0, record, name)

    @precondition(lambda self: len(self.pods) < len(UIDS))
    @rule(data=st.data(), units=st.sampled_from([4, 4, 8]), name=st.sampled_from(NODES))
    def assume(self, data: st.DataObject, units: int, name: str) -> None:
        """The scheduler is about to bind a pod."""
        uid = data.draw(st.sampled_from(sorted(set(UIDS) - self.pods.keys())))
        pod = a_pod(uid, units, uid=uid)
        placements = self.judge.placements(pod, name)
        if not isinstance(placements, Infeasible) and placements:
            usage = self.usage(name)
            self.state.assume(pod, placements)
            assert self.usage(name) != usage
            self.state.forget_assumed(uid)
            assert self.usage(name) == usage
            self.state.assume(pod, placements)
            self.pods[uid], self.assumed[uid] = pod, placements
            self.written[uid] = placements

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def forget_assumed(self, data: st.DataObject) -> None:
        """The binding failed; what the server shows bound meanwhile stays."""
        uid = data.draw(st.sampled_from(sorted(self.pods)))
        if self.assumed.pop(uid, None) is not None:
            del self.pods[uid], self.written[uid]
        self.state.forget_assumed(uid)

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), how=st.sampled_from(["Succeeded", "Failed", "deleted", "not listed"]))
    def end(self, data: st.DataObject, how: str) -> None:
        """A pod is gone, also one whose binding runs, or has ended and holds nothing any more."""
        uid = data.draw(st.sampled_from(sorted(self.pods)))
        pod = self._drop(uid)
        if how == "deleted":
            self.state.forget_pod(uid)
        elif how == "not listed":
            self.state.replace_pods(self.pods.values())
        else:
            node = pod.spec.node_name or "a"
            self.state.set_pod(a_pod(uid, _limit(pod), uid=uid, node=node, phase=how))

    @rule()
    def list_pods(self) -> None:
        """The same pods again."""
        self.state.replace_pods(self.pods.values())

    def _drop(self, uid: str) -> Pod:
        self.assumed.pop(uid, None)
        self.written.pop(uid, None)
        return self.pods.pop(uid)

    # ---- invariants ----

    def usage(self, name: str) -> list[CardUsage]:
        """Return what is held of the cards that a node can have."""
        return [self.state.card_usage(name, device(index, name)) for index in range(3)]

    @invariant()
    def usage_is_the_sum_of_allocations(self) -> None:
        """Nothing counts twice, and nothing is negative."""
        for name in NODES:
            expected = totals(self.state.allocations(name))
            assert self.usage(name) == [
                expected.pop(device(index, name), NO_USAGE) for index in range(3)
            ]
            assert not expected
            assert self.state.host_usage(name) == (0, 0)

    @invariant()
    def allocations_are_those_of_a_full_list(self) -> None:
        """A state that is built from what is true now agrees, but for pods whose record is unreadable now.

        Of these the last readable record counts, which a new state has never seen.
        """
        fresh = ClusterState(self.nodes.values())
        for name, indexes in self.unhealthy.items():
            fresh.set_unhealthy(name, indexes)
        for uid, placements in self.written.items():
            fresh.assume(self.pods[uid], placements)
        for pod in self.pods.values():
            fresh.set_pod(pod)
        for name in NODES:
            assert self.state.shared_node(name) == fresh.shared_node(name)
            assert self.state.node_error(name) == fresh.node_error(name)
        for uid in UIDS:
            found, expected = self.state.allocation(uid), fresh.allocation(uid)
            if expected is None or expected.error is None:
                assert found == expected
            else:
                assert found is not None
                assert msgspec.structs.replace(found, placements=()) == msgspec.structs.replace(
                    expected, placements=()
                )

    @invariant()
    def report_precedes_the_scheduler_and_that_the_record(self) -> None:
        """By its record a pod counts for no more than its limits, and only on cards that are there."""
        for name in NODES:
            shared = self.state.shared_node(name)
            cards = {card.uuid: card for card in shared.node.cards} if shared else {}
            report = self.reports.get(name, LeaseReport())
            for allocation in self.state.allocations(name):
                uid = allocation.pod.metadata.uid
                if uid in self.assumed and not allocation.lingering:
                    assert allocation.placements == self.assumed[uid]
                    continue
                assert {piece.uuid for piece in allocation.slices} <= cards.keys()
                certain = self._certain_slices(allocation, report)
                if certain is not None:
                    assert set(allocation.slices) == {it for it in certain if it.uuid in cards}
                    continue
                unit = max(card.memory_mib / (card.memory_mib // GIB) for card in cards.values())
                held = sum(piece.memory_mib for piece in allocation.slices)
                assert held <= _limit(allocation.pod) * unit

    def _certain_slices(
        self, allocation: PodAllocation, report: LeaseReport
    ) -> tuple[Slice, ...] | None:
        """Return what the node or the scheduler says that a pod holds; None if its own record counts."""
        uid = allocation.pod.metadata.uid
        if allocation.lingering:
            return report.lingering[uid].slices
        if uid in report.pods:
            return report.pods[uid]
        return self.written[uid][0].slices if uid in self.written else None

    @invariant()
    def lingering_pods_are_those_that_only_the_node_shows(self) -> None:
        """A pod that the server shows there is counted once."""
        for name in NODES:
            shown = {
                uid
                for uid, pod in self.pods.items()
                if (self.assumed[uid][0].node if uid in self.assumed else pod.spec.node_name)
                == name
            }
            report = self.reports.get(name, LeaseReport())
            expected = report.lingering.keys() - shown if self.state.shared_node(name) else set()
            lingering = [it for it in self.state.allocations(name) if it.lingering]
            assert {it.pod.metadata.uid for it in lingering} == expected

    @invariant()
    def versions_change_with_what_they_stand_for(self) -> None:
        """Columns and the queue follow the nodes that are named, and these numbers."""
        for name in NODES:
            verdict = self.state.shared_node(name), self.state.node_error(name), self.usage(name)
            assert self.before.get(name, verdict) == verdict or name in self.changed
            self.before[name] = verdict
        self.changed.clear()
        nodes = [
            (self.state.shared_node(name), self.state.node_error(name), _eligible(self.nodes, name))
            for name in NODES
        ]
        self._changes("nodes", nodes, self.state.nodes_version)
        usage = [self.usage(name) for name in NODES]
        self._changes("all", (nodes, usage), self.state.version)

    def _changes(self, what: str, now: object, version: int) -> None:
        if what in self.before and self.before[what] != now:
            assert self.versions[what] != version, what
        self.before[what], self.versions[what] = now, version

    def teardown(self) -> None:
        """Nothing is held when nobody is left."""
        for uid in list(self.pods):
            self._drop(uid)
            self.state.forget_pod(uid)
        self.reports.clear()
        for name in NODES:
            self.set_node(name, 3, {}, frozenset(), "")
            assert self.state.allocations(name) == []
            assert self.usage(name) == [NO_USAGE] * 3
            self.state.set_unhealthy(name, frozenset())
            self.state.forget_node(name)
        kept = {name: value for name, value in vars(self.state).items() if isinstance(value, dict)}
        assert not any(kept.values()), kept


def _limit(pod: Pod) -> int:
    """Return the units that a pod's one container may have."""
    return pod.amount(gpushare.MEMORY)


def _eligible(nodes: dict[str, Node], name: str) -> object:
    node = nodes.get(name)
    return node and (node.metadata.labels, node.spec, node.readiness)


TestState = StateMachine.TestCase
TestState.settings = settings(max_examples=80, stateful_step_count=40)
