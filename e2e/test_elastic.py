"""Test machines that start and end while the cluster runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.administrator import FETCH
from e2e.cluster import Cluster, Node, wait_until
from e2e.elastic import Group, Instances, node_of
from e2e.images import BUSYBOX
from e2e.supervisor import CGROUPS, REPOSITORY, hierarchies
from e2e.test_harness import pod, web

LABELS = {"fenka.io/test": "elastic"}


class Cloud:
    """Calls the command as a provider does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.instances = Instances(cluster.state)

    def call(self, *arguments: str) -> None:
        """Run the command."""
        command = [sys.executable, "-m", "e2e.elastic", str(self.cluster.state), *arguments]
        subprocess.run(command, cwd=REPOSITORY, check=True)

    def start(self, name: str, group: str = "t4") -> None:
        """Start an instance in zone g."""
        self.call("start", name, group, "gn6i", "g")

    def node(self, name: str) -> Node:
        """Return the machine of an instance."""
        instance = self.instances.read(name)
        assert instance is not None
        return node_of(self.instances, instance)

    def wait_until_ready(self, *names: str) -> None:
        """Wait until the nodes of these instances are Ready."""
        for name in names:
            self.node(name).wait_until_ready()

    def end(self, *names: str) -> None:
        """End instances, and delete their Nodes as the autoscaler does."""
        for name in names:
            self.call("end", name)
            wait_until(f"{name}: its end", lambda name=name: self.instances.read(name) is None)  # type: ignore[misc]
            self.cluster.kubectl("delete", "node", name, "--ignore-not-found")


@pytest.fixture
def cloud(cluster: Cluster) -> Iterator[Cloud]:
    """Provide a cloud with a group whose machines join and one whose machines do not."""
    cloud = Cloud(cluster)
    groups = {"t4": Group(LABELS), "broken": Group(joins=False)}
    cloud.instances.configure(groups, "simulated:///{zone}/{id}")
    yield cloud
    cloud.end(*(each.id for each in cloud.instances.all()))


def test_machines_join_and_leave_nothing_when_a_cloud_starts_and_ends_them(
    cloud: Cloud, cluster: Cluster, namespace: str
) -> None:
    """Pods reach each other between new machines, and from and to those that were there."""
    names = ("i-one", "i-two")
    with ThreadPoolExecutor() as pool:
        # Whoever was killed calls again.
        list(pool.map(cloud.start, names * 2))
    cloud.wait_until_ready(*names)
    node = cluster.get("node", "i-one")
    assert node["spec"]["providerID"] == "simulated:///g/i-one"
    expected = {
        **LABELS,
        "topology.kubernetes.io/zone": "g",
        "node.kubernetes.io/instance-type": "gn6i",
    }
    assert expected.items() <= node["metadata"]["labels"].items()
    present = cluster.nodes[0].name
    addresses = {}
    for name, on in (("one", "i-one"), ("two", "i-two"), ("old", present)):
        cluster.apply(web(name, on), namespace)
    for name in ("one", "two", "old"):
        addresses[name] = cluster.wait_for_pod(name, namespace)["status"]["podIP"]
    for caller in addresses:
        for other in addresses.keys() - {caller}:
            url = f"http://{addresses[other]}:8080/"
            inside = ("-n", namespace, "exec", caller, "--", "python3", "-c", FETCH, url)
            assert cluster.kubectl(*inside).strip() == other
    machine, second = cloud.node("i-one"), cloud.node("i-two")
    groups = [CGROUPS / each / machine.files.cgroup for each in hierarchies()]
    assert all(group.exists() for group in groups)
    cloud.end(*names, *names)
    assert not any(group.exists() for group in groups)
    assert not machine.files.folder.exists()
    assert not list((cluster.state / "pki").glob("*i-one*"))
    links = json.loads(cluster.run("ip", "-json", "link"))
    assert f"node{machine.number}" not in {link["ifname"] for link in links}
    cloud.start("i-three")
    cloud.wait_until_ready("i-three")
    # They were started at once, in any order.
    assert cloud.node("i-three").address in (machine.address, second.address)
    cluster.apply(pod("three", BUSYBOX, "i-three", ["sleep", "1000"]), namespace)
    cluster.wait_for_pod("three", namespace)
    # The log goes from the kubelet on an address that another machine had.
    cluster.kubectl("-n", namespace, "logs", "three")


def test_machine_that_is_starting_ends_when_its_cloud_ends_it(cloud: Cloud) -> None:
    """Nothing of it is left, however far it was."""
    cloud.start("i-short")
    machine = cloud.node("i-short")
    wait_until("its first process", machine.is_on)
    cloud.end("i-short")
    assert not machine.files.folder.exists()


def test_machine_never_joins_when_its_group_is_so(cloud: Cloud, cluster: Cluster) -> None:
    """Its cloud takes it for running nevertheless."""
    cloud.start("i-never", "broken")
    cloud.start("i-short")
    cloud.wait_until_ready("i-short")
    assert [each.id for each in cloud.instances.all()] == ["i-never", "i-short"]
    assert "i-never" not in cluster.kubectl("get", "nodes", "-o", "name")
