"""What namespaces use, by the times of their pods: while they are watched, and after a restart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.cluster.objects import Pod
from fenka.cluster.queue_state import UsageAccounting
from fenka.cluster.state import ClusterState
from fenka.core.queue import Fairness
from fenka.core.request import Placement
from fenka.dialects import lease_records
from fenka.dialects.lease_records import LeaseReport
from tests.builders import GIB, Json, a_node, on_card
from tests.core.builders import piece
from tests.fakes.queue import START, make, stamp

NODE = a_node("n", 14 * GIB, 14 * GIB)


class Accounts:
    """An accounting and the cluster's state, which hears of pods first. Times are seconds after START."""

    def __init__(self, half_life_s: float = 1e12, node: bool = True) -> None:
        self.state = ClusterState([NODE] if node else [])
        self.accounting = UsageAccounting(self.state, Fairness(half_life_s=half_life_s))

    def set(self, now: float, *pods: Pod) -> None:
        """Bring pods, as the informer does."""
        for pod in pods:
            self.state.set_pod(pod)
            self.accounting.set(pod, START + now)

    def forget(self, now: float, name: str) -> None:
        """Report that a pod was deleted."""
        self.state.forget_pod(name)
        self.accounting.forget(name, START + now)

    def used(self, now: float) -> dict[str, float]:
        """Return the card-seconds of each namespace, rounded."""
        used = self.accounting.uses.used(START + now)
        return {namespace: round(seconds, 3) for namespace, seconds in used.items()}


def pod(
    name: str,
    started: float | None,
    *,
    units: int = 7,
    ended: float | None = None,
    phase: str = "",
    at: float = 0,
    namespace: str = "a",
) -> Pod:
    """Return a pod on card 0 of node n, created at `at`; with `ended` it has finished then."""
    status: Json = {"phase": phase or ("Running" if ended is None else "Succeeded")}
    if ended is not None:
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": stamp(ended)}
        status["conditions"] = [ready]
    status["startTime"] = stamp(started) if started is not None else ""
    given: Json = {"node": "n", "annotations": on_card(0, units)}
    return make(name, units, at, namespace=namespace, said=status, **given)


@pytest.mark.parametrize(
    ("seen", "now", "expected"),
    [
        # 7 of 14 units are half a card: 0.5 * (300 - 100)
        (pod("p", 100), 300, 100),
        (pod("p", 100, units=14), 300, 200),
        # not started by the kubelet yet: from when it was seen, at 200
        (pod("p", None), 300, 50),
        # a clock before the pod's creation, at 150: 0.5 * (300 - 150)
        (pod("p", 100, at=150), 300, 75),
        # a clock ahead of ours counts nothing before it is seen
        (pod("p", 900), 300, 50),
        # ended before it was first seen, at 160: 0.5 * (160 - 100)
        (pod("p", 100, ended=160), 300, 30),
        # nobody knows when it ended, or that it ever started
        (pod("p", 100, phase="Failed"), 300, 0),
        (pod("p", None, ended=160), 300, 0),
        # a pod without a card
        (pod("p", 100, units=0), 300, 0),
    ],
)
def test_use_counts_from_the_start_to_the_end_when_a_pod_is_first_seen(
    seen: Pod, now: float, expected: float
) -> None:
    """It is seen at 200."""
    accounts = Accounts()
    accounts.set(200, seen)
    assert accounts.used(now) == ({"a": expected} if expected else {})


def test_use_ends_when_a_watched_pod_ends() -> None:
    """By our clock, not by its condition: 0.5 * (250 - 100), whatever is reported of it later."""
    accounts = Accounts()
    accounts.set(100, pod("p", 100))
    accounts.set(250, pod("p", 100, ended=180))
    assert accounts.used(400) == {"a": 75}
    accounts.set(400, pod("p", 100, ended=390))
    accounts.forget(500, "p")
    assert accounts.used(600) == {"a": 75}


def test_use_ends_when_a_pod_is_deleted() -> None:
    """0.5 * (150 - 100)."""
    accounts = Accounts()
    accounts.set(100, pod("p", 100))
    accounts.forget(150, "p")
    assert accounts.used(400) == {"a": 25}


def test_use_ends_when_a_pod_is_not_in_the_list_any_more() -> None:
    """The watch may have missed its deletion; others go on."""
    accounts = Accounts()
    accounts.set(100, pod("gone", 100), pod("there", 100, namespace="b"))
    accounts.accounting.retain({"there"}, START + 200)
    assert accounts.used(300) == {"a": 50, "b": 100}


def test_use_counts_afterwards_when_the_node_was_unknown() -> None:
    """Once the node is there; until then nobody knows how large its cards are."""
    accounts = Accounts(node=False)
    accounts.set(150, pod("p", 100))
    accounts.accounting.refresh(START + 200)
    assert accounts.used(300) == {}
    accounts.state.set_node(NODE)
    accounts.accounting.refresh(START + 300)
    assert accounts.used(300) == {"a": 100}


def test_pod_is_not_counted_when_it_was_deleted_before_its_node_was_known() -> None:
    """Its use is lost, as after a restart."""
    accounts = Accounts(node=False)
    accounts.set(150, pod("p", 100))
    accounts.forget(200, "p")
    accounts.state.set_node(NODE)
    accounts.accounting.refresh(START + 300)
    assert accounts.used(300) == {}


def test_held_cards_are_charged_to_the_namespace_that_did_not_use_them() -> None:
    """One card and a half for 20 s; of a node that is unknown nothing."""
    accounts = Accounts()
    whole = Placement("n", (piece(0, 14 * GIB, 100, name="n"),), whole=True)
    half = Placement("n", (piece(1, 1, 50, name="n"),))
    elsewhere = Placement("m", (piece(0, 14 * GIB, name="m"),))
    accounts.accounting.charge("a", (whole, half, elsewhere), START, START, START + 20)
    assert accounts.used(20) == {"a": 30}


