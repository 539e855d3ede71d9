"""Usage, violations and metrics, from /proc, accounts that tenants may corrupt, and cards."""

import functools
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fenka import __version__
from fenka.core.request import Slice
from fenka.core.units import MIB
from fenka.hardware.nvml import GpuProcess, Reading
from fenka.isolation import driver_usage
from fenka.isolation.driver_usage import Activity, ActivityTracker, UnleasedMemory
from fenka.isolation.lease_files import card_limits
from fenka.node.lease import pod_processes
from fenka.node.lease.store import Lease
from fenka.node.monitor.dashboard_answer import encode_figures, node_figures
from fenka.node.monitor.metrics import Exporter
from fenka.node.monitor.usage import NodeUsage, SliceUsage, Usage
from fenka.server.listener import listening_socket
from fenka.server.probes import serve_probes
from fenka.views.node_figures import CardFigures, NodeFigures, SliceFigures
from tests.node.harness import card, lease_files

POD = "0f9c2c4e-7c1d-4a53-9c6a-3f1d3ad7f0b1"
CONTAINER = "ab" * 32
CGROUP_V1 = f"4:memory:/kubepods/besteffort/pod{POD}/{CONTAINER}\n"
CGROUP_SYSTEMD = (
    "0::/kubepods.slice/kubepods-besteffort.slice/"
    f"kubepods-besteffort-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope\n"
)


@pytest.mark.parametrize("text", [CGROUP_V1, CGROUP_SYSTEMD, "0::/../.." + CGROUP_V1[10:]])
def test_process_is_attributed_by_its_cgroup(tmp_path: Path, text: str) -> None:
    """Both cgroup versions, both of the kubelet's drivers, and another cgroup namespace."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(text)
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) S {20 * '1 '}")
    assert pod_processes.pod_and_container(7, tmp_path) == (POD, CONTAINER)
    assert pod_processes.living_pods(tmp_path) == {POD}
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) Z {20 * '1 '}")
    assert pod_processes.living_pods(tmp_path) == set()
    assert pod_processes.pod_and_container(8, tmp_path) == ("", "")


def test_process_of_the_host_belongs_to_no_pod(tmp_path: Path) -> None:
    """Nor does one whose cgroup only looks alike."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text("0::/system.slice/podman.service\n")
    assert pod_processes.pod_and_container(7, tmp_path) == ("", "")


def test_memory_violation_is_detected_after_three_samples_in_a_row() -> None:
    """It is forgotten with the lease."""
    over, key = driver_usage.MemoryViolations(), ("t", "GPU-1")
    assert [over.observe({key: True}) for _ in range(3)] == [set(), set(), {key}]
    assert over.observe({key: True}) == {key}
    assert over.observe({key: False}) == set()
    assert over.observe({key: True}) == set()
    assert over.observe({}) == set()


IN_FOURS = 4.0


@pytest.mark.parametrize(
    ("shares", "accused"),
    [
        # its limit is 30 %, a look is 4 s: 16 s are over 15, 60 s are 15 looks
        ([0.41] * 3, False),
        ([0.41] * 4, True),
        ([0.39] * 30, False),  # less than ten points are nobody's fault
        ([1.0, 1.0, 1.0, 0.0] * 3, False),  # 48 s: not in every look, not a minute
        ([1.0, 1.0, 1.0, 0.0] * 4, True),  # 64 s, three quarters of them
        # one kernel of 10 s, and the 23 s that it has to wait: 33 % of any minute
        ([1.0, 1.0, 0.5, 0, 0, 0, 0, 0, 0] * 5, False),
    ],
)
def test_compute_violation_is_detected_when_it_lasts(shares: list[float], accused: bool) -> None:
    """A single long kernel must not look like one."""
    over, key = driver_usage.ComputeViolations(), ("t", "GPU-1")
    violators = [over.observe(IN_FOURS, {key: share - 0.30}) for share in shares]
    assert violators[-1] == ({key} if accused else set())
    assert over.observe(IN_FOURS, {}) == set()
    assert over.observe(IN_FOURS, {key: 0.7}) == set()


