"""Resolve the names of the cluster's Services and pods: CoreDNS on the control plane's machine.

It is a daemon like the other components. The Service `kube-dns` at the address that kubelets give to pods
has an EndpointSlice with the control plane's address.
"""

import json
from pathlib import Path

from e2e.administrator import Administrator
from e2e.configuration import DNS_SERVICE, DOMAIN
from e2e.machine import wait_until

READY_PORT = 8181
USER = "system:coredns"


def start(cluster: Administrator) -> None:
    """Start CoreDNS and create its Service."""
    plane = cluster.control_plane
    settings = plane.files.folder / "Corefile"
    kubeconfig = plane.files.state / "pki" / "coredns.kubeconfig"
    settings.write_text(corefile(plane.address, kubeconfig))
    plane.start("coredns", ["coredns", "-conf", str(settings)])
    cluster.apply(objects(plane.address), "kube-system")


def wait_until_ready(cluster: Administrator) -> None:
    """Wait until CoreDNS has read the cluster's Services."""
    plane = cluster.control_plane
    url = f"http://{plane.address}:{READY_PORT}/ready"
    wait_until("DNS", lambda: cluster.fetch(url), log=plane.log("coredns"))


def corefile(address: str, kubeconfig: Path) -> str:
    """Return CoreDNS's configuration.

    Names of the cluster are not cached, as in a cluster made by kubeadm. All other names do not exist: there
    is no route to the Internet.
    """
    return f"""\
{DOMAIN} in-addr.arpa {{
    bind {address}
    errors
    ready {address}:{READY_PORT}
    kubernetes {{
        kubeconfig {kubeconfig}
    }}
}}
. {{
    bind {address}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def objects(address: str) -> str:
    """Return the Service, its endpoint outside of the pods, and CoreDNS's rights."""
    ports = [{"name": name, "port": 53, "protocol": name.upper()} for name in ("udp", "tcp")]
    service = {"name": "kube-dns", "namespace": "kube-system"}
    rbac = "rbac.authorization.k8s.io"
    items = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": service,
            "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": service | {"labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address]}],
            "ports": ports,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": USER},
            "rules": [
                {
                    "apiGroups": ["", "discovery.k8s.io"],
                    "resources": ["services", "namespaces", "endpointslices"],
                    "verbs": ["list", "watch"],
                }
            ],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": USER},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": USER},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": USER}],
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
