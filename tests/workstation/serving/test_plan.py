"""What a service's supervisor decides: which replicas start and end, loads, and the gateway's table."""

import contextlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.jobs.routing_table import ListenAddress, ReplicaEntry, VersionEntry
from fenka.jobs.service import PortName, ServiceSpec
from fenka.local import service_replicas, supervisor
from fenka.local.held_ports import HeldPorts
from fenka.local.records import ReplicaState, ServiceRecord, VersionRecord
from fenka.local.service_replicas import GatewayUse, ServiceReplica
from fenka.workstation.paths import Runtime

SPEC = ServiceSpec(
    name="bert", version="v1", gpu_mem="3", restful_port=5000, port=5001, command=["a", "b"]
)


def version(name: str = "v1", revision: int = 1, spec: ServiceSpec = SPEC) -> VersionRecord:
    """A version of the service."""
    return VersionRecord(msgspec.structs.replace(spec, version=name), revision, 0, "/", {})


def service(*versions: VersionRecord, **weights: int) -> ServiceRecord:
    """A service with these versions."""
    return ServiceRecord("u", "127.0.0.1", {"http-serving": 5000}, list(versions), weights)


HOME = supervisor.Home(Runtime(Path("/")), Path("/"), contextlib.nullcontext)


def replica(
    name: str,
    state: ReplicaState = "Ready",
    of: VersionRecord | None = None,
    ports: dict[PortName, ListenAddress] | None = None,
) -> ServiceReplica:
    """A replica without a process."""
    made = ServiceReplica(HOME, of or version(), HeldPorts())
    made.name, made.state, made.ports = name, state, ports or {}
    made.served = state in ("Ready", "Draining", "Ending")
    return made


def old(name: str, state: ReplicaState = "Ready") -> ServiceReplica:
    """A replica of an earlier revision."""
    return replica(name, state, version(revision=0))


@pytest.mark.parametrize(
    ("wanted", "replicas", "start", "drain"),
    [
        (2, [], 2, ()),
        (2, [replica("a"), replica("b", "Backoff")], 0, ()),
        # The one that is not ready goes before those that serve, the youngest of these first.
        (2, [replica("a"), replica("b", "Pending"), replica("c")], 0, ("b",)),
        (1, [replica("a"), replica("b"), replica("c")], 0, ("c", "b")),
        (0, [replica("a"), replica("b", "Backoff")], 0, ("b", "a")),
        (1, [replica("a", "Draining")], 1, ()),
        # An update: one more starts, and the old ones end when it is ready.
        (2, [old("a"), old("b")], 1, ()),
        (2, [old("a"), old("b"), replica("c", "Starting")], 0, ()),
        (2, [old("a"), old("b"), replica("c")], 1, ("a",)),
        (2, [old("b"), replica("c")], 1, ()),
        # One that crashes changes nothing for the old ones.
        (2, [old("a"), old("b"), replica("c", "Backoff")], 0, ()),
        # Old ones that do not serve are of no use.
        (2, [old("a"), old("b", "Backoff")], 2, ("b",)),
        # One has to wait for room: an old one makes some, and one at a time.
        (2, [old("a"), old("b"), replica("c", "Pending")], 1, ("a",)),
        (2, [old("a", "Draining"), old("b"), replica("c", "Pending")], 1, ()),
    ],
)
def test_changes_bring_a_version_nearer_to_what_is_wanted(
    wanted: int, replicas: list[ServiceReplica], start: int, drain: tuple[str, ...]
) -> None:
    """Each case is one pass."""
    assert service_replicas.changes(wanted, 1, replicas) == service_replicas.ReplicaChanges(
        start, drain
    )


