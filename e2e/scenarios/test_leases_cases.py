"""The rarer cases of a lease on a real kubelet: restarts at the wrong moment, who is refused, resize."""

import json
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import agent_name, lease_files, pod, visible_mib, wait_for_agent
from e2e.scenarios.installation import MEMORY, WORKLOAD, Installation, deployment

LATE_IMAGE = "localhost/late:e2e"


def failure_reason(installation: Installation, name: str) -> str:
    """Why a pod failed, in the kubelet's word; empty while it has not."""
    return str(installation.cluster.get("pod", name)["status"].get("reason", ""))


@pytest.mark.usefixtures("node")
def test_limit_applies_to_exec_but_no_card_is_visible_when_debugging(
    installation: Installation,
) -> None:
    """`kubectl exec` shares the mounts; `kubectl debug` cannot ask for a device, and has none."""
    installation.cluster.apply(pod("shell", "x=4:"))
    installation.cluster.wait_for_pod("shell")
    assert visible_mib(installation, "shell", "x") == 4308
    debug = ("debug", "shell", f"--image={WORKLOAD}", "--image-pull-policy=Never", "--target=x")
    program = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    installation.cluster.kubectl(*debug, "-c", "look", "--", "python3", "-c", program)
    wait_until(
        "the ephemeral container's complaint",
        lambda: (
            "cannot open shared object"
            in installation.cluster.kubectl("logs", "shell", "-c", "look")
        ),
        60,
    )
    ask = {"name": "asks", "image": WORKLOAD, "resources": {"limits": {MEMORY: "1"}}}
    existing = installation.cluster.get("pod", "shell")["spec"]["ephemeralContainers"]
    patch = json.dumps({"spec": {"ephemeralContainers": [*existing, ask]}})
    at = ("pod", "shell", "--subresource=ephemeralcontainers")
    with pytest.raises(ClusterError, match="cannot be set for an Ephemeral Container"):
        installation.cluster.kubectl("patch", *at, "-p", patch)


@pytest.mark.usefixtures("node")
def test_lease_is_unchanged_when_cpu_is_resized_in_place(installation: Installation) -> None:
    """More cpu without a restart: the same limit. Units themselves cannot be changed: the API refuses."""
    body = json.loads(pod("grows", "x=4:"))
    body["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "50m"},
        "limits": {"cpu": "100m", MEMORY: 4},
    }
    installation.cluster.apply(json.dumps(body))
    installation.cluster.wait_for_pod("grows")

    def resize(**limits: str) -> None:
        patch = {"spec": {"containers": [{"name": "x", "resources": {"limits": limits}}]}}
        installation.cluster.kubectl(
            "patch", "pod", "grows", "--subresource=resize", "-p", json.dumps(patch)
        )

    resize(cpu="300m")

    def resized() -> bool:
        (status,) = installation.cluster.get("pod", "grows")["status"]["containerStatuses"]
        return bool(status.get("resources", {}).get("limits", {}).get("cpu") == "300m")

    wait_until("the kubelet's word that it was resized", resized, 60)
    (status,) = installation.cluster.get("pod", "grows")["status"]["containerStatuses"]
    assert status["restartCount"] == 0
    assert visible_mib(installation, "grows", "x") == 4308
    with pytest.raises(ClusterError, match="only cpu and memory"):
        resize(**{MEMORY: "6"})


def test_container_gets_no_lease_when_another_scheduler_binds_the_pod(
    installation: Installation, node: str
) -> None:
    """Its binding is the API's own call: no record, so no lease."""
    installation.cluster.apply(pod("foreign", "x=2:", schedulerName="other"))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "foreign"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    path = "/api/v1/namespaces/default/pods/foreign/binding"
    installation.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
    installation.wait_for_event(
        "foreign", "not placed by fenka's scheduler extender (schedulerName other"
    )


@pytest.mark.usefixtures("node")
def test_pod_is_denied_when_its_runtime_class_has_its_own_kernel(
    installation: Installation,
) -> None:
    """A runtime class of that name; the handler is this cluster's, or containerd would refuse first."""
    installation.cluster.apply(
        "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: gvisor}\nhandler: runc\n"
    )
    try:
        installation.cluster.apply(pod("sandboxed", "x=2:", runtimeClassName="gvisor"))
        installation.wait_for_event(
            "sandboxed", "runtime class gvisor", "leave runtimeClassName out"
        )
    finally:
        installation.cluster.kubectl("delete", "runtimeclass", "gvisor")


