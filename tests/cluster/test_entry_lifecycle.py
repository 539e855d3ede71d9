"""The phases of queue entries: each transition as a story, and all of them at random."""

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fenka.cluster.queue_state import (
    REQUEUE_AFTER_S,
    RESERVATION_TTL_S,
    TRANSITIONS,
    EntryLifecycle,
    Phase,
    PhaseEvent,
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
    assert {event for _, event in TRANSITIONS} == set(PhaseEvent)


def entry_in(phase: Phase) -> EntryLifecycle:
    """Return the lifecycle of entry a in this phase. Excluded and stalled ones have lost node n1."""
    entries = EntryLifecycle()
    if phase is Phase.WAITING:
        return entries
    entries.fitting({"a"}, 0)
    if phase is Phase.RESERVED:
        return entries
    if phase is Phase.EXCLUDED:
        entries.reject("a", {"n2"})
    entries.fitting({"a"}, RESERVATION_TTL_S)
    entries.expire("a", {"n1"}, "blocked")
    return entries


ACTIONS: dict[str, Callable[[EntryLifecycle], object]] = {
    "fits": lambda entries: entries.fitting({"a"}, 1),
    "fits no more": lambda entries: entries.fitting((), 1),
    "tried elsewhere": lambda entries: entries.reject("a", {"n9"}),
    "tried on n1": lambda entries: entries.reject("a", {"n1", "n9"}),
    "tried on no node": lambda entries: entries.reject("a", ()),
    "shortage": lambda entries: entries.report("a", f"1 Insufficient {GPU[0]}", GPU),
    "same message": lambda entries: entries.report("a", "blocked", GPU),
    "other message": lambda entries: entries.report("a", "1 Insufficient cpu", GPU),
    "forgotten": lambda entries: entries.forget("a"),
    "another one fits": lambda entries: entries.fitting({"b"}, 1),
    "another one is tried": lambda entries: entries.reject("b", {"n1"}),
    "another one is forgotten": lambda entries: entries.forget("b"),
}
W, R, S, X = Phase.WAITING, Phase.RESERVED, Phase.STALLED, Phase.EXCLUDED


@pytest.mark.parametrize(
    ("action", "after"),
    [
        # from:                waiting, reserved, stalled, excluded
        ("fits", (R, R, S, R)),
        ("fits no more", (W, W, S, X)),
        ("tried elsewhere", (W, R, W, X)),
        ("tried on n1", (W, R, W, W)),
        # kube-scheduler's other rules leave no node
        ("tried on no node", (W, R, W, X)),
        ("shortage", (W, R, W, X)),
        ("same message", (W, R, S, X)),
        ("other message", (W, R, S, X)),
        ("forgotten", (W, W, W, W)),
        # only those that fit hold anything
        ("another one fits", (W, W, S, X)),
        ("another one is tried", (W, R, S, X)),
        ("another one is forgotten", (W, R, S, X)),
    ],
)
def test_each_event_has_its_effect_in_each_phase(action: str, after: tuple[Phase, ...]) -> None:
    """The version changes when an entry is back in the queue or out of it: it is scheduled again then."""
    for before, expected in zip((W, R, S, X), after, strict=True):
        entries = entry_in(before)
        assert entries.phase("a") is before
        version = entries.version
        ACTIONS[action](entries)
        assert entries.phase("a") is expected, before
        if action not in ("fits", "forgotten") and before is not expected:
            assert entries.version > version
        assert entries.is_stalled("a") is (expected is S)


def test_first_expiry_is_the_earliest_of_several() -> None:
    """The timer is set by it; stalled and excluded entries hold nothing that expires."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 3)
    entries.fitting({"a", "b"}, 5)
    assert entries.next_expiry() == 3 + RESERVATION_TTL_S
    entries.fitting({"b"}, 6)
    assert entries.next_expiry() == 5 + RESERVATION_TTL_S
    assert entries.fitting({"b"}, 5 + RESERVATION_TTL_S) == {"b": 5}
    entries.expire("b", (), "")
    assert entries.next_expiry() == inf


@pytest.mark.parametrize("phase", [W, S, X])
def test_requeue_is_not_needed_when_nothing_is_reserved(phase: Phase) -> None:
    """Only an entry that fits can be bound."""
    assert not entry_in(phase).needs_requeue("a", 1e9)
    assert not entry_in(phase).needs_requeue("unknown", 1e9)


def test_requeue_is_needed_by_the_time_since_the_reservation() -> None:
    """Not by the clock itself: it was made at 100."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 100)
    assert not entries.needs_requeue("a", 100 + REQUEUE_AFTER_S / 2)
    assert entries.needs_requeue("a", 100 + REQUEUE_AFTER_S)


def test_stalled_entry_expires_no_second_time() -> None:
    """It is not in the queue; a caller that still counts it as fitting ends nothing."""
    entries = entry_in(S)
    assert entries.fitting({"a"}, 10 * RESERVATION_TTL_S) == {}
    assert entries.phase("a") is S


def test_reservation_is_made_again_from_the_time_at_which_the_entry_fits_again() -> None:
    """Another entry had the cards in between: 15 s from then."""
    entries = EntryLifecycle()
    entries.fitting({"a"}, 0)
    entries.fitting((), 10)
    entries.fitting({"a"}, 12)
    assert entries.fitting({"a"}, RESERVATION_TTL_S) == {}
    assert entries.fitting({"a"}, 12 + RESERVATION_TTL_S) == {"a": 12}


def test_nodes_add_up_when_one_after_the_other_is_not_offered() -> None:
    """Each reservation excludes one more; offering one of them does not open the others."""
    entries = entry_in(X)
    entries.fitting({"a"}, 20)
    entries.reject("a", {"n3"})
    assert entries.fitting({"a"}, 20 + RESERVATION_TTL_S) == {"a": 20}
    entries.expire("a", {"n2"}, "")
    assert entries.excluded_nodes() == {"a": frozenset({"n1", "n2"})}
    version = entries.version
    entries.reject("a", {"n2"})
    assert entries.excluded_nodes() == {"a": frozenset({"n1"})}
    assert entries.version > version


def test_rejection_before_a_reservation_does_not_count_against_it() -> None:
    """It was tried before the node was reserved: then it has only not been tried since."""
    entries = entry_in(X)
    entries.reject("a", {"n3"})
    entries.fitting({"a"}, 20)
    entries.fitting({"a"}, 20 + RESERVATION_TTL_S)
    entries.expire("a", {"n2"}, "blocked")
    assert entries.is_stalled("a")
    assert entries.excluded_nodes() == {"a": frozenset({"n1"})}
    # tried again, it is in the queue, still without n1
    entries.reject("a", {"n2"})
    assert entries.phase("a") is X
