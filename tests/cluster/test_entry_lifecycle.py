"""The phases of queue entries: each transition as a story, and all of them at random."""

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fenka.cluster.entry_lifecycle import (
    REQUEUE_AFTER_S,
    RESERVATION_TTL_S,
    TRANSITIONS,
    EntryLifecycle,
    Event,
    Phase,
)

GPU = ("aliyun.com/gpu-mem",)


def test_entry_is_waiting_when_unknown() -> None:
    """Nothing is recorded of entries that neither fit nor were excluded from nodes."""
    assert EntryLifecycle().phase("a") is Phase.WAITING


def test_entry_is_reserved_when_it_fits_and_waiting_when_it_does_not() -> None:
    """Another module decides what fits."""
    entries = EntryLifecycle()
    assert entries.fitting({"a"}, 0) == {}
    assert entries.phase("a") is Phase.RESERVED
    assert entries.next_expiry() == RESERVATION_TTL_S
    entries.fitting((), 1)
    assert entries.phase("a") is Phase.WAITING
    assert entries.next_expiry() == inf


def test_entry_stalls_when_kube_scheduler_does_not_try_it() -> None:
    """Its reservation expires, and it is out of the queue until it is tried."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 0)
    assert entries.fitting({"a"}, RESERVATION_TTL_S - 1) == {}
    assert entries.fitting({"a"}, RESERVATION_TTL_S) == {"a": 0}
    entries.expire("a", {"n1"}, "node affinity")
    assert entries.is_stalled("a")
    assert entries.excluded_nodes() == {}
    version = entries.version
    assert entries.reject("a", {"n2"})
    assert entries.phase("a") is Phase.WAITING
    assert entries.version > version


def test_nodes_are_excluded_when_kube_scheduler_tried_the_entry_without_them() -> None:
    """They may be offered again one by one."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 0)
    assert not entries.reject("a", {"n3"})
    assert entries.fitting({"a"}, RESERVATION_TTL_S) == {"a": 0}
    entries.expire("a", {"n1", "n2"}, "")
    assert entries.phase("a") is Phase.EXCLUDED
    assert entries.excluded_nodes() == {"a": frozenset({"n1", "n2"})}
    entries.reject("a", {"n1"})
    assert entries.phase("a") is Phase.EXCLUDED
    entries.reject("a", {"n2", "n3"})
    assert entries.phase("a") is Phase.WAITING


def test_excluded_nodes_stay_when_another_node_is_reserved_and_lost() -> None:
    """The entry returns to EXCLUDED, not to WAITING."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 0)
    entries.reject("a", ())
    entries.fitting({"a"}, RESERVATION_TTL_S)
    entries.expire("a", {"n1"}, "")
    entries.fitting({"a"}, RESERVATION_TTL_S)
    assert entries.phase("a") is Phase.RESERVED
    entries.fitting((), RESERVATION_TTL_S)
    assert entries.phase("a") is Phase.EXCLUDED


def test_stalled_entry_returns_when_kube_scheduler_reports_a_shortage() -> None:
    """The message must be new, and about a resource that fenka places."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 0)
    entries.fitting({"a"}, RESERVATION_TTL_S)
    entries.expire("a", {"n1"}, "Insufficient aliyun.com/gpu-mem")
    assert not entries.report("a", "Insufficient aliyun.com/gpu-mem", GPU)
    assert not entries.report("a", "Insufficient cpu", GPU)
    assert entries.report("a", "2 Insufficient aliyun.com/gpu-mem", GPU)
    assert not entries.is_stalled("a")


