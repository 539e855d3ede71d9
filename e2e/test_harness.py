"""Test the cluster that the other tests rely on."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from e2e import device_plugin
from e2e.administrator import FETCH
from e2e.artifacts import FENKA
from e2e.cluster import Cluster, wait_until
from e2e.images import BUSYBOX, WORKLOAD
from e2e.machine import Machine
from e2e.programs import MODULES, BuildError, chosen, keep_latest, kubernetes
from e2e.supervisor import CGROUPS, REPOSITORY, MachineFiles, Process, hierarchies

CALL_API = """
import os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
# A kubelet that has just restarted may start pods before it has the list of Services.
host = os.environ.get("KUBERNETES_SERVICE_HOST", "10.96.0.1")
url = f"https://{host}/api/v1/namespaces/default/services/kubernetes"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(folder + "/token").read()})
context = ssl.create_default_context(cafile=folder + "/ca.crt")
print(urllib.request.urlopen(request, context=context, timeout=5).status)
"""
FIND_LIBRARY = (
    "import fenka, pathlib;"
    'print((pathlib.Path(fenka.__file__).parent / "_native" / "libfenka.so").exists())'
)


def pod(name: str, image: str, node: str, command: list[str], **spec: Any) -> str:
    """Return a pod of one container on a given node."""
    container: dict[str, Any] = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
    }
    container |= spec.pop("container", {})
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "terminationGracePeriodSeconds": 0,
                "containers": [container],
                **spec,
            },
        }
    )


def web(name: str, node: str) -> str:
    """Return a pod that serves its own name on port 8080."""
    serve = (
        "mkdir /www && echo $HOSTNAME > /www/index.html && exec python3 -m http.server -d /www 8080"
    )
    return pod(name, WORKLOAD, node, ["sh", "-c", serve])


def test_nodes_are_ready_at_their_addresses_when_the_cluster_is_up(cluster: Cluster) -> None:
    """Also check that kubelet and containerd have the versions that were built."""
    for node in cluster.nodes:
        status = cluster.get("node", node.name)
        addresses = {each["type"]: each["address"] for each in status["status"]["addresses"]}
        assert node.is_ready()
        assert addresses["InternalIP"] == node.address
        assert status["status"]["nodeInfo"]["kubeletVersion"].startswith("v1.37.")
        assert status["status"]["nodeInfo"]["containerRuntimeVersion"].startswith("containerd://2.")


def test_pods_reach_each_other_when_on_different_nodes(cluster: Cluster, namespace: str) -> None:
    """By address, Service and node port; also on the same node, and from the control plane."""
    four, five = (node.name for node in cluster.nodes)
    service = dedent(
        """
        apiVersion: v1
        kind: Service
        metadata: {name: five}
        spec:
          type: NodePort
          selector: {app: five}
          ports: [{port: 80, targetPort: 8080, nodePort: 32080}]
        """
    )
    for text in (web("four", four), web("five", five), service):
        cluster.apply(text, namespace)
    addresses = {}
    for name in ("four", "five"):
        addresses[name] = cluster.wait_for_pod(name, namespace)["status"]["podIP"]
    cluster_ip = cluster.get("service", "five", namespace)["spec"]["clusterIP"]

    def answers(caller: str, url: str, expected: str) -> bool:
        inside = ("-n", namespace, "exec", caller, "--", "python3", "-c", FETCH, url)
        return cluster.kubectl(*inside).strip() == expected

    for caller, other in (("four", "five"), ("five", "four")):
        url = f"http://{addresses[other]}:8080/"
        wait_until(f"{caller} → {url}", partial(answers, caller, url, other))
    for caller in ("four", "five"):  # five calls a Service that it serves itself
        url = f"http://{cluster_ip}/"
        wait_until(f"{caller} → {url}", partial(answers, caller, url, "five"))

    def answers_the_control_plane(url: str) -> bool:
        return cluster.fetch(url).strip() == "five"

    # The ways in which the scheduler can reach its extender: node ports, its own machine's port, the Service.
    hosts = [f"{host}:32080" for host in (*(node.address for node in cluster.nodes), "127.0.0.1")]
    for host in (*hosts, cluster_ip):
        wait_until(host, partial(answers_the_control_plane, f"http://{host}/"))


def test_pod_token_is_rejected_until_a_role_is_bound(cluster: Cluster, namespace: str) -> None:
    """The answer is 403 without a role and 200 with one: tokens are valid and RBAC is on."""
    binding = ("create", "clusterrolebinding", f"{namespace}-view", "--clusterrole=view")
    command = ["python3", "-c", CALL_API]
    cluster.apply(
        pod("stranger", WORKLOAD, cluster.nodes[0].name, command, restartPolicy="Never"), namespace
    )
    cluster.wait_for_pod("stranger", namespace, "Failed")
    assert "403" in cluster.kubectl("-n", namespace, "logs", "stranger")
    cluster.kubectl(*binding, f"--serviceaccount={namespace}:default")
    try:
        cluster.apply(
            pod("friend", WORKLOAD, cluster.nodes[1].name, command, restartPolicy="Never"),
            namespace,
        )
        cluster.wait_for_pod("friend", namespace, "Succeeded")
        assert cluster.kubectl("-n", namespace, "logs", "friend").strip() == "200"
    finally:
        cluster.kubectl("delete", "clusterrolebinding", f"{namespace}-view")


def test_fenka_image_works_when_unprivileged_on_a_read_only_root(
    cluster: Cluster, namespace: str
) -> None:
    """Also check that it contains the native libraries, which the node program installs."""
    # The image has no shell.
    script = (
        "import os, subprocess; print(os.getuid()); subprocess.check_output(['fenka', '--help']); "
        f"{FIND_LIBRARY}; print(os.access('/opt', os.W_OK))"
    )
    text = pod(
        "fenka",
        FENKA,
        cluster.nodes[0].name,
        ["python3", "-c", script],
        restartPolicy="Never",
        container={
            "securityContext": {
                "runAsNonRoot": True,
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
        },
    )
    cluster.apply(text, namespace)
    cluster.wait_for_pod("fenka", namespace, "Succeeded")
    output = cluster.kubectl("-n", namespace, "logs", "fenka").split()
    assert output == ["65532", "True", "False"]


def test_workload_image_has_clients_of_both_driver_libraries(
    cluster: Cluster, namespace: str
) -> None:
    """Only import them: this test has no driver."""
    script = "import cuda.bindings.driver, pynvml; print(pynvml.__name__)"
    run = ["python3", "-c", script]
    text = pod("workload", WORKLOAD, cluster.nodes[1].name, run, restartPolicy="Never")
    cluster.apply(text, namespace)
    cluster.wait_for_pod("workload", namespace, "Succeeded")
    assert cluster.kubectl("-n", namespace, "logs", "workload") == "pynvml\n"


@pytest.mark.versions
def test_cdi_device_reaches_the_container_when_a_device_plugin_names_it(
    cluster: Cluster, namespace: str
) -> None:
    """Older versions of containerd drop such a device without an error."""
    node = cluster.nodes[0]
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "fenka.io/harness",
        "devices": [
            {
                "name": "one",
                "containerEdits": {
                    "env": ["SEEN=yes"],
                    "deviceNodes": [{"path": "/dev/harness", "hostPath": "/dev/null"}],
                },
            }
        ],
    }
    node.run("mkdir", "-p", "/var/run/cdi")
    node.run("tee", "/var/run/cdi/harness.json", stdin=json.dumps(spec))
    resource, device = "harness.fenka.io/device", "fenka.io/harness=one"
    node.start("plugin", [sys.executable, device_plugin.__file__, resource, device])
    try:
        wait_until(
            "the device plugin's device",
            lambda: cluster.get("node", node.name)["status"]["allocatable"].get(resource) == "1",
            log=node.log("plugin"),
        )
        look = ["sh", "-c", "echo $SEEN; ls /dev/harness"]
        limits = {"resources": {"limits": {resource: 1}}}
        text = pod("cdi", BUSYBOX, node.name, look, restartPolicy="Never", container=limits)
        cluster.apply(text, namespace)
        cluster.wait_for_pod("cdi", namespace, "Succeeded")
        assert cluster.kubectl("-n", namespace, "logs", "cdi").split() == ["yes", "/dev/harness"]
    finally:
        node.kill("plugin")


def test_privileged_pod_sees_only_its_own_node(cluster: Cluster, namespace: str) -> None:
    """The host's processes and files are those of the node, not of this machine."""
    four, five = cluster.nodes
    for node in (four, five):
        host = yaml.safe_load(
            pod(
                f"host-{node.number}",
                BUSYBOX,
                node.name,
                ["sleep", "1000"],
                hostPID=True,
                hostNetwork=True,
                volumes=[{"name": "lib", "hostPath": {"path": "/var/lib/fenka"}}],
                container={
                    "securityContext": {"privileged": True},
                    "volumeMounts": [{"name": "lib", "mountPath": "/lib-of-node"}],
                },
            )
        )
        cluster.apply(yaml.safe_dump(host), namespace)
    cluster.apply(pod("guest", BUSYBOX, five.name, ["sleep", "4321"]), namespace)
    for name in ("host-0", "host-1", "guest"):
        cluster.wait_for_pod(name, namespace)

    def inside(name: str, *argv: str) -> str:
        return cluster.kubectl("-n", namespace, "exec", name, "--", *argv)

    assert "sleep 4321" in inside("host-1", "ps", "-o", "args")
    assert "sleep 4321" not in inside("host-0", "ps", "-o", "args")
    assert "kubelet" in inside("host-0", "ps", "-o", "args")
    inside("host-0", "sh", "-c", "echo mine > /lib-of-node/note")
    assert four.run("cat", "/var/lib/fenka/note") == "mine\n"
    assert "note" not in five.run("ls", "/var/lib/fenka").split()
    assert not Path("/var/lib/fenka/note").exists()
    four.run("rm", "/var/lib/fenka/note")


