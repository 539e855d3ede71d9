"""The options of the node program. Imports little, so that they can be read before the program is."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fenka.server.pod_spans import Traces
from fenka.server.program import LogLevel

SpotNotices = Literal["auto", "always", "never"]


STORE = "node"
"""The folder of tokens in the directory `state`."""
_State = Annotated[
    Path,
    Meta(
        title="DIRECTORY",
        description="libraries and records of leases, at the same path on the node; not noexec",
    ),
]


class RelayConfig(msgspec.Struct, frozen=True):
    """The options of `fenka plugin-relay`."""

    directory: Annotated[
        Path, Meta(title="DIRECTORY", description="where the node program registers: its --relay")
    ]
    state: _State = Path("/var/lib/fenka")
    log_level: LogLevel = "info"


class NodeConfig(msgspec.Struct, frozen=True):
    """The options of `fenka node`."""

    name: Annotated[
        str, Meta(description="this node's name in the cluster", extra={"envvar": "NODE_NAME"})
    ]
    unit: Annotated[str, Meta(description="unit of aliyun.com/gpu-mem: GiB, MiB, 256MiB …")] = "GiB"
    simulated: Annotated[
        Path | None,
        Meta(title="DIRECTORY", description="use the simulated cards of `fenka sim node`"),
    ] = None
    host_root: Annotated[
        Path, Meta(description="where this process sees the node's root directory")
    ] = Path("/")
    state: _State = Path("/var/lib/fenka")
    relay: Annotated[
        Path | None,
        Meta(
            title="DIRECTORY",
            description="register with `fenka plugin-relay` of this directory; default: with the kubelet",
        ),
    ] = None
    driver_root: Annotated[
        str,
        Meta(
            title="DIRECTORY",
            description="the driver's root, or the directory of its libraries, on the node; "
            "default: where distributions and GPU Operator have it",
        ),
    ] = ""
    kubeconfig: Annotated[Path | None, Meta(description="default: the pod's service account")] = (
        None
    )
    exclusive: Annotated[
        bool, Meta(description="offer nvidia.com/gpu while the node is not shared")
    ] = True
    free_cards_taint: Annotated[
        bool,
        Meta(
            description="keep taint fenka.io/free-cards:PreferNoSchedule on the node while a card is free"
        ),
    ] = True
    labelled_only: Annotated[
        bool, Meta(description="offer nothing on nodes with neither label")
    ] = False
    hami_names: Annotated[
        bool, Meta(description="also accept nvidia.com/gpumem and nvidia.com/gpucores")
    ] = False
    assume_cdi: Annotated[bool, Meta(description="containerd 1.7 has enable_cdi set")] = False
    over_limit: Annotated[
        Literal["report", "evict"],
        Meta(description="reaction to a pod that exceeds its limit"),
    ] = "report"
    unmanaged_process: Annotated[
        Literal["kill", "report"],
        Meta(description="reaction to a pod's process without fenka's library"),
    ] = "kill"
    end_overdue: Annotated[
        bool,
        Meta(
            description="kill programs that outlive their pod, its deletion or its activeDeadlineSeconds"
        ),
    ] = True
    spot_notices: Annotated[
        SpotNotices,
        Meta(
            description="ask the metadata service whether this machine is taken back; "
            "auto: on nodes labelled fenka.io/capacity=spot"
        ),
    ] = "auto"
    aws_metadata: Annotated[
        str, Meta(title="IP[:PORT]", description="address of AWS's metadata service")
    ] = "169.254.169.254"
    alibaba_metadata: Annotated[
        str, Meta(title="IP[:PORT]", description="address of Alibaba Cloud's metadata service")
    ] = "100.100.100.200"
    mig_config: Annotated[
        Path | None,
        Meta(title="FILE", description="layouts of MIG instances, as a file of mig-parted"),
    ] = None
    metrics_port: Annotated[
        int | None, Meta(title="PORT", description="serve /metrics, /healthz and /readyz")
    ] = None
    traces: Traces = ""
    log_level: LogLevel = "info"
