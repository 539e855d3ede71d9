"""The options of the node program. Imports nothing, so that they can be read before the program is."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Config:
    """The program's options. Directories are the node's own, at the same paths in this process."""

    node: str
    unit_mib: int = 1024
    simulated: Path | None = None
    host: Path = Path("/")
    kubeconfig: Path | None = None
    plugins: Path = Path("/var/lib/kubelet/device-plugins")
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    cdi: Path = Path("/var/run/cdi")
    leases: Path = Path("/run/fenka/leases")
    state: Path = Path("/var/lib/fenka")
    exclusive: bool = True
    labelled_only: bool = False
    hami: bool = False
    assume_cdi: bool = False
    over_limit: str = "report"
    unmanaged_process: str = "kill"
    metrics_port: int | None = None