@pytest.mark.versions
def test_pods_keep_running_when_kubelet_containerd_and_apiserver_are_killed(
    cluster: Cluster, namespace: str
) -> None:
    """Each is killed with SIGKILL, one after another."""
    node = cluster.nodes[1]
    cluster.apply(pod("steady", BUSYBOX, node.name, ["sleep", "1000"]), namespace)
    before = cluster.wait_for_pod("steady", namespace)["status"]["containerStatuses"][0]
    node.restart_kubelet()
    node.restart_containerd()
    cluster.restart_apiserver()
    cluster.apply(pod("after", BUSYBOX, node.name, ["sleep", "1000"]), namespace)
    cluster.wait_for_pod("after", namespace)
    now = cluster.wait_for_pod("steady", namespace)["status"]["containerStatuses"][0]
    assert (now["containerID"], now["restartCount"]) == (before["containerID"], 0)
    assert cluster.kubectl("-n", namespace, "exec", "steady", "--", "echo", "hi") == "hi\n"


def test_node_keeps_its_disk_when_it_loses_power(cluster: Cluster, namespace: str) -> None:
    """Files in memory are lost, and its pods start again."""
    node = cluster.nodes[1]
    cluster.apply(pod("survivor", BUSYBOX, node.name, ["sleep", "1000"]), namespace)
    cluster.wait_for_pod("survivor", namespace)
    node.run("touch", "/var/lib/fenka/on-disk", "/run/in-memory")
    node.reboot()
    assert "on-disk" in node.run("ls", "/var/lib/fenka").split()
    assert "in-memory" not in node.run("ls", "/run")
    node.run("rm", "/var/lib/fenka/on-disk")

    def restarted() -> bool:
        status = cluster.get("pod", "survivor", namespace)["status"]
        return bool(status["containerStatuses"][0]["restartCount"])

    wait_until("the pod's restart", restarted, log=node.log("kubelet"))
    cluster.wait_for_pod("survivor", namespace)


