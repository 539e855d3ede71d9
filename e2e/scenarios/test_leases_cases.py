"""The rarer cases of a lease on a real kubelet: restarts at the wrong moment, who is refused, resize."""

import json
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.kit import MEMORY, WORKLOAD, World, deployment
from e2e.scenarios.lease_kit import agent, cap, left, pod, settle

LATER = "localhost/later:e2e"


def reason(world: World, name: str) -> str:
    """Why a pod failed, in the kubelet's word; empty while it has not."""
    return str(world.cluster.get("pod", name)["status"].get("reason", ""))


@pytest.mark.usefixtures("node")
def test_shells_are_limited_and_ephemeral_containers_have_no_card(world: World) -> None:
    """`kubectl exec` shares the mounts; `kubectl debug` cannot ask for a device, and has none."""
    world.cluster.apply(pod("shell", "x=4:"))
    world.cluster.wait_for_pod("shell")
    assert cap(world, "shell", "x") == 4308
    debug = ("debug", "shell", f"--image={WORKLOAD}", "--image-pull-policy=Never", "--target=x")
    program = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    world.cluster.kubectl(*debug, "-c", "look", "--", "python3", "-c", program)
    wait_until(
        "the ephemeral container's complaint",
        lambda: "cannot open shared object" in world.cluster.kubectl("logs", "shell", "-c", "look"),
        60,
    )
    ask = {"name": "asks", "image": WORKLOAD, "resources": {"limits": {MEMORY: "1"}}}
    existing = world.cluster.get("pod", "shell")["spec"]["ephemeralContainers"]
    patch = json.dumps({"spec": {"ephemeralContainers": [*existing, ask]}})
    at = ("pod", "shell", "--subresource=ephemeralcontainers")
    with pytest.raises(ClusterError, match="cannot be set for an Ephemeral Container"):
        world.cluster.kubectl("patch", *at, "-p", patch)


@pytest.mark.usefixtures("node")
def test_resize_in_place_leaves_the_lease(world: World) -> None:
    """More cpu without a restart: the same limit. Units themselves cannot be changed: the API refuses."""
    body = json.loads(pod("grows", "x=4:"))
    body["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "50m"},
        "limits": {"cpu": "100m", MEMORY: 4},
    }
    world.cluster.apply(json.dumps(body))
    world.cluster.wait_for_pod("grows")

    def resize(**limits: str) -> None:
        patch = {"spec": {"containers": [{"name": "x", "resources": {"limits": limits}}]}}
        world.cluster.kubectl(
            "patch", "pod", "grows", "--subresource=resize", "-p", json.dumps(patch)
        )

    resize(cpu="300m")

    def resized() -> bool:
        (status,) = world.cluster.get("pod", "grows")["status"]["containerStatuses"]
        return bool(status.get("resources", {}).get("limits", {}).get("cpu") == "300m")

    wait_until("the kubelet's word that it was resized", resized, 60)
    (status,) = world.cluster.get("pod", "grows")["status"]["containerStatuses"]
    assert status["restartCount"] == 0
    assert cap(world, "grows", "x") == 4308
    with pytest.raises(ClusterError, match="only cpu and memory"):
        resize(**{MEMORY: "6"})


def test_a_scheduler_that_does_not_ask_fenka(world: World, node: str) -> None:
    """Its binding is the API's own call: no record, so no lease."""
    world.cluster.apply(pod("foreign", "x=2:", schedulerName="other"))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "foreign"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    path = "/api/v1/namespaces/default/pods/foreign/binding"
    world.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
    world.wait_for_event("foreign", "not placed by fenka's scheduler extender (schedulerName other")


@pytest.mark.usefixtures("node")
def test_a_kernel_of_its_own_is_refused(world: World) -> None:
    """A runtime class of that name; the handler is this cluster's, or containerd would refuse first."""
    world.cluster.apply(
        "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: gvisor}\nhandler: runc\n"
    )
    try:
        world.cluster.apply(pod("sandboxed", "x=2:", runtimeClassName="gvisor"))
        world.wait_for_event("sandboxed", "runtime class gvisor", "leave runtimeClassName out")
    finally:
        world.cluster.kubectl("delete", "runtimeclass", "gvisor")


