"""Test DNS: pods reach Services and each other by name."""

from textwrap import dedent

import pytest

from e2e.cluster import Cluster, ClusterError, wait_until
from e2e.images import BUSYBOX, WORKLOAD
from e2e.test_harness import pod

HEADLESS = dedent(
    """
    apiVersion: v1
    kind: Service
    metadata: {name: peers}
    spec:
      clusterIP: None
      publishNotReadyAddresses: true
      selector: {app: member}
      ports: [{port: 80}]
    """
)


def resolve(cluster: Cluster, namespace: str, pod: str, name: str) -> str:
    """Return the address of a name as `getaddrinfo` in a pod resolves it."""
    command = f"import socket; print(socket.gethostbyname({name!r}))"
    return cluster.kubectl("-n", namespace, "exec", pod, "--", "python3", "-c", command).strip()


def test_pod_resolves_services_and_members_of_headless_services(
    cluster: Cluster, namespace: str
) -> None:
    """With and without the namespace and the domain; a name that does not exist is reported at once."""
    here, there = (node.name for node in cluster.nodes)
    cluster.apply(HEADLESS, namespace)
    member = {"hostname": "member-0", "subdomain": "peers"}
    cluster.apply(pod("member", BUSYBOX, there, ["sleep", "1000"], **member), namespace)
    cluster.apply(pod("client", WORKLOAD, here, ["sleep", "1000"]), namespace)
    address = cluster.wait_for_pod("member", namespace)["status"]["podIP"]
    cluster.wait_for_pod("client", namespace)
    api = cluster.get("service", "kubernetes")["spec"]["clusterIP"]
    expected = {
        "kubernetes.default": api,
        "kubernetes.default.svc.cluster.local": api,
        "member-0.peers": address,
        f"member-0.peers.{namespace}.svc.cluster.local": address,
    }

    def resolved() -> bool:
        assert {name: resolve(cluster, namespace, "client", name) for name in expected} == expected
        return True

    wait_until("the names", resolved)
    with pytest.raises(ClusterError, match="Name or service not known"):
        resolve(cluster, namespace, "client", "pypi.org")