@pytest.mark.parametrize(
    ("compute", "ceiling", "limits", "most"),
    [
        (0, 0, {}, 100),
        (30, 0, {}, 30),
        (30, 60, {}, 60),
        (30, 20, {}, 30),
        (30, 0, {card(0).uuid: 15079}, 100),  # its node does not isolate
    ],
)
def test_limit_percent_follows_the_lease(
    compute: int, ceiling: int, limits: dict[str, int], most: int
) -> None:
    """The control page says the same."""
    slices = [Slice(0, card(0).uuid, 100, compute)]
    lease = Lease(POD, "default", "a", "main", slices, slices, {}, "", limits, ceiling)
    assert lease.limit_percent(slices[0]) == most
    (limit,) = card_limits(slices, {}, lease.compute)
    assert (limit.compute_percent < 100) is (most < 100)
    assert limit.compute_mode == ("soft" if most > compute > 0 and not limits else "hard")


def test_weight_limits_nothing_and_requests_no_time() -> None:
    """The metrics say what is reserved."""
    slices = [Slice(0, card(0).uuid, 100, 30)]
    lease = Lease(POD, "default", "a", "main", slices, slices, {}, weighted=True)
    usage = SliceUsage("t", lease, slices[0], 0, 0, 0, None)
    assert (usage.limit_percent, usage.requested_percent) == (100, 0)
    (limit,) = card_limits(slices, {}, lease.compute)
    assert (limit.compute_percent, limit.compute_mode) == (30, "weight")


def test_sample_has_a_compute_violation_when_a_lease_exceeds_its_share(
    tmp_path: Path, lease: Lease
) -> None:
    """A lease of 10 % uses a quarter of the card. The sample has what its account says, too."""
    slices = [Slice(0, card(0).uuid, 100, 10)]
    lease = msgspec.structs.replace(lease, slices=slices, holds=slices)
    looks = usage(tmp_path, 50, iter(range(0, 100, 4)))
    violators = [
        looks.sample({"t": lease}, {CONTAINER: "main"}, (card(0),), {}).over_compute
        for _ in range(5)
    ]
    assert [len(each) for each in violators] == [
        0,
        0,
        0,
        0,
        1,
    ]  # the first look knows no time before it
    (use,) = violators[-1]
    assert (use.compute, use.self_reported_compute, use.piece.compute, use.limit_percent) == (
        0.25,
        0.0,
        10,
        10,
    )