@given(data=st.data(), wanted=st.integers(0, 4), room=st.integers(1, 6))
def test_update_ends_with_what_is_wanted_whatever_there_was(
    data: st.DataObject, wanted: int, room: int
) -> None:
    """Never too many are started, and serving ones end only for others that serve, or to make room."""
    every: list[ReplicaState] = ["Pending", "Starting", "Ready", "Backoff", "Draining"]
    states = st.sampled_from(every)
    replicas = [
        replica(f"r{number}", state, version(revision=data.draw(st.integers(0, 1))))
        for number, state in enumerate(data.draw(st.lists(states, max_size=4)))
    ]
    room = max(room, wanted)
    for number in range(40):
        result = service_replicas.changes(wanted, 1, replicas)
        ready = sum(each.state == "Ready" for each in replicas)
        ending = [each for each in replicas if each.name in result.drain]
        left = ready - sum(each.state == "Ready" for each in ending)
        blocked = any(each.state == "Pending" for each in replicas)
        assert left >= min(ready, wanted) - blocked
        for each in ending:
            each.state = "Draining"
        active = sum(service_replicas.is_active(each) for each in replicas)
        assert not result.start or active + result.start <= wanted + service_replicas.SURGE
        replicas += [replica(f"s{number}-{each}", "Pending") for each in range(result.start)]
        # The world goes on: those that end are gone, waiting ones start where there is room.
        replicas = [each for each in replicas if each.state != "Draining"]
        for each in replicas:
            held = sum(other.state in ("Starting", "Ready") for other in replicas)
            if each.state == "Pending" and held < room:
                each.state = "Starting"
            elif each.state == "Starting":
                each.state = "Ready"
            elif each.state == "Backoff":
                each.state = "Pending"
    assert [(each.state, each.version.revision) for each in replicas] == [("Ready", 1)] * wanted


def test_pause_doubles_up_to_its_limit() -> None:
    """A broken version does not keep the machine busy."""
    assert [supervisor.pause_s(failures) for failures in (1, 2, 3, 7, 1000)] == [1, 2, 4, 60, 60]


IDLE = GatewayUse(0, {}, {"v1": 5}, {})


@pytest.mark.parametrize(
    ("use", "before", "load"),
    [
        (IDLE, IDLE, 0),
        # Answered since, though nothing was in flight at either look.
        (replace(IDLE, responses={"v1": 6}), IDLE, service_replicas.SOME_LOAD),
        (replace(IDLE, in_flight={"v1": 3}, responses={"v1": 6}), IDLE, 3),
        # A gateway that was started again.
        (replace(IDLE, responses={"v1": 1}), None, service_replicas.SOME_LOAD),
        (replace(IDLE, waiting=4), IDLE, 4),
    ],
)
def test_version_has_load_when_it_is_used(
    use: GatewayUse, before: GatewayUse | None, load: float
) -> None:
    """A version that answers short requests is not idle."""
    assert service_replicas.loads(service(version(), v1=100), [replica("a")], use, before) == {
        "v1": load
    }


def test_table_has_ready_and_draining_replicas_when_a_version_is_deleted() -> None:
    """It gets no request, and its replicas finish theirs. Others are not in the table."""
    ports: dict[PortName, ListenAddress] = {"http-serving": 1, "grpc-serving": 2, "http-metrics": 3}
    replicas = [
        replica("a", "Ready", version("v1"), ports),
        replica("b", "Starting", version("v1"), ports),
        replica("c", "Draining", version("v0"), {"http-serving": 7}),
    ]
    table = service_replicas.routing_table("bert", service(version("v1"), v1=100, v0=0), replicas)
    table.validate()
    assert table.versions == [
        VersionEntry("v0", 0, [ReplicaEntry("127.0.0.1", {"http-serving": 7}, terminating=True)]),
        VersionEntry(
            "v1", 100, [ReplicaEntry("127.0.0.1", {"http-serving": 1, "grpc-serving": 2})]
        ),
    ]


def test_programs_learn_their_own_ports() -> None:
    """By variables, and servers of a known kind by their arguments."""
    assert service_replicas.environment(SPEC, {"http-serving": 7, "http-metrics": 8}) == {
        "PORT": "7",
        "METRICS_PORT": "8",
    }
    tensorflow = ServiceSpec(
        kind="tensorflow", name="a", version="v1", model_name="m", model_path="/m"
    )
    assert service_replicas.program(tensorflow, {"http-serving": 7, "grpc-serving": 8}) == [
        "tensorflow_model_server",
        "--port=8",
        "--rest_api_port=7",
        "--model_name=m",
        "--model_base_path=/m",
    ]
    assert service_replicas.environment(tensorflow, {})["CUDA_VISIBLE_DEVICES"] == ""


def test_lease_is_named_like_a_pod_and_never_too_long() -> None:
    """Names of services and versions together have up to 63 characters."""
    spec = msgspec.structs.replace(SPEC, name="a" * 43, version="b" * 19)
    name = service_replicas.lease_name(spec, "012345")
    assert name.endswith("-012345")
    assert service_replicas.lease_request(VersionRecord(spec, 1, 0, "/", {}), f"{name}.9999")
