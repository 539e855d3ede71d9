"""Test rare cases of leases on a real kubelet: untimely restarts, denied pods, resize in place."""

import json
import signal
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster import ClusterError, wait_until
from e2e.scenarios.containers import agent_name, lease_files, pod, visible_mib, wait_for_agent
from e2e.scenarios.installation import MEMORY, WORKLOAD, Installation, deployment

LATE_IMAGE = "localhost/late:e2e"


def failure_reason(installation: Installation, name: str) -> str:
    """Return the kubelet's reason why a pod failed, or "" if it has not failed."""
    return str(installation.cluster.get("pod", name)["status"].get("reason", ""))


@pytest.mark.usefixtures("node")
def test_limit_applies_to_exec_but_no_card_is_visible_when_debugging(
    installation: Installation,
) -> None:
    """`kubectl exec` shares the mounts; `kubectl debug` cannot request a device and has none."""
    installation.cluster.apply(pod("shell", "x=4:"))
    installation.cluster.wait_for_pod("shell")
    assert visible_mib(installation, "shell", "x") == 4308
    debug = ("debug", "shell", f"--image={WORKLOAD}", "--image-pull-policy=Never", "--target=x")
    program = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    installation.cluster.kubectl(*debug, "-c", "look", "--", "python3", "-c", program)
    wait_until(
        "the ephemeral container's error",
        lambda: (
            "cannot open shared object"
            in installation.cluster.kubectl("logs", "shell", "-c", "look")
        ),
    )
    debugger = {"name": "debugger", "image": WORKLOAD, "resources": {"limits": {MEMORY: "1"}}}
    existing = installation.cluster.get("pod", "shell")["spec"]["ephemeralContainers"]
    patch = json.dumps({"spec": {"ephemeralContainers": [*existing, debugger]}})
    at = ("pod", "shell", "--subresource=ephemeralcontainers")
    with pytest.raises(ClusterError, match="cannot be set for an Ephemeral Container"):
        installation.cluster.kubectl("patch", *at, "-p", patch)


@pytest.mark.versions
@pytest.mark.since("1.33", "no resize of a running pod's CPU")
@pytest.mark.usefixtures("node")
def test_lease_is_unchanged_when_cpu_is_resized_in_place(installation: Installation) -> None:
    """The container is not restarted. The API server rejects changes of units."""
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

    wait_until("the kubelet's report of the resize", resized)
    (status,) = installation.cluster.get("pod", "grows")["status"]["containerStatuses"]
    assert status["restartCount"] == 0
    assert visible_mib(installation, "grows", "x") == 4308
    with pytest.raises(ClusterError, match="only cpu and memory"):
        resize(**{MEMORY: "6"})


@pytest.mark.full
def test_container_gets_no_lease_when_another_scheduler_binds_the_pod(
    installation: Installation, node: str
) -> None:
    """Its binding carries no record, so there is no lease."""
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


@pytest.mark.full
@pytest.mark.usefixtures("node")
def test_pod_is_denied_when_its_runtime_class_has_its_own_kernel(
    installation: Installation,
) -> None:
    """Use a runtime class of that name with this cluster's handler; containerd would reject another."""
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


def test_kubelet_may_create_the_mirror_of_a_static_pod(installation: Installation) -> None:
    """The API server's own pods are static ones in many clusters."""
    cluster = installation.cluster
    name = cluster.nodes[0].name
    uid = cluster.get("node", name)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid, "controller": True}
    mirror = json.loads(pod(f"static-{name}", "x=2:", nodeName=name))
    mirror["metadata"] |= {
        "annotations": {"kubernetes.io/config.mirror": "1"},
        "ownerReferences": [owner],
    }
    kubelet = (f"--as=system:node:{name}", "--as-group=system:nodes")
    cluster.kubectl("create", "--dry-run=server", "-f", "-", *kubelet, stdin=json.dumps(mirror))


@contextmanager
def static_pods(installation: Installation, node: str, manifest: str) -> Iterator[None]:
    """Run the kubelet with a folder of static pods that contains this manifest."""
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


@pytest.mark.full
def test_static_pod_is_denied_when_it_requests_a_card(
    installation: Installation, node: str
) -> None:
    """No scheduler places it. Just after its start the kubelet may report that it has no devices."""
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
                # A changed manifest makes the kubelet create the pod again.
                manifest = json.loads(pod("static", "x=2:"))
                manifest["metadata"]["labels"] = {"again": str(len(messages))}
                path = "/var/lib/kubelet/manifests/static.yaml"
                installation.cluster.node(node).run("tee", path, stdin=json.dumps(manifest))
            return False

        wait_until("the static pod's event", refused)
    wait_until("no static pod", lambda: not lease_files(installation, node))