def test_shim_is_recognised_by_its_inode(library: Path, tmp_path: Path) -> None:
    """Another file of the same name is not the shim."""
    false = tmp_path / "libfenka.so"
    false.write_bytes((library / "libfenka.so").read_bytes())
    for path, expected in ((library / "libfenka.so", True), (false, False)):
        program = (
            "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdin is not None
            child.stdout.readline()
            shim = (library / "libfenka.so").stat().st_ino
            assert driver_usage.has_shim(child.pid, shim) is expected
            child.stdin.close()
    assert driver_usage.has_shim(child.pid, shim) is None


def test_readers_do_not_pile_up_when_a_process_blocks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program can block readers of its mappings until it ends, and is looked at every few seconds."""
    monkeypatch.setattr(driver_usage, "MAPS_TIMEOUT_S", 0)
    maps = tmp_path / "7" / "maps"
    maps.parent.mkdir()
    os.mkfifo(maps)
    before = threading.active_count()
    assert [driver_usage.has_shim(7, 1, tmp_path) for _ in range(4)] == [None] * 4
    assert threading.active_count() == before + 1
    reader = threading.enumerate()[-1]
    maps.write_text("")
    reader.join()


def test_kill_spares_processes_of_other_pods() -> None:
    """The PID may be another process's by now."""
    assert not pod_processes.kill(os.getpid(), POD)


@pytest.fixture
def lease(tmp_path: Path, library: Path) -> Lease:
    """Return a lease of 100 MiB of card 0, with files."""
    slices = [Slice(0, card(0).uuid, 100, 0)]
    made = Lease(POD, "default", "a", "main", slices, slices, {}, str(library))
    files = lease_files(tmp_path)
    files.prepare()
    files.make("t", made)
    return made


def usage(tmp_path: Path, used_mib: int, clock: Iterator[float]) -> Usage:
    """Return the usage of one process in the pod."""
    (tmp_path / "proc" / "7").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(CGROUP_V1)
    (tmp_path / "proc" / "7" / "maps").write_text("")
    busy = iter(range(0, 10**12, 10**9))
    uuid = card(0).uuid
    return Usage(
        lambda: [GpuProcess(uuid, 7, used_mib), GpuProcess(uuid, 8, 999)],
        lease_files(tmp_path, contexts_mib={uuid: 20}),
        lambda: {(uuid, 7): next(busy)},
        tmp_path / "proc",
        lambda: next(clock),
    )


def test_sample_has_a_memory_violation_when_a_lease_exceeds_its_limit(
    tmp_path: Path, lease: Lease
) -> None:
    """Limit, one context and 5 % are 126 MiB. 127 in three samples are a violation."""
    for used, expected in ((126, [0, 0, 0]), (127, [0, 0, 1])):
        looks = usage(tmp_path, used, iter(range(0, 100, 4)))
        counts = [
            len(looks.sample({"t": lease}, {CONTAINER: "main"}, (card(0),), {}).over_memory)
            for _ in range(3)
        ]
        assert counts == expected


@pytest.mark.parametrize("ruin", ["", "short", "x" * 200_000, "\xff" * 150_000])
def test_sample_ignores_an_invalid_account(tmp_path: Path, lease: Lease, ruin: str) -> None:
    """Tenants can write it."""
    (tmp_path / "leases" / "t" / "account" / "slots").write_text(ruin)
    (use,) = usage(tmp_path, 50, iter(range(100))).sample({"t": lease}, {}, (card(0),), {}).usages
    assert (use.self_reported_bytes, use.driver_reported_bytes) == (0, 50 * MIB)


def test_sample_does_not_follow_an_account_that_is_no_regular_file(
    tmp_path: Path, lease: Lease
) -> None:
    """A link or a pipe in its place is not read."""
    slots = tmp_path / "leases" / "t" / "account" / "slots"
    slots.unlink()
    os.mkfifo(slots)
    (use,) = usage(tmp_path, 50, iter(range(100))).sample({"t": lease}, {}, (card(0),), {}).usages
    assert use.self_reported_bytes == 0


def test_metrics_have_their_names_and_labels(tmp_path: Path, lease: Lease) -> None:
    """Users build on them."""
    looks = usage(tmp_path, 50, iter(range(0, 100, 4)))
    looks.sample({"t": lease}, {}, (card(0),), {})
    exporter = Exporter("n1", lambda: ("550.163.01", "12.4"))
    readings = {str(card(0).uuid): Reading(card(0).uuid, 60, 30, 41, 33.5, 70)}
    exporter.activity = {("t", card(0).uuid): Activity(1000.5, 12.25, 1200)}
    exporter.xids = Counter({(card(0).uuid, "program"): 2})
    exporter.sample = looks.sample({"t": lease}, {CONTAINER: "main"}, (card(0),), readings)
    registry = CollectorRegistry()
    registry.register(exporter)
    text = generate_latest(registry).decode()
    of_card = f'uuid="{card(0).uuid}"'
    pod = 'namespace="default",node="n1",pod="a"'
    container = f'{{container="main",index="0",model="Tesla T4",{pod},{of_card}}}'
    alone = f'{{index="0",model="Tesla T4",node="n1",{of_card}}}'
    own = f'version="{__version__}"'
    versions = f'{{cuda_version="12.4",driver_version="550.163.01",node="n1",{own}}}'

    def xid(kind: str) -> str:
        return f'{{index="0",kind="{kind}",model="Tesla T4",node="n1",{of_card}}}'

    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("fenka_")
    }
    assert values == {
        f"fenka_container_gpu_memory_limit_bytes{container}": 100 * MIB,
        f"fenka_container_gpu_memory_held_bytes{container}": 0,
        f"fenka_container_gpu_memory_used_bytes{container}": 50 * MIB,
        f"fenka_container_gpu_utilization_ratio{container}": 0.25,
        f"fenka_container_gpu_busy_ratio{container}": 0.25,
        f"fenka_container_gpu_processes{container}": 1,
        f"fenka_container_gpu_start_timestamp_seconds{container}": 1000.5,
        f"fenka_container_gpu_last_active_timestamp_seconds{container}": 1200,
        f"fenka_container_gpu_busy_seconds_total{container}": 12.25,
        f"fenka_container_gpu_throttled_seconds_total{container}": 0,
        f"fenka_container_gpu_out_of_memory_total{container}": 0,
        f"fenka_card_memory_total_bytes{alone}": 15079 * MIB,
        f"fenka_card_memory_used_bytes{alone}": 60 * MIB,
        f"fenka_card_memory_allocated_bytes{alone}": 100 * MIB,
        f"fenka_card_utilization_ratio{alone}": 0.3,
        f"fenka_card_temperature_celsius{alone}": 41,
        f"fenka_card_power_watts{alone}": 33.5,
        f"fenka_card_power_limit_watts{alone}": 70,
        f"fenka_card_healthy{alone}": 1,
        f"fenka_card_cordoned{alone}": 0,
        f"fenka_card_xid_errors_total{xid('card')}": 0,
        f"fenka_card_xid_errors_total{xid('program')}": 2,
        f"fenka_card_xid_errors_total{xid('note')}": 0,
        f"fenka_node_info{versions}": 1,
        'fenka_node_violations_total{kind="memory_limit"}': 0,
        'fenka_node_violations_total{kind="compute_limit"}': 0,
        'fenka_node_violations_total{kind="unmanaged_process"}': 0,
    }
    assert NodeUsage().usages == ()