@contextmanager
def static_pods(installation: Installation, node: str, manifest: str) -> Iterator[None]:
    """The kubelet with a folder of static pods, this one in it."""
    machine = installation.cluster.node(node)
    settings = machine.files.folder / "kubelet.yaml"
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


def test_static_pod_is_denied_when_it_requests_a_card(
    installation: Installation, node: str
) -> None:
    """No scheduler places it. The kubelet may be without devices just after its start, and says so itself."""
    with static_pods(installation, node, pod("static", "x=2:")):
        installation.wait_for_allocatable(node, MEMORY, 14)
        messages: list[str] = []

        def refused() -> bool:
            try:
                messages[:] = installation.cluster.events(f"static-{node}")
            except ClusterError:
                return False
            if any("a static pod cannot have a GPU" in message for message in messages):
                return True
            if any("no healthy devices" in message for message in messages):
                # Have the kubelet see another pod in the file.
                manifest = json.loads(pod("static", "x=2:"))
                manifest["metadata"]["labels"] = {"again": str(len(messages))}
                path = "/var/lib/kubelet/manifests/static.yaml"
                installation.cluster.node(node).run("tee", path, stdin=json.dumps(manifest))
            return False

        wait_until("the static pod's sentence", refused, 90)
    wait_until("no static pod", lambda: not lease_files(installation, node), 60)


def test_next_pod_has_its_own_slice_when_earlier_ones_were_deleted_unseen(
    installation: Installation, node: str
) -> None:
    """Nothing is matched, so nothing can be confused: the next pod has its own slice."""
    machine = installation.cluster.node(node)
    machine.kill("kubelet")
    installation.cluster.apply(pod("gone", "x=4:"))

    def bound() -> bool:
        return bool(installation.cluster.get("pod", "gone")["spec"].get("nodeName"))

    wait_until("gone: bound", bound, 30)
    installation.cluster.kubectl("delete", "pod", "gone", "--force", "--grace-period=0")
    machine.start_again("kubelet")
    machine.wait_until_ready()
    installation.wait_for_allocatable(node, MEMORY, 14)
    for number in range(4):
        installation.cluster.apply(pod(f"brief-{number}", "x=4:"))
        installation.cluster.kubectl(
            "delete", "pod", f"brief-{number}", "--force", "--grace-period=0"
        )
    installation.cluster.apply(pod("next", "x=6:"))
    installation.cluster.wait_for_pod("next")
    assert visible_mib(installation, "next", "x") == 15079 * 6 // 14


def test_lease_is_resumed_or_removed_when_the_kubelet_restarts_before_the_container_runs(
    installation: Installation, node: str
) -> None:
    """Its image comes late. The kubelet fails such a pod itself, or goes on; nothing is left of it."""
    body = json.loads(pod("late", "x=4:"))
    body["spec"]["containers"][0]["image"] = LATE_IMAGE
    installation.cluster.apply(json.dumps(body))
    installation.wait_for_event("late", "not present with pull policy of Never")
    machine = installation.cluster.node(node)
    machine.restart_kubelet()
    machine.ctr("images", "tag", WORKLOAD, LATE_IMAGE)
    try:

        def decided() -> bool:
            phase = installation.cluster.get("pod", "late")["status"]["phase"]
            return phase in ("Failed", "Running")

        wait_until("late: failed by the kubelet, or running", decided, 90)
        if installation.cluster.get("pod", "late")["status"]["phase"] == "Failed":
            assert failure_reason(installation, "late") == "UnexpectedAdmissionError"
        else:
            assert visible_mib(installation, "late", "x") == 4308
    finally:
        machine.ctr("images", "rm", LATE_IMAGE)
    installation.wait_for_allocatable(node, MEMORY, 14)
    installation.cluster.apply(pod("after", "x=8:"))
    installation.cluster.wait_for_pod("after")
    assert visible_mib(installation, "after", "x") == 15079 * 8 // 14


