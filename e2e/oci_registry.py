"""A registry of images and charts on the control plane, which nodes, pods and helm reach by HTTPS."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import Cluster
from e2e.configuration import CERTIFICATES
from e2e.machine import ClusterError, wait_until
from e2e.pki import Authority
from e2e.programs import REGISTRY, build

PORT = 5000
DAEMON = "registry"


@dataclass(frozen=True)
class OciRegistry:
    """A registry that runs.

    Attributes:
        cluster: The cluster on whose control plane it runs.
        address: Its host and port.
    """

    cluster: Cluster
    address: str

    @property
    def authority(self) -> Path:
        """The certificate of the authority that signed the registry's."""
        return self.cluster.state / "pki" / "ca.crt"

    @property
    def trusted(self) -> Path:
        """The folder of authorities, as skopeo wants it."""
        return self.cluster.state / "pki" / DAEMON

    def push_image(self, archive: Path, name: str) -> None:
        """Push the image of all processors in an OCI archive."""
        if not shutil.which("skopeo"):
            raise ClusterError(
                "skopeo is not installed: apt install --no-install-recommends skopeo"
            )
        copy = ("skopeo", "copy", "--quiet", "--all", f"--dest-cert-dir={self.trusted}")
        target = f"docker://{self.address}/{name}"
        self.cluster.control_plane.run(*copy, f"oci-archive:{archive}", target)

    def push_chart(self, packed: Path, folder: str) -> None:
        """Push a packaged chart into a folder of charts."""
        trust = f"--ca-file={self.authority}"
        self.cluster.helm("push", str(packed), f"oci://{self.address}/{folder}", trust)

    def index(self, name: str) -> bytes:
        """Return the bytes of an image's index."""
        inspect = ("skopeo", "inspect", "--raw", f"--cert-dir={self.trusted}")
        return self.cluster.control_plane.run(*inspect, f"docker://{self.address}/{name}").encode()


@contextmanager
def running_registry(cluster: Cluster) -> Iterator[OciRegistry]:
    """Run a registry that all nodes trust; end it and remove its content afterwards."""
    build(REGISTRY)
    machine = cluster.control_plane
    registry = OciRegistry(cluster, f"{machine.address}:{PORT}")
    Authority(cluster.state / "pki").server(DAEMON, [DAEMON], [machine.address])
    files = f"{cluster.state}/pki/{DAEMON}"
    settings = cluster.state / "registry.json"
    settings.write_text(
        json.dumps(
            {
                "version": 0.1,
                "log": {"level": "warn"},
                "storage": {"filesystem": {"rootdirectory": str(cluster.state / "registry")}},
                "http": {
                    "addr": registry.address,
                    "tls": {"certificate": f"{files}.crt", "key": f"{files}.key"},
                },
            }
        )
    )
    hosts = f'[host."https://{registry.address}"]\n  ca = "{registry.authority}"\n'
    for node in cluster.nodes:
        folder = f"{CERTIFICATES}/{registry.address}"
        node.run("sh", "-c", f"mkdir -p {folder} && cat > {folder}/hosts.toml", stdin=hosts)
    registry.trusted.mkdir()
    (registry.trusted / "ca.crt").write_bytes(registry.authority.read_bytes())
    program = REGISTRY.directory() / "bin" / DAEMON
    machine.start(DAEMON, [str(program), "serve", str(settings)])
    connect = f"import socket; socket.create_connection({(machine.address, PORT)})"
    wait_until(
        "the registry", lambda: not machine.run("python3", "-c", connect), log=machine.log(DAEMON)
    )
    try:
        yield registry
    finally:
        machine.kill(DAEMON)
        machine.run("rm", "-rf", str(cluster.state / "registry"))