@pytest.mark.parametrize(
    ("compute", "burst_percent", "weighted", "ratios"),
    [
        (0, 0, False, (None, None)),
        (40, 0, False, (0.4, 0.4)),
        (20, 60, False, (0.6, 0.2)),
        (20, 100, False, (None, 0.2)),
        (30, 0, True, (None, None)),
    ],
)
def test_limit_and_promise_of_compute_are_absent_when_there_is_none(
    compute: int, burst_percent: int, weighted: bool, ratios: tuple[float | None, float | None]
) -> None:
    """A soft share is promised less than it may use; a weight promises nothing and limits nothing."""
    slices = [Slice(0, card(0).uuid, 100, compute)]
    lease = Lease(
        *(POD, "default", "a", "main", slices, slices, {}, "", {}, burst_percent),
        weighted=weighted,
    )
    exporter = Exporter("n1")
    exporter.sample = NodeUsage((SliceUsage("t", lease, slices[0], 0, 0, 0, None),), (card(0),))
    labels = {"namespace": "default", "pod": "a", "container": "main", "node": "n1"}
    labels |= {"uuid": card(0).uuid, "index": "0", "model": card(0).model}
    names = "compute_limit_ratio", "compute_promised_ratio"
    assert ratios == tuple(
        exporter.registry.get_sample_value(f"fenka_container_gpu_{name}", labels) for name in names
    )


def test_activity_is_that_of_the_last_look_with_card_time() -> None:
    """Before the first use: the granting, or the program's start after a restart. Unmeasured: not known."""
    clock, busy = iter((100.0, 110.0, 120.0, 130.0, 140.0)), {"young": 0.0, "old": 7.0, "new": 0.5}
    tracker = ActivityTracker(lambda lease, _: busy.get(lease), lambda: next(clock))
    started = {("young", "c"): 105.0, ("old", "c"): 50.0, ("unmeasured", "c"): 50.0}
    busy["old"] = 0.0
    first = tracker.observe(started)
    assert first == {
        ("young", "c"): Activity(105, 0, 105),
        ("old", "c"): Activity(50, 0, 100),
        ("unmeasured", "c"): Activity(50),
    }
    busy["old"] = 2.5
    second = tracker.observe(started)
    assert second["old", "c"] == Activity(50, 2.5, 120, 0.25)
    assert second["young", "c"] == Activity(105, 0, 105, 0)
    assert tracker.observe({("old", "c"): 50.0, ("new", "c"): None}) == {
        ("old", "c"): Activity(50, 2.5, 120, 0),
        ("new", "c"): Activity(None, 0.5, 130),
    }
    busy["new"] = 0.5
    assert tracker.observe({("new", "c"): 135.0})["new", "c"] == Activity(135, 0.5, 135, 0)


GPU_MANAGERS = """\
# HELP container_gpu_utilization Percent of the card's time.
# TYPE container_gpu_utilization gauge
container_gpu_utilization{container_name="c",gpu="gpu0",namespace="default",node="n1",pod_name="p"} 25.0
container_gpu_utilization{container_name="c",gpu="gpu1",namespace="default",node="n1",pod_name="p"} 50.0
container_gpu_utilization{container_name="c",gpu="total",namespace="default",node="n1",pod_name="p"} 75.0
# HELP container_request_gpu_utilization Cards' time that it asks for: 0.4 is 40 % of one card.
# TYPE container_request_gpu_utilization gauge
container_request_gpu_utilization{container_name="c",namespace="default",node="n1",pod_name="p",req_of_gpu="total"} 0.8
# HELP container_gpu_memory_total MiB of card memory in use.
# TYPE container_gpu_memory_total gauge
container_gpu_memory_total{container_name="c",gpu_memory="gpu0",namespace="default",node="n1",pod_name="p"} 300.0
container_gpu_memory_total{container_name="c",gpu_memory="gpu1",namespace="default",node="n1",pod_name="p"} 0.0
container_gpu_memory_total{container_name="c",gpu_memory="total",namespace="default",node="n1",pod_name="p"} 300.0
# HELP container_request_gpu_memory MiB of card memory that it asks for.
# TYPE container_request_gpu_memory gauge
container_request_gpu_memory{container_name="c",namespace="default",node="n1",pod_name="p",req_of_gpu_memory="total"} 8192.0
"""  # noqa: E501