def test_no_pod_fails_when_created_while_the_agent_is_replaced(
    installation: Installation, node: str
) -> None:
    """As in an upgrade: none of them is failed by the kubelet for want of a plugin."""
    daemons = "daemonset/fenka-node-simulated-0"
    installation.cluster.kubectl("-n", "fenka", "rollout", "restart", daemons)
    names = [f"comes-{number}" for number in range(10)]
    for name in names:
        installation.cluster.apply(pod(name, "x=1:"))
        time.sleep(1)
    wait_for_agent(installation, node, 14)
    for name in names:
        installation.cluster.wait_for_pod(name)


def test_pods_get_their_slices_back_and_no_lease_leaks_when_the_node_reboots(
    installation: Installation, node: str
) -> None:
    """Every pod comes back to its own slice or fails by the kubelet's word, and nothing is leaked."""
    installation.cluster.apply(deployment("web", MEMORY, 3, replicas=3))
    installation.wait_for_running("web", 3)
    installation.cluster.apply(pod("alone", "x=2:"))
    installation.cluster.wait_for_pod("alone")
    installation.cluster.node(node).reboot()
    wait_for_agent(installation, node, 14)
    (agent_pod,) = [
        pod
        for pod in installation.cluster.list(
            "pods", "fenka", selector="component=gpushare-device-plugin"
        )
        if pod["spec"]["nodeName"] == node
    ]
    assert agent_pod["metadata"]["name"] == agent_name(installation, node)

    def back() -> bool:
        pods = [pod for pod in installation.pods("web") if pod["status"]["phase"] == "Running"]
        ready = [
            pod
            for pod in pods
            if all(s["ready"] for s in pod["status"].get("containerStatuses", [{"ready": False}]))
        ]
        return len(ready) == 3

    wait_until("web: three running again", back, 120)
    failed = [
        pod for pod in installation.cluster.list("pods") if pod["status"]["phase"] == "Failed"
    ]
    assert {pod["status"].get("reason") for pod in failed} <= {"UnexpectedAdmissionError"}
    running = [pod["metadata"]["name"] for pod in installation.pods("web") if pod not in failed]
    names = [name for name in running if not failure_reason(installation, name)]
    assert [visible_mib(installation, name, "web") for name in names] == [15079 * 3 // 14] * 3
    alive = len(names) + (installation.cluster.get("pod", "alone")["status"]["phase"] == "Running")
    wait_until("one lease for each", lambda: len(lease_tokens(installation, node)) == alive, 90)


def lease_tokens(installation: Installation, node: str) -> list[str]:
    """Tokens that have files."""
    return installation.cluster.node(node).run("ls", "/run/fenka/leases").split()


def test_memory_stays_reserved_when_a_force_deleted_container_still_runs(
    installation: Installation, node: str
) -> None:
    """A container that cannot be ended keeps its memory: who comes next waits with the reason."""
    installation.cluster.apply(pod("stuck", "x=8:"))
    installation.cluster.wait_for_pod("stuck")
    machine = installation.cluster.node(node)
    (shim,) = shim_pids(installation, node, "stuck")
    machine.run("kill", "-STOP", shim)
    try:
        installation.cluster.kubectl("delete", "pod", "stuck", "--force", "--grace-period=0")
        # The kubelet remembers the ids of gpu-mem; of gpu-manager's names none are taken, and the API server
        # knows of no pod any more: only the node can tell. 40 blocks of 256 MiB beside 8 of 14 units.
        # Its report keeps the pod from being placed. Until the scheduler has that, the node refuses it.
        heir = json.loads(pod("heir", "x=0:"))
        limits = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 40}
        heir["spec"]["containers"][0]["resources"] = {"limits": limits}
        installation.cluster.apply(json.dumps(heir))

        def waits() -> bool:
            messages = " ".join(installation.cluster.events("heir"))
            return "are still held by default/stuck" in messages or "too little memory" in messages

        wait_until("heir waits for what stuck holds", waits, 60)
    finally:
        machine.run("kill", "-CONT", shim)
    installation.cluster.wait_for_pod("heir", seconds=90)
    assert visible_mib(installation, "heir", "x") == 15079 * 40 // 58


def shim_pids(installation: Installation, node: str, name: str) -> list[str]:
    """Process numbers of containerd's shims of a pod, on its node."""
    machine = installation.cluster.node(node)
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