def test_scheduler_serves_the_new_profile_when_its_configuration_is_replaced(
    cluster: Cluster, namespace: str
) -> None:
    """A pod that names the profile of the new configuration is scheduled."""
    text = """
    apiVersion: kubescheduler.config.k8s.io/v1
    kind: KubeSchedulerConfiguration
    profiles: [{schedulerName: of-the-harness}]
    """
    job = yaml.safe_load(pod("picky", BUSYBOX, cluster.nodes[0].name, ["sleep", "1000"]))
    job["spec"]["schedulerName"] = "of-the-harness"
    before = cluster.scheduler_configuration
    cluster.set_scheduler_configuration(text)
    try:
        cluster.apply(yaml.safe_dump(job), namespace)
        cluster.wait_for_pod("picky", namespace)
    finally:
        cluster.set_scheduler_configuration(before)


def test_machine_is_removed_when_its_owner_is_killed(tmp_path: Path) -> None:
    """Use a second cluster without programs: only machines could be left behind."""
    text = """if True:
        import os, sys, time
        from pathlib import Path
        from e2e.machine import Machine
        machine = Machine(Path(sys.argv[1]), "lonely", "192.0.2.1")
        machine.power_on(os.getpid())
        machine.start("sleeper", ["sleep", "1000"])
        print(machine.first_process, flush=True)
        time.sleep(1000)
    """
    command = [sys.executable, "-c", text, str(tmp_path)]
    owner = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    first = Process.of(int(owner.stdout.readline()))
    files = MachineFiles(tmp_path, "lonely")
    groups = [CGROUPS / hierarchy / files.cgroup for hierarchy in hierarchies()]
    assert groups
    assert all(group.exists() for group in groups)
    owner.kill()
    owner.wait()
    wait_until("the machine's end", lambda: not first.alive() and not files.record.exists())
    assert not any(group.exists() for group in groups)
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def test_machine_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    """`down` removes what the kernel does not clean up."""
    machine = Machine(tmp_path, "orphan", "192.0.2.1")
    machine.power_on()
    supervisor, first = machine.files.processes() or (None, None)
    assert supervisor
    assert first
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until("the machine's end", lambda: not first.alive())
    Cluster(tmp_path).down()
    assert not [
        hierarchy
        for hierarchy in hierarchies()
        if (CGROUPS / hierarchy / machine.files.cgroup).exists()
    ]