def test_metrics_in_gpu_managers_names_are_unchanged() -> None:
    """The whole text is compared: users have dashboards for it."""
    slices = [Slice(index, card(index).uuid, 4096, 40) for index in (0, 1)]
    lease = Lease(POD, "default", "p", "c", slices, slices, {})
    exporter = Exporter("n1")
    exporter.sample = NodeUsage(
        (
            SliceUsage("t", lease, slices[0], 0, 300 * MIB, 1, 0.25, 0.2),
            SliceUsage("t", lease, slices[1], 0, 0, 1, 0.5, 0.5),
        ),
        (card(0), card(1)),
    )
    registry = CollectorRegistry()
    registry.register(exporter)
    text = generate_latest(registry).decode()
    start = text.index("# HELP container_gpu_utilization")
    assert text[start:] == GPU_MANAGERS


def test_reading_for_the_dashboard_has_what_leases_use() -> None:
    """300 of 4096 MiB by the driver, a quarter of the card's time, and a limit that is exceeded."""
    slices = [Slice(0, card(0).uuid, 4096, 40)]
    lease = Lease(POD, "default", "p", "c", slices, slices, {})
    used = SliceUsage("t", lease, slices[0], 0, 300 * MIB, 1, 0.25, 0.2)
    uuid = card(0).uuid
    exporter = Exporter("n1")
    exporter.sample = NodeUsage(
        (used,), (card(0),), {uuid: Reading(uuid, 400, 62, 49, 29.5, 70.0)}, over_memory=(used,)
    )
    exporter.activity = {("t", uuid): Activity(50, 2.5, 120, 0.25)}
    reading = msgspec.json.decode(encode_figures(exporter, 150.0), type=NodeFigures)
    sentence = f"holds more than its 4096 MiB of {uuid}, as the driver reports"
    assert reading == NodeFigures(
        150.0,
        [CardFigures(uuid, 400, 0.62, 49, 29.5, 70.0)],
        [SliceFigures(POD, uuid, 300, 0.25, 30.0, sentence)],
    )
    exporter.activity = {}
    assert node_figures(exporter, 150.0).slices[0].idle_s is None


async def test_port_serves_metrics_and_readiness(unused_tcp_port: int) -> None:
    """Metrics are text."""
    problem, exporter = "not registered with the kubelet", Exporter("n1")

    async def ask(path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{unused_tcp_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()

    listening = listening_socket(None, unused_tcp_port)
    usage = functools.partial(encode_figures, exporter, 100.0)
    async with serve_probes(listening, lambda: problem, exporter.text, usage=usage):
        assert await ask("/usage") == (200, "[100.0,[],[]]")
        assert await ask("/healthz") == (200, "ok\n")
        assert (await ask("/readyz"))[0] == 503
        problem = ""
        assert await ask("/readyz") == (200, "ok\n")
        assert 'fenka_node_violations_total{kind="memory_limit"} 0.0' in (await ask("/metrics"))[1]


@pytest.fixture
def unused_tcp_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_memory_in_no_lease_is_measured_with_its_program(tmp_path: Path, lease: Lease) -> None:
    """Processes that have ended are left out. Memory of no process counts in the second sample."""
    looks, uuid = usage(tmp_path, 50, iter(range(0, 100, 4))), str(card(0).uuid)
    stranger = tmp_path / "proc" / "8"
    stranger.mkdir()
    stat = (Path("/proc") / str(os.getpid()) / "stat").read_bytes()
    readings = {uuid: Reading(uuid, 50 + 999, None, None, None)}

    def unleased() -> UnleasedMemory:
        return looks.sample({"t": lease}, {}, (card(0),), readings).unleased[uuid]

    assert unleased() == UnleasedMemory(), "999 MiB of no process for the first time"
    assert unleased() == UnleasedMemory(unattributed_mib=999)
    (stranger / "stat").write_bytes(stat)
    (stranger / "comm").write_text("python\n")
    assert unleased() == UnleasedMemory(computing_mib=999, programs=("python",))
    readings.clear()
    assert looks.sample({"t": lease}, {}, (card(0),), readings).unleased == {}
