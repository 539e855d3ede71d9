"""Which replica gets a request: weights, load, and replicas that end or refuse connections."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fenka.gateway.routing import FIRST_PAUSE_S, MAX_PAUSE_S, Replica, Router
from fenka.jobs.routing_table import ReplicaEntry, RoutingTable, VersionEntry
from tests.gateway.harness import table, version


def entry(number: int, *, terminating: bool = False) -> ReplicaEntry:
    """Return the replica of this number."""
    return ReplicaEntry(f"10.0.0.{number}", {"http": 80}, terminating)


def router_of(*versions: VersionEntry) -> Router:
    """Return a router with this table."""
    router = Router()
    router.update(table(*versions))
    return router


def acquired(router: Router, now: float = 0.0) -> Replica:
    """Return the replica of one more request."""
    replica = router.acquire("http", now)
    assert replica is not None
    return replica


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6).filter(any), st.integers(1, 300))
def test_versions_get_their_weight(weights: list[int], requests: int) -> None:
    """After any number of requests each version has had its share, to within one request per version."""
    router = router_of(
        *(
            version(f"v{number}", entry(number), weight=weight)
            for number, weight in enumerate(weights)
        )
    )
    counts = Counter(acquired(router).version for _ in range(requests))
    for number, weight in enumerate(weights):
        share = requests * weight / sum(weights)
        assert abs(counts[f"v{number}"] - share) <= len(weights)
        assert weight or not counts[f"v{number}"]


def test_version_is_used_at_its_last_request() -> None:
    """A refused request, the end of one, and other versions' requests are none of its own."""
    router = router_of(version("v1", entry(1)), version("v2", weight=1))
    replica = acquired(router, now=3.0)
    acquired(router, now=5.0)
    router.release(replica)
    assert router.acquire("grpc", 7.0) is None
    assert {name: each.used_at for name, each in router.versions.items()} == {
        "v1": 5.0,
        "v2": None,
    }


def test_weights_survive_tables_that_leave_them() -> None:
    """A replica that comes or goes does not start the shares again."""
    router = Router()
    counts: Counter[str] = Counter()
    for number in range(1000):
        replicas = [entry(2), entry(3)] if number % 2 else [entry(2)]
        router.update(
            table(version("v1", *replicas, weight=90), version("v2", entry(9), weight=10))
        )
        counts[acquired(router).version] += 1
    assert counts == {"v1": 900, "v2": 100}


def test_least_loaded_replica_is_selected() -> None:
    """The replica with the fewest requests in flight gets the next one, in turns among equals."""
    router = router_of(version("v1", entry(1), entry(2), entry(3)))
    first, second, third = (acquired(router) for _ in range(3))
    assert len({first.host, second.host, third.host}) == 3
    router.release(second)
    assert acquired(router) is second
    assert [acquired(router), acquired(router), acquired(router)] == [first, third, second]


def test_share_goes_to_others_when_version_has_no_replica() -> None:
    """A canary without a replica takes no request with it."""
    router = router_of(version("v1", entry(1), weight=90), version("v2", weight=10))
    assert {acquired(router).version for _ in range(100)} == {"v1"}


def test_no_replica_is_selected_when_only_versions_without_weight_have_one() -> None:
    """Weight 0 means no request, also if nothing else is there."""
    router = router_of(version("v1", weight=100), version("v2", entry(2), weight=0))
    assert router.acquire("http", 0.0) is None
    assert router_of(version("v2", entry(2), weight=0)).acquire("http", 0.0) is None


def test_terminating_replica_gets_no_request_and_keeps_its_own() -> None:
    """A replica that ends finishes its requests, whether the table still has it or not."""
    router = router_of(version("v1", entry(1)))
    replica = acquired(router)
    assert router.update(table(version("v1", entry(1, terminating=True), entry(2)))) == [replica]
    assert {acquired(router).host for _ in range(5)} == {"10.0.0.2"}
    assert router.update(table(version("v2", entry(2)))) != []
    router.release(replica)
    assert router.in_flight == 5


def test_replica_is_not_selected_when_it_has_not_the_port() -> None:
    """A port that a replica does not listen on is not routed to it."""
    assert router_of(version("v1", entry(1))).acquire("grpc", 0.0) is None


def test_unreachable_replica_is_tried_again_after_growing_pauses() -> None:
    """A replica that refuses connections is left out, for longer each time, until it accepts one."""
    router = router_of(version("v1", entry(1)))
    now, pauses = 0.0, list[float]()
    for _ in range(10):
        replica = acquired(router, now)
        router.on_unreachable(replica, now)
        router.on_unreachable(replica, now)  # Attempts at the same time count once.
        router.release(replica)
        assert router.acquire("http", now) is None
        pauses.append(replica.retry_at - now)
        now = replica.retry_at
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S])
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S)
    router.on_reached(acquired(router, now))
    router.on_unreachable(replica, now)
    assert replica.retry_at - now == pytest.approx(FIRST_PAUSE_S)


class Routing(RuleBasedStateMachine):
    """Any order of tables, requests and failures."""

    @initialize()
    def begin(self) -> None:
        """Start without replicas."""
        self.router, self.now = Router(), 0.0
        self.table: RoutingTable = table()
        self.requests: list[Replica] = []

    @rule(
        rows=st.lists(
            st.tuples(st.integers(1, 6), st.sampled_from(["v1", "v2"]), st.booleans()),
            unique_by=lambda row: row[0],
        ),
        weights=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def update(self, rows: list[tuple[int, str, bool]], weights: tuple[int, int]) -> None:
        """Replace the table."""
        self.table = table(
            *(
                version(
                    name,
                    *(
                        entry(number, terminating=ends)
                        for number, owner, ends in rows
                        if owner == name
                    ),
                    weight=weight,
                )
                for name, weight in zip(("v1", "v2"), weights, strict=True)
            )
        )
        self.router.update(self.table)

    @rule()
    def request(self) -> None:
        """Send a request: to a replica that accepts, if and only if there is one."""
        accepting = {
            (replica.host, row.name)
            for row in self.table.versions
            if row.weight
            for replica in row.replicas
            if not replica.terminating
        }
        paused = {each.host for each in self.router.replicas() if each.retry_at > self.now}
        possible = {each for each in accepting if each[0] not in paused}
        replica = self.router.acquire("http", self.now)
        assert (replica is not None) == bool(possible)
        if replica is not None:
            assert (replica.host, replica.version) in possible
            self.requests.append(replica)

    @rule(at=st.integers(0, 100), unreachable=st.booleans())
    def end(self, at: int, unreachable: bool) -> None:
        """End a request."""
        if self.requests:
            replica = self.requests.pop(at % len(self.requests))
            if unreachable:
                self.router.on_unreachable(replica, self.now)
            self.router.release(replica)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    @invariant()
    def counts_are_those_of_the_requests(self) -> None:
        """Each replica and version counts exactly its requests."""
        if not hasattr(self, "requests"):
            return
        assert self.router.in_flight == len(self.requests)
        for replica in self.router.replicas():
            assert replica.in_flight == self.requests.count(replica)
        for name, row in self.router.versions.items():
            assert row.in_flight == sum(replica.version == name for replica in self.requests)


TestRouting = Routing.TestCase