def test_requeue_is_needed_once_when_an_entry_has_fitted_for_a_while() -> None:
    """A new reservation may need it again."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 0)
    assert not entries.needs_requeue("a", REQUEUE_AFTER_S / 2)
    assert entries.needs_requeue("a", REQUEUE_AFTER_S)
    entries.mark_requeued("a")
    assert not entries.needs_requeue("a", REQUEUE_AFTER_S)
    entries.fitting((), 1)
    entries.fitting({"a"}, 1)
    assert entries.needs_requeue("a", 1 + REQUEUE_AFTER_S)


class LifecycleMachine(RuleBasedStateMachine):
    """Any events in any order; the phases are consistent after each of them."""

    ids = st.sampled_from(["a", "b", "c"])
    nodes = st.frozensets(st.sampled_from(["n1", "n2", "n3"]))

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.now = EntryLifecycle(), 0.0
        self.fitted: frozenset[str] = frozenset()
        self.before: dict[str, Phase] = {}

    @rule(
        fitting=st.frozensets(ids),
        after=st.sampled_from([0.0, 0.5, 5.0, RESERVATION_TTL_S]),
        reserved=nodes.filter(bool),
    )
    def schedule(self, fitting: frozenset[str], after: float, reserved: frozenset[str]) -> None:
        """Schedule the queue, in which stalled entries are missing."""
        self.now += after
        self.fitted = frozenset(it for it in fitting if not self.entries.is_stalled(it))
        for entry_id, since in self.entries.fitting(self.fitted, self.now).items():
            assert self.now - since >= RESERVATION_TTL_S
            self.entries.expire(entry_id, reserved, "blocked")
            self.fitted -= {entry_id}

    @rule(entry_id=ids, offered=nodes)
    def reject(self, entry_id: str, offered: frozenset[str]) -> None:
        """Have kube-scheduler try an entry."""
        stalled = self.entries.is_stalled(entry_id)
        assert self.entries.reject(entry_id, offered) == stalled
        assert offered.isdisjoint(self.entries.excluded_nodes().get(entry_id, frozenset()))

    @rule(entry_id=ids, message=st.sampled_from(["blocked", f"Insufficient {GPU[0]}", "taint"]))
    def report(self, entry_id: str, message: str) -> None:
        """Change the pod's condition."""
        stalled = self.entries.is_stalled(entry_id)
        shortage = message.startswith("Insufficient")
        assert self.entries.report(entry_id, message, GPU) == (stalled and shortage)

    @rule(entry_id=ids)
    def forget(self, entry_id: str) -> None:
        """Bind or delete the entry."""
        self.entries.forget(entry_id)
        self.fitted -= {entry_id}
        self.before.pop(entry_id, None)

    @invariant()
    def reserved_entries_are_those_that_fit(self) -> None:
        """No reservation outlives its TTL, and none is lost."""
        phases = {it: self.entries.phase(it) for it in ("a", "b", "c")}
        assert {it for it, phase in phases.items() if phase is Phase.RESERVED} == self.fitted
        assert self.entries.next_expiry() > self.now or not self.fitted

    @invariant()
    def excluded_means_that_nodes_are_excluded(self) -> None:
        """Nodes are excluded exactly for entries in this phase, or for one reserved elsewhere."""
        for entry_id in ("a", "b", "c"):
            excluded, phase = (
                self.entries.excluded_nodes().get(entry_id),
                self.entries.phase(entry_id),
            )
            assert excluded or phase is not Phase.EXCLUDED
            assert not excluded or phase is not Phase.WAITING

    @invariant()
    def only_transitions_of_the_table_happen(self) -> None:
        """An entry may take two in one rule: its reservation expires, and it fits elsewhere."""
        steps = {(source, target) for (source, _), target in TRANSITIONS.items()}
        steps |= {(source, Phase.EXCLUDED) for source, target in steps if target is Phase.WAITING}
        for entry_id, before in self.before.items():
            after = self.entries.phase(entry_id)
            assert (
                after is before
                or (before, after) in steps
                or any((before, mid) in steps and (mid, after) in steps for mid in Phase)
            )
        self.before = {it: self.entries.phase(it) for it in ("a", "b", "c")}


TestLifecycle = LifecycleMachine.TestCase


def test_every_event_is_in_the_table_when_listed() -> None:
    """No event without an effect."""
    assert {event for _, event in TRANSITIONS} == set(Event)