@contextmanager
def static_pods(world: World, node: str, manifest: str) -> Iterator[None]:
    """The kubelet with a folder of static pods, this one in it."""
    machine = world.cluster.node(node)
    settings = machine.place.folder / "kubelet.yaml"
    before = settings.read_text()
    folder = "/var/lib/kubelet/manifests"
    machine.run("mkdir", "-p", folder)
    machine.run("tee", f"{folder}/static.yaml", stdin=manifest)
    settings.write_text(f"{before}staticPodPath: {folder}\n")
    machine.restart_kubelet()
    try:
        yield
    finally:
        machine.run("rm", "-r", folder)
        settings.write_text(before)
        machine.restart_kubelet()


def test_a_static_pod_is_refused(world: World, node: str) -> None:
    """No scheduler places it. The kubelet may be without devices just after its start, and says so itself."""
    with static_pods(world, node, pod("static", "x=2:")):
        world.wait_for_allocatable(node, MEMORY, 14)
        told: list[str] = []

        def refused() -> bool:
            try:
                told[:] = world.cluster.events(f"static-{node}")
            except ClusterError:
                return False
            if any("a static pod cannot have a GPU" in it for it in told):
                return True
            if any("no healthy devices" in it for it in told):
                # Have the kubelet see another pod in the file.
                manifest = json.loads(pod("static", "x=2:"))
                manifest["metadata"]["labels"] = {"again": str(len(told))}
                path = "/var/lib/kubelet/manifests/static.yaml"
                world.cluster.node(node).run("tee", path, stdin=json.dumps(manifest))
            return False

        wait_until("the static pod's sentence", refused, 90)
    wait_until("no static pod", lambda: not left(world, node), 60)


def test_pods_deleted_before_the_kubelet_saw_them(world: World, node: str) -> None:
    """Nothing is matched, so nothing can be confused: the next pod has its own slice."""
    machine = world.cluster.node(node)
    machine.kill("kubelet")
    world.cluster.apply(pod("gone", "x=4:"))

    def bound() -> bool:
        return bool(world.cluster.get("pod", "gone")["spec"].get("nodeName"))

    wait_until("gone: bound", bound, 30)
    world.cluster.kubectl("delete", "pod", "gone", "--force", "--grace-period=0")
    machine.start_again("kubelet")
    machine.wait_until_ready()
    world.wait_for_allocatable(node, MEMORY, 14)
    for number in range(4):
        world.cluster.apply(pod(f"brief-{number}", "x=4:"))
        world.cluster.kubectl("delete", "pod", f"brief-{number}", "--force", "--grace-period=0")
    world.cluster.apply(pod("next", "x=6:"))
    world.cluster.wait_for_pod("next")
    assert cap(world, "next", "x") == 15079 * 6 // 14


def test_the_kubelet_restarts_before_a_container_ran(world: World, node: str) -> None:
    """Its image comes late. The kubelet fails such a pod itself, or goes on; nothing is left of it."""
    body = json.loads(pod("late", "x=4:"))
    body["spec"]["containers"][0]["image"] = LATER
    world.cluster.apply(json.dumps(body))
    world.wait_for_event("late", "not present with pull policy of Never")
    machine = world.cluster.node(node)
    machine.restart_kubelet()
    machine.ctr("images", "tag", WORKLOAD, LATER)
    try:

        def decided() -> bool:
            phase = world.cluster.get("pod", "late")["status"]["phase"]
            return phase in ("Failed", "Running")

        wait_until("late: failed by the kubelet, or running", decided, 90)
        if world.cluster.get("pod", "late")["status"]["phase"] == "Failed":
            assert reason(world, "late") == "UnexpectedAdmissionError"
        else:
            assert cap(world, "late", "x") == 4308
    finally:
        machine.ctr("images", "rm", LATER)
    world.wait_for_allocatable(node, MEMORY, 14)
    world.cluster.apply(pod("after", "x=8:"))
    world.cluster.wait_for_pod("after")
    assert cap(world, "after", "x") == 15079 * 8 // 14


def test_pods_that_come_while_the_agent_is_replaced(world: World, node: str) -> None:
    """As in an upgrade: none of them is failed by the kubelet for want of a plugin."""
    daemons = "daemonset/fenka-node-simulated-0"
    world.cluster.kubectl("-n", "fenka", "rollout", "restart", daemons)
    names = [f"comes-{number}" for number in range(10)]
    for name in names:
        world.cluster.apply(pod(name, "x=1:"))
        time.sleep(1)
    settle(world, node, 14)
    for name in names:
        world.cluster.wait_for_pod(name)


