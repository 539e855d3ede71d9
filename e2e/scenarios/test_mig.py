"""Test MIG instances on demand and slices inside them, on simulated A100 and A30 cards of a real cluster."""

import json
import random
import textwrap
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from e2e.cluster import wait_until
from e2e.images import TRAINING
from e2e.scenarios.conftest import replace_cards
from e2e.scenarios.containers import agent_name, visible_mib, wait_for_no_leases
from e2e.scenarios.installation import MEMORY, Installation
from e2e.scenarios.mig import (
    A30,
    A100,
    CREATE,
    DESTROY_ALL,
    PREFIX,
    USED,
    instance_pod,
    layout,
    place_of,
    slice_pod,
    with_driver,
)
from fenka.core.mig.geometry import TABLES, Place
from fenka.core.mig.layouts import capacity

GEOMETRY = TABLES["A100-40G"]
LABEL = "fenka.io/mig"
INSIDE = "fenka.io/inside"
CONFIG = "nvidia.com/mig.config"
PROFILES = ("1g.5gb", "2g.10gb", "3g.20gb")
MINUTES = 3

LAYOUTS = """
apiVersion: v1
kind: ConfigMap
metadata: {name: layouts}
data:
  config.yaml: |
    version: v1
    mig-configs:
      balanced:
      - {device-filter: ["0x20B010DE"], devices: all, mig-enabled: true,
         mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}
      - {device-filter: ["0x20B710DE"], devices: all, mig-enabled: true, mig-devices: {1g.6gb: 4}}
      seven: [{devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}]
"""

# Allocates MiB by numba-cuda until it is refused; keeps the rest and reports.
ALLOCATE = textwrap.dedent("""\
    import json, sys, time, warnings
    import numpy as np
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError
    warnings.simplefilter("ignore")
    held, done = [], []
    for mib in map(int, sys.argv[1:]):
        try:
            held.append(cuda.device_array(mib << 20, dtype=np.uint8))
            done.append(mib)
        except CudaAPIError as why:
            assert "OUT_OF_MEMORY" in str(why), why
    total = cuda.current_context().get_memory_info().total >> 20
    print(json.dumps({"devices": len(cuda.gpus), "total": total, "allocated": done}), flush=True)
    time.sleep(100000)
    """)


@pytest.fixture(scope="module")
def cards(installation: Installation) -> Iterator[Installation]:
    """Provide a node with an A100 and one with an A30, both divided on demand."""
    for node, card in ((A100, "a100"), (A30, "a30")):
        installation.label(node, "gpushare-", "cgpu-", f"{LABEL}-")
        replace_cards(installation, node, card)
        installation.label(node, "gpushare=true", f"{LABEL}=on-demand")
    installation.wait_for_allocatable(A100, f"{PREFIX}1g.5gb", 7)
    installation.wait_for_allocatable(A30, f"{PREFIX}1g.6gb", 4)
    yield installation
    for node in (A100, A30):
        installation.label(node, "gpushare-", f"{LABEL}-")
    for node in (A100, A30):
        installation.wait_for_allocatable(node, MEMORY, 0)
        replace_cards(installation, node, "t4")
        installation.cluster.kubectl("annotate", "node", node, "fenka.io/instances-")


@pytest.fixture
def divided(cards: Installation) -> Iterator[Installation]:
    """Provide both nodes without pods; check afterwards that no lease and no instance of fenka's is left."""
    yield cards
    cards.label(A100, f"{INSIDE}-")
    cards.cluster.kubectl("delete", "pod", "--all", "--now")
    for node in (A100, A30):
        wait_for_no_leases(cards, node)
        wait_until(f"no instances on {node}", partial(_is_empty, cards, node))


def _is_empty(installation: Installation, node: str) -> bool:
    return not layout(installation, node)


def delete(installation: Installation, *names: str) -> None:
    """Delete pods, and return when they are gone."""
    installation.cluster.kubectl("delete", "pod", "--now", *names)


def _mig_state(installation: Installation) -> str:
    labels = installation.cluster.get("node", A100)["metadata"]["labels"]
    return str(labels.get(f"{CONFIG}.state"))


def _wait_for_state(installation: Installation, state: str) -> None:
    # The kubelet shows a changed ConfigMap to containers after a minute.
    wait_until(f"layout {state}", lambda: _mig_state(installation) == state, 150)