def test_next_pod_has_its_own_slice_when_earlier_ones_were_deleted_unseen(
    installation: Installation, node: str
) -> None:
    """Leases are not matched by size, so they cannot be confused."""
    machine = installation.cluster.node(node)
    # Frozen: the scheduler sends no pods to a node whose plugins see that the kubelet has ended.
    machine.kill("kubelet", signal.SIGSTOP)
    installation.cluster.apply(pod("gone", "x=4:"))

    def bound() -> bool:
        return bool(installation.cluster.get("pod", "gone")["spec"].get("nodeName"))

    wait_until("gone: bound", bound)
    installation.cluster.kubectl("delete", "pod", "gone", "--force", "--grace-period=0")
    machine.restart("kubelet")
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
    """Its image arrives late. The kubelet either fails the pod or runs it; no lease is left over."""
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

        wait_until("late: failed by the kubelet, or running", decided)
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
    """During an upgrade, the kubelet must not fail a pod because the plugin is missing."""
    daemons, old = "daemonset/fenka-node-simulated-0", agent_name(installation, node)
    installation.cluster.kubectl("-n", "fenka", "rollout", "restart", daemons)
    names: list[str] = []

    def create(count: int) -> None:
        for _ in range(count):
            names.append(f"comes-{len(names)}")
            installation.cluster.apply(pod(names[-1], "x=1:"))

    create(3)
    wait_until("the old agent's end", lambda: agent_name(installation, node) != old)
    create(3)
    wait_until("another agent", lambda: agent_name(installation, node) not in ("", old))
    create(4)
    wait_for_agent(installation, node, 14)
    for name in names:
        installation.cluster.wait_for_pod(name)


@pytest.mark.versions
def test_pods_get_their_slices_back_and_no_lease_leaks_when_the_node_reboots(
    installation: Installation, node: str
) -> None:
    """Every pod gets its own slice again or is failed by the kubelet."""
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
    wait_until("one lease for each", lambda: len(lease_tokens(installation, node)) == alive)


def lease_tokens(installation: Installation, node: str) -> list[str]:
    """Return the tokens of the node's leases."""
    return installation.cluster.node(node).run("ls", "/run/fenka/leases").split()


def test_memory_stays_reserved_when_a_force_deleted_container_still_runs(
    installation: Installation, node: str
) -> None:
    """A container that cannot be ended keeps its memory, and the next pod waits with the reason."""
    installation.cluster.apply(pod("stuck", "x=8:"))
    installation.cluster.wait_for_pod("stuck")
    machine = installation.cluster.node(node)
    (shim,) = shim_pids(installation, node, "stuck")
    machine.run("kill", "-STOP", shim)
    try:
        installation.cluster.kubectl("delete", "pod", "stuck", "--force", "--grace-period=0")
        # The next pod requests 40 blocks of 256 MiB beside 8 of 14 units. It uses gpu-manager's names, since
        # the kubelet still counts the IDs of gpu-mem. The API server has no pod, so only the node knows.
        # Its report prevents the placement. Until the scheduler has the report, the node denies the lease.
        heir = json.loads(pod("heir", "x=0:"))
        limits = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 40}
        heir["spec"]["containers"][0]["resources"] = {"limits": limits}
        installation.cluster.apply(json.dumps(heir))

        def waits() -> bool:
            messages = " ".join(installation.cluster.events("heir"))
            return "are still held by default/stuck" in messages or "too little memory" in messages

        wait_until("heir waits for what stuck holds", waits)
    finally:
        machine.run("kill", "-CONT", shim)
    installation.cluster.wait_for_pod("heir", seconds=90)
    assert visible_mib(installation, "heir", "x") == 15079 * 40 // 58


def shim_pids(installation: Installation, node: str, name: str) -> list[str]:
    """Return the PIDs of containerd's shims of a pod, on its node."""
    machine = installation.cluster.node(node)
    program = textwrap.dedent("""\
        import json, pathlib, sys
        pod = sys.argv[1]
        for task in pathlib.Path("/run/containerd/io.containerd.runtime.v2.task/k8s.io").iterdir():
            config = json.loads((task / "config.json").read_text())
            annotations = config.get("annotations", {})
            sandbox = annotations.get("io.kubernetes.cri.container-type") == "sandbox"
            if sandbox and annotations.get("io.kubernetes.cri.sandbox-name") == pod:
                for process in pathlib.Path("/proc").iterdir():
                    if process.name.isdecimal():
                        words = (process / "cmdline").read_bytes().split(b"\\0")
                        if b"shim" in words[0] and task.name.encode() in words:
                            print(process.name)
        """)
    return machine.run("python3", "-c", program, name).split()