def test_images_are_built_with_the_uv_version_of_the_makefile() -> None:
    """Each image is built on its own, so each names the version."""
    makefile = (REPOSITORY / "Makefile").read_text()
    version = next(line for line in makefile.splitlines() if line.startswith("UV_VERSION"))
    number = version.split(":=")[1].strip()
    images = ("workload", "training", "frameworks")
    paths = [REPOSITORY / "e2e" / "containers" / f"{image}.Dockerfile" for image in images]
    for dockerfile in paths:
        assert f"ARG UV_VERSION={number}\n" in dockerfile.read_text()


def test_two_versions_of_kubernetes_can_be_built_at_once() -> None:
    """Their names differ after a dot only."""
    assert kubernetes("1.30").lock() != kubernetes("1.33").lock()


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("FENKA_E2E_KUBERNETES", r"choose 1\.30, 1\.33, 1\.36, or leave it out"),
        ("FENKA_E2E_CONTAINERD", r"choose 1\.7 or 2"),
        ("FENKA_E2E_HELM", r"choose 3 or 4"),
    ],
)
def test_unknown_version_is_refused_with_those_that_there_are(
    variable: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's own version may be named, too."""
    monkeypatch.setenv(variable, "1.2")
    with pytest.raises(BuildError, match=sentence):
        chosen()
    monkeypatch.setenv("FENKA_E2E_CONTAINERD", "2")
    monkeypatch.setenv("FENKA_E2E_KUBERNETES", "1.37")
    monkeypatch.setenv("FENKA_E2E_HELM", "4")
    assert chosen() == MODULES


def test_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    """Files and folders; what was made first stays if it was used again."""
    for used, name in enumerate(("b", "c", "a", "d")):
        entry = tmp_path / name
        entry.mkdir() if used % 2 else entry.touch()
        os.utime(entry, (used, used))
    keep_latest(tmp_path.iterdir(), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]