@pytest.mark.timeout(600)
def test_layout_of_the_nodes_labels_is_reached_around_a_pod_that_runs(
    divided: Installation,
) -> None:
    """Its instance stays until it has ended; a wrong name fails with an event, and nothing changes."""
    cluster = divided.cluster
    cluster.apply(LAYOUTS, "fenka")
    cluster.apply(instance_pod("a", "3g.20gb"))
    cluster.wait_for_pod("a")
    divided.label(A100, f"{LABEL}=static", f"{CONFIG}=balanced")
    _wait_for_state(divided, "success")
    balanced = ["0 2g.10gb", "2 1g.5gb", "3 1g.5gb", "4 3g.20gb"]
    assert layout(divided, A100) == balanced
    divided.label(A100, f"{CONFIG}=nothing")
    _wait_for_state(divided, "failed")
    reason = "no configuration is called 'nothing'"
    wait_until("an event", lambda: any(reason in each for each in cluster.events(A100)))
    assert layout(divided, A100) == balanced
    divided.label(A100, f"{CONFIG}=seven")
    _wait_for_state(divided, "pending")
    _wait_for_layout(divided, ["4 3g.20gb"])
    assert not _restarts(cluster.get("pod", "a"))
    assert visible_mib(divided, "a", "x") == 20096
    delete(divided, "a")
    _wait_for_state(divided, "success")
    _wait_for_layout(divided, ["0 7g.40gb"])
    cluster.apply(instance_pod("b", "7g.40gb"))
    cluster.wait_for_pod("b")
    assert visible_mib(divided, "b", "x") == 40320
    divided.label(A100, f"{LABEL}=on-demand", f"{CONFIG}-")
    cluster.kubectl("-n", "fenka", "delete", "configmap", "layouts")


def test_every_small_instance_is_given_and_the_next_pod_waits_with_a_reason(
    divided: Installation,
) -> None:
    """The article's 2g.10gb, then seven of an A100 and four of an A30: the eighth and the fifth wait.

    7g.40gb of an A100 has 40320 MiB, which are 39 units; seven of 4864 MiB have 4 units each.
    """
    cluster = divided.cluster
    cluster.apply(instance_pod("job2", "2g.10gb"))
    cluster.wait_for_pod("job2")
    assert visible_mib(divided, "job2", "x") == 9984
    delete(divided, "job2")
    given = {f"a{n}": "1g.5gb" for n in range(7)} | {f"b{n}": "1g.6gb" for n in range(4)}
    cluster.apply("\n---\n".join(instance_pod(name, given[name]) for name in given))
    for name in given:
        cluster.wait_for_pod(name)
    sizes = {"1g.5gb": 4864, "1g.6gb": 5952}
    seen = {name: visible_mib(divided, name, "x") for name in ("a0", "a6", "b0", "b3")}
    assert seen == {name: sizes[given[name]] for name in seen}
    assert layout(divided, A100) == [f"{start} 1g.5gb" for start in range(7)]
    assert layout(divided, A30) == [f"{start} 1g.6gb" for start in range(4)]
    for name, profile in (("a7", "1g.5gb"), ("b4", "1g.6gb")):
        cluster.apply(instance_pod(name, profile))
        divided.wait_for_event(name, f"no card has room for {profile}: 0/0 {profile} is held by")
    listed = divided.fenka("mig", "list").splitlines()
    assert len([line for line in listed if line.split()[3:4] == ["1g.5gb"]]) == 7
    shown = divided.fenka("top", "node").splitlines()
    assert len([line for line in shown if line.endswith("12/12 %")]) == 7
    assert "28/39" in divided.inspect(A100)
    # The eighth starts by itself when one of the seven has ended.
    delete(divided, "a3")
    cluster.wait_for_pod("a7")
    assert place_of(cluster.get("pod", "a7")) == (3, "1g.5gb")


@pytest.mark.full
def test_two_tenants_have_a_wall_of_hardware_and_limits_within(divided: Installation) -> None:
    """Slices of one namespace share an instance; another namespace's is in another one.

    The first pod asks for that itself. The others are put into instances because the node says so.

    10, 9 and 18 of an instance's 19 units of 20096 MiB: 10576, 9519 and 19038 MiB.
    """
    cluster = divided.cluster
    divided.label(A100, f"{INSIDE}=mig")
    with cluster.namespace("team-a") as one, cluster.namespace("team-b") as other:
        wanted = {
            "a": (one, 10, (9000, 3000, 1000), 10576),
            "b": (one, 9, (8000, 3000, 1000), 9519),
            "c": (other, 18, (15000, 6000, 3000), 19038),
        }
        for name, (namespace, units, sizes, _) in wanted.items():
            words = " ".join(map(str, sizes))
            inside = "mig" if name == "a" else None
            manifest = json.loads(slice_pod(name, units, inside, "", nodeSelector=_only(A100)))
            (container,) = manifest["spec"]["containers"]
            container |= {"image": TRAINING, "command": ["python3", "-c", ALLOCATE, *words.split()]}
            cluster.apply(json.dumps(manifest), namespace)
        places = {}
        for name, (namespace, _, sizes, total) in wanted.items():
            places[name] = place_of(cluster.wait_for_pod(name, namespace))
            report = _report(divided, name, namespace)
            # The second does not fit beside the first in the slice, the third does.
            assert report == {"devices": 1, "total": total, "allocated": [sizes[0], sizes[2]]}
        assert places["a"] == places["b"] != places["c"]
        assert len(layout(divided, A100)) == 2
        used = json.loads(with_driver(divided, A100, USED))
        assert used == [15000 + 3000, 9000 + 1000 + 8000 + 1000]


