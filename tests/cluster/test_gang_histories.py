"""Gangs under any events in any order, the end of the scheduler between two bindings among them."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fenka.cluster.gang_placement import INCOMPLETE_TTL_S, RESERVATION_TTL_S
from fenka.cluster.objects import Pod
from tests.builders import T4_MIB, a_pod, gang_labels, on_card
from tests.core.builders import device
from tests.fakes.extender import on_t4

NODES = ("a", "b", "c")


class GangMachine(RuleBasedStateMachine):
    """`cluster` is one scheduler with its memory; the pods themselves outlive it."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()
        self.gangs: dict[str, tuple[int, int]] = {}
        """The size of each gang, and the units that each of its members requests."""
        self.gang_of: dict[str, str] = {}
        self.waiting: dict[str, str] = {}
        """Members that kube-scheduler binds, by UID: their nodes. The API server has not seen it."""
        self.settled: list[str] = []
        self.cluster = on_t4(*NODES)
        self.cluster.gangs.on_settled = self.settled.append

    # ---- pods ----

    def _create(self, gang: str) -> None:
        size, units = self.gangs[gang]
        uid = f"{gang}-{next(self.ids)}"
        self.gang_of[uid] = gang
        self.cluster.put(a_pod(uid, units, uid=uid, labels=gang_labels(gang, size)))

    @precondition(lambda self: len(self.gangs) < 3)
    @rule(size=st.integers(2, 3), units=st.sampled_from([4, 7, 10, 14]))
    def create_gang(self, size: int, units: int) -> None:
        """All its members come at once."""
        gang = f"g{len(self.gangs)}"
        self.gangs[gang] = size, units
        for _ in range(size):
            self._create(gang)

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data(), again=st.booleans())
    def delete(self, data: st.DataObject, again: bool) -> None:
        """A member goes, bound or not. again: its controller makes another."""
        uid = data.draw(st.sampled_from(sorted(self.cluster.pods)))
        del self.cluster.pods[uid]
        self.cluster.state.forget_pod(uid)
        self.cluster.queue.forget_pod(uid)
        self.waiting.pop(uid, None)
        if again:
            self._create(self.gang_of[uid])
        self.cluster.gangs.expire()
        self._bind_settled(None)

    # ---- the scheduler ----

    @precondition(lambda self: self.unbound())
    @rule(
        data=st.data(),
        nodes=st.just(NODES) | st.lists(st.sampled_from(NODES), min_size=1, unique=True),
        dies_after=st.none() | st.integers(0, 2),
    )
    def schedule(self, data: st.DataObject, nodes: list[str], dies_after: int | None) -> None:
        """kube-scheduler tries a pod. dies_after: the scheduler ends after so many bindings."""
        pod = data.draw(st.sampled_from(self.unbound()))
        uid = pod.metadata.uid
        fitting = self.cluster.extender.filter(pod, list(nodes)).fitting
        if fitting:
            self.waiting[uid] = fitting[0]
            if self.cluster.gangs.arrive(pod, fitting[0]) is False:
                del self.waiting[uid]
        self._bind_settled(dies_after)

    @rule(seconds=st.sampled_from([1.0, RESERVATION_TTL_S, INCOMPLETE_TTL_S]))
    def wait(self, seconds: float) -> None:
        """Reservations expire; kube-scheduler takes back the members that were not bound."""
        self.cluster.now += seconds
        self.cluster.gangs.expire()
        self._bind_settled(None)

    @rule()
    def kill(self) -> None:
        """Another scheduler starts, with what the API server shows and nothing else."""
        pods, now = self.cluster.pods.values(), self.cluster.now
        self.waiting.clear()
        self.settled.clear()
        self.cluster = on_t4(*NODES)
        self.cluster.now = now
        self.cluster.gangs.on_settled = self.settled.append
        for pod in pods:
            self.cluster.put(pod)

    def _bind_settled(self, dies_after: int | None) -> None:
        """Bind what the barrier lets through, one request after the other."""
        keys, bindings = set(self.settled), 0
        self.settled.clear()
        for uid, node in list(self.waiting.items()):
            pod = self.cluster.pods[uid]
            if self.cluster.gangs.key(pod) not in keys:
                continue
            if bindings == dies_after:
                self.kill()
                return
            del self.waiting[uid]
            if not self.cluster.gangs.may_bind(pod, node):
                continue
            gang = self.gang_of[uid]
            size, units = self.gangs[gang]
            going = [it for it in self.waiting if self.gang_of[it] == gang]
            assert len(going) + 1 + len(self.bound(gang)) >= size
            self.cluster.bind(pod, node)
            bindings += 1
            record = {"node": node, "annotations": on_card(0, units)}
            self.cluster.put(a_pod(uid, units, uid=uid, labels=gang_labels(gang, size), **record))

    # ---- what must hold ----

    def unbound(self) -> list[Pod]:
        """Return the pods that kube-scheduler has in its queue."""
        pods = self.cluster.pods.items()
        return [it for uid, it in pods if not it.spec.node_name and uid not in self.waiting]

    def bound(self, gang: str) -> list[Pod]:
        """Return the members that run."""
        pods = self.cluster.pods.items()
        return [it for uid, it in pods if it.spec.node_name and self.gang_of[uid] == gang]

    @invariant()
    def no_card_is_overcommitted(self) -> None:
        """Neither by pods, nor by pods and reservations together."""
        for name in NODES:
            card = device(0, name)
            used = self.cluster.gangs.live.usage.card_usage(name, card).memory_mib
            assert self.cluster.state.card_usage(name, card).memory_mib <= used <= T4_MIB

    @invariant()
    def reservations_are_of_whole_gangs(self) -> None:
        """What is reserved completes the gang: two gangs never hold a half each."""
        for key, placements in self.cluster.gangs.reserved().items():
            gang = key.partition("/")[2]
            assert len(placements) + len(self.bound(gang)) >= self.gangs[gang][0]

    def teardown(self) -> None:
        """A gang that stays incomplete is restarted as a whole."""
        self.kill()
        self.cluster.gangs.incomplete_gangs()
        self.cluster.now += INCOMPLETE_TTL_S
        evicted = {it.metadata.uid for it in self.cluster.gangs.incomplete_gangs()}
        for gang, (size, _) in self.gangs.items():
            bound = {it.metadata.uid for it in self.bound(gang)}
            assert bound & evicted == (bound if len(bound) < size else set())


TestGangs = GangMachine.TestCase
TestGangs.settings = settings(max_examples=80, stateful_step_count=40)