def test_a_reboot(world: World, node: str) -> None:
    """Every pod comes back to its own slice or fails by the kubelet's word, and nothing is leaked."""
    world.cluster.apply(deployment("web", MEMORY, 3, replicas=3))
    world.wait_for_running("web", 3)
    world.cluster.apply(pod("alone", "x=2:"))
    world.cluster.wait_for_pod("alone")
    world.cluster.node(node).reboot()
    settle(world, node, 14)
    (agent_pod,) = [
        it
        for it in world.cluster.list("pods", "fenka", selector="component=gpushare-device-plugin")
        if it["spec"]["nodeName"] == node
    ]
    assert agent_pod["metadata"]["name"] == agent(world, node)

    def back() -> bool:
        pods = [it for it in world.pods("web") if it["status"]["phase"] == "Running"]
        ready = [
            it
            for it in pods
            if all(s["ready"] for s in it["status"].get("containerStatuses", [{"ready": False}]))
        ]
        return len(ready) == 3

    wait_until("web: three running again", back, 120)
    failed = [it for it in world.cluster.list("pods") if it["status"]["phase"] == "Failed"]
    assert {it["status"].get("reason") for it in failed} <= {"UnexpectedAdmissionError"}
    running = [it["metadata"]["name"] for it in world.pods("web") if it not in failed]
    names = [it for it in running if not reason(world, it)]
    assert [cap(world, it, "web") for it in names] == [15079 * 3 // 14] * 3
    alive = len(names) + (world.cluster.get("pod", "alone")["status"]["phase"] == "Running")
    wait_until("one lease for each", lambda: len(leases(world, node)) == alive, 90)


def leases(world: World, node: str) -> list[str]:
    """Tokens that have files."""
    return world.cluster.node(node).run("ls", "/run/fenka/leases").split()


def test_deleted_by_force_and_still_running(world: World, node: str) -> None:
    """A container that cannot be ended keeps its memory: who comes next waits with the reason."""
    world.cluster.apply(pod("stuck", "x=8:"))
    world.cluster.wait_for_pod("stuck")
    machine = world.cluster.node(node)
    (shim,) = shims(world, node, "stuck")
    machine.run("kill", "-STOP", shim)
    try:
        world.cluster.kubectl("delete", "pod", "stuck", "--force", "--grace-period=0")
        # The kubelet remembers the ids of gpu-mem; of gpu-manager's names none are taken, and the API server
        # knows of no pod any more: only the node can tell. 40 blocks of 256 MiB beside 8 of 14 units.
        # Its report keeps the pod from being placed. Until the scheduler has that, the node refuses it.
        heir = json.loads(pod("heir", "x=0:"))
        limits = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 40}
        heir["spec"]["containers"][0]["resources"] = {"limits": limits}
        world.cluster.apply(json.dumps(heir))

        def waits() -> bool:
            told = " ".join(world.cluster.events("heir"))
            return "are still held by default/stuck" in told or "too little memory" in told

        wait_until("heir waits for what stuck holds", waits, 60)
    finally:
        machine.run("kill", "-CONT", shim)
    world.cluster.wait_for_pod("heir", seconds=90)
    assert cap(world, "heir", "x") == 15079 * 40 // 58


def shims(world: World, node: str, name: str) -> list[str]:
    """Process numbers of containerd's shims of a pod, on its node."""
    machine = world.cluster.node(node)
    program = textwrap.dedent("""\
        import json, pathlib, sys
        wanted = sys.argv[1]
        for it in pathlib.Path("/run/containerd/io.containerd.runtime.v2.task/k8s.io").iterdir():
            config = json.loads((it / "config.json").read_text())
            notes = config.get("annotations", {})
            sandbox = notes.get("io.kubernetes.cri.container-type") == "sandbox"
            if sandbox and notes.get("io.kubernetes.cri.sandbox-name") == wanted:
                for proc in pathlib.Path("/proc").iterdir():
                    if proc.name.isdecimal():
                        words = (proc / "cmdline").read_bytes().split(b"\\0")
                        if b"shim" in words[0] and it.name.encode() in words:
                            print(proc.name)
        """)
    return machine.run("python3", "-c", program, name).split()