def _only(node: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": node}


def _report(installation: Installation, name: str, namespace: str) -> dict[str, Any]:
    logs: list[str] = []

    def printed() -> bool:
        logs[:] = installation.cluster.kubectl("-n", namespace, "logs", name).splitlines()
        return bool(logs)

    wait_until(f"{name}'s report", printed)
    report: dict[str, Any] = json.loads(logs[0])
    return report


def _restarts(pod: dict[str, Any]) -> int:
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))


def _pods(installation: Installation) -> list[dict[str, Any]]:
    """Return the scenario's pods by age."""
    pods = installation.cluster.list("pods", selector="app=mig")
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def _profile(pod: dict[str, Any]) -> str:
    (limits,) = (each["resources"]["limits"] for each in pod["spec"]["containers"])
    (name,) = (name for name in limits if name.startswith(PREFIX))
    return str(name.removeprefix(PREFIX))


def _place(pod: dict[str, Any]) -> Place | None:
    """Return the place of a pod's instance; None before it has one."""
    if "fenka.io/instance" not in pod["metadata"].get("annotations", {}):
        return None
    start, profile = place_of(pod)
    return Place(GEOMETRY.by_name[profile], start)


def _settled(installation: Installation) -> bool:
    """Return whether every pod runs, or nothing fits for one of those that have waited longest."""
    pods = _pods(installation)
    waiting = [pod for pod in pods if "nodeName" not in pod["spec"]]
    running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
    if len(running) + len(waiting) < len(pods):
        return False
    places = [place for pod in running if (place := _place(pod))]
    oldest = min((pod["metadata"]["creationTimestamp"] for pod in waiting), default="")
    first = [
        GEOMETRY.by_name[_profile(pod)]
        for pod in waiting
        if pod["metadata"]["creationTimestamp"] == oldest
    ]
    fits = [profile.name for profile in first if capacity(GEOMETRY, places, profile)]
    assert not first or len(fits) < len(first), f"{fits} fit beside {[*map(str, places)]}"
    return True


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_pod_is_placed_that_a_layout_can_serve_without_moves(divided: Installation) -> None:
    """Pods come and go at random. The first that waits does so because nothing of its profile fits."""
    chance, numbers = random.Random(7), iter(range(10_000))
    cluster, ends = divided.cluster, time.monotonic() + MINUTES * 60
    served = waited = 0
    while time.monotonic() < ends:
        pods = _pods(divided)
        for pod in chance.sample(pods, min(len(pods), chance.randint(0, 3))):
            delete(divided, pod["metadata"]["name"])
        texts = [
            instance_pod(f"p{next(numbers):04}", chance.choice(PROFILES))
            for _ in range(chance.randint(1, 3))
        ]
        cluster.apply("\n---\n".join(texts))
        wait_until("all pods run that can", partial(_settled, divided), 60)
        pods = _pods(divided)
        assert not any(map(_restarts, pods))
        served += len(texts)
        waited += any("nodeName" not in pod["spec"] for pod in pods)
    assert served > 20
    assert waited
    print(f"{served} pods, the queue was not empty {waited} times")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_instances_converge_when_the_agent_is_killed_beside_an_administrator(
    divided: Installation,
) -> None:
    """The agent dies at different moments of starts and ends; the administrator's instance stays as it is."""
    cluster, chance = divided.cluster, random.Random(11)
    foreign: list[str] = []
    for turn in range(4):
        names = [f"t{turn}-{number}" for number in range(3)]
        texts = map(instance_pod, names, ("1g.5gb", "2g.10gb", "1g.5gb"))
        cluster.apply("\n---\n".join(texts))
        # Only a place that is planned for no pod: the scheduler learns of an instance after the node does.
        wait_until("all pods bound", lambda: all(_place(pod) for pod in _pods(divided)))
        time.sleep(chance.uniform(0, 2))
        _kill_agent(divided)
        places = [place for pod in _pods(divided) if (place := _place(pod))]
        if turn == 1:
            profile = GEOMETRY.by_name["1g.5gb"]
            start = next(
                start
                for start in profile.starts
                if not GEOMETRY.conflict(places, Place(profile, start))
            )
            with_driver(divided, A100, CREATE, profile.name, str(start))
            foreign = [f"{start} {profile.name}"]
        for name in names:
            assert not _restarts(cluster.wait_for_pod(name, seconds=120))
        _wait_for_layout(divided, [*foreign, *(f"{it.start} {it.profile.name}" for it in places)])
        delete(divided, *names[:2])
        _kill_agent(divided)
        delete(divided, names[2])
        _wait_for_layout(divided, foreign)
    assert "administrator" in divided.fenka("mig", "list")
    with_driver(divided, A100, DESTROY_ALL)


def _wait_for_layout(installation: Installation, instances: Sequence[str]) -> None:
    """Wait until the A100 has exactly these instances."""
    wait_until(
        f"exactly {instances}",
        lambda: layout(installation, A100) == sorted(instances),
    )


def _kill_agent(installation: Installation) -> None:
    name = agent_name(installation, A100)
    if name:
        options = ("--force", "--grace-period=0", "--ignore-not-found")
        installation.cluster.kubectl("-n", "fenka", "delete", "pod", name, *options)