@given(
    lives=st.lists(
        st.tuples(
            st.integers(0, 400), st.integers(0, 400), st.sampled_from([3, 7, 14]), st.booleans()
        ),
        max_size=6,
    )
)
def test_use_is_the_same_after_a_restart_when_the_server_still_shows_all_pods(
    lives: list[tuple[int, int, int, bool]],
) -> None:
    """One has watched them start and end, the other reads them all at 500. Half-life: 100 s."""
    watching, restarted = Accounts(100), Accounts(100)
    events: list[tuple[int, int, Pod]] = []
    for number, (one, other, units, ends) in enumerate(lives):
        started, ended = min(one, other), max(one, other)
        name = f"p{number}"
        events.append((started, 0, pod(name, started, units=units)))
        if ends:
            events.append((ended, 1, pod(name, started, units=units, ended=ended)))
    for at, _, seen in sorted(events, key=lambda it: it[:2]):
        watching.set(at, seen)
    restarted.set(500, *{seen.metadata.uid: seen for _, _, seen in events}.values())
    expected = watching.accounting.uses.used(START + 500)
    assert restarted.accounting.uses.used(START + 500) == pytest.approx(expected, abs=1e-3)


def test_use_goes_on_when_a_pods_node_becomes_known_and_it_changes_afterwards() -> None:
    """It is recorded once: 0.5 * (400 - 100), not twice."""
    accounts = Accounts(node=False)
    accounts.set(150, pod("p", 100))
    accounts.state.set_node(NODE)
    accounts.set(200, pod("p", 100))
    accounts.accounting.refresh(START + 300)
    assert accounts.used(400) == {"a": 150}


def test_pod_is_counted_again_when_another_one_has_its_uid() -> None:
    """A server that was restored from a backup may show it again: 0.5 * (150 - 100), then (400 - 300)."""
    accounts = Accounts()
    accounts.set(100, pod("p", 100))
    accounts.set(150, pod("p", 100, ended=150))
    accounts.set(200, pod("p", 100))
    assert accounts.used(250) == {"a": 25}
    accounts.forget(260, "p")
    accounts.set(300, pod("p", 300))
    assert accounts.used(400) == {"a": 75}


def test_pod_without_a_node_is_not_counted_when_it_was_not_bound() -> None:
    """It waits."""
    accounts = Accounts()
    accounts.set(100, make("p", 7, namespace="a"))
    assert accounts.used(400) == {}
    assert accounts.accounting.uses.holders == frozenset()


def test_pod_without_cards_is_not_kept_when_its_node_is_unknown() -> None:
    """Most pods of a cluster are such: only those that may hold a card wait for their node."""
    accounts = Accounts(node=False)
    accounts.set(100, pod("idle", 100, units=0), pod("p", 100))
    accounts.state.set_node(NODE)
    accounts.accounting.refresh(START + 200)
    assert accounts.accounting.uses.holders == {"p"}


def test_use_counts_from_now_when_the_creation_time_cannot_be_read() -> None:
    """0.5 * (300 - 200)."""
    accounts = Accounts()
    odd = pod("p", None)
    odd.metadata.creation_timestamp = ""
    accounts.set(200, odd)
    assert accounts.used(300) == {"a": 50}


def test_use_changes_when_a_pods_node_reports_another_size() -> None:
    """A resize from half to a whole card at 200: 0.5 * (200 - 100) + 1 * (300 - 200)."""
    accounts = Accounts()
    accounts.set(100, pod("p", 100))
    slices = (piece(0, 14 * GIB, 100, name="n"),)
    report = {lease_records.REPORT: lease_records.encode_report(LeaseReport({"p": slices}))}
    accounts.state.set_node(a_node("n", 14 * GIB, 14 * GIB, annotations=report))
    accounts.set(200, pod("p", 100))
    assert accounts.used(300) == {"a": 150}


def test_use_ends_when_the_pods_cards_are_gone() -> None:
    """Its node shares nothing any more: what it would hold is unknown. 0.5 * (200 - 100)."""
    accounts = Accounts()
    accounts.set(100, pod("p", 100))
    accounts.forget(200, "p")
    accounts.accounting.retain((), START + 250)
    assert accounts.used(300) == {"a": 50}
    assert accounts.accounting.uses.holders == frozenset()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("pqr"),
            st.sampled_from(["run", "end", "forget", "list"]),
            st.integers(1, 60),
        ),
        max_size=12,
    )
)
def test_only_pods_that_run_are_counted_after_any_events(
    events: list[tuple[str, str, int]],
) -> None:
    """Whatever the order: holders are the running pods, and the use never falls without decay."""
    accounts, now, before = Accounts(), 100, 0.0
    running: set[str] = set()
    ended: set[str] = set()
    for name, event, after in events:
        now += after
        if event == "run":
            accounts.set(now, pod(name, 100))
            running |= {name} - ended
        elif event == "end":
            accounts.set(now, pod(name, 100, ended=now))
            running.discard(name)
            ended.add(name)
        elif event == "forget":
            accounts.forget(now, name)
            running.discard(name)
            ended.discard(name)
        else:
            accounts.accounting.retain({name}, START + now)
            running &= {name}
            ended &= {name}
        assert accounts.accounting.uses.holders == running
        used = accounts.accounting.uses.used(START + now).get("a", 0.0)
        assert used >= before - 1e-6
        before = used
