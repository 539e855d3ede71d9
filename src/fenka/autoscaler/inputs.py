"""Options of the program, and cases in files of the format `fenka.plan/1`.

They are apart from the program, so that `fenka autoscaler plan` need not load it.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fenka.cluster.queue_snapshot import TopologyLevels
from fenka.core.errors import InvalidCase
from fenka.core.nodes.case import PlanningCase, check_case
from fenka.core.units import MIB
from fenka.formats import documents
from fenka.server.program import Kubeconfig, LogLevel, ReplicaName


class AutoscalerOptions(msgspec.Struct, frozen=True):
    """Options of `fenka autoscaler`."""

    address: Annotated[str, Meta(description="address to listen on")] = "0.0.0.0"
    port: Annotated[int, Meta(description="port for probes and metrics")] = 12347
    namespace: Annotated[
        str,
        Meta(
            description="namespace of the replicas' Lease and ConfigMaps",
            extra={"envvar": "POD_NAMESPACE"},
        ),
    ] = "kube-system"
    lease: Annotated[str, Meta(description="Lease by which the replicas elect a leader")] = (
        "fenka-autoscaler"
    )
    name: ReplicaName = ""
    hami_names: Annotated[
        bool, Meta(description="also accept nvidia.com/gpumem and nvidia.com/gpucores")
    ] = False
    topology_level: TopologyLevels = []
    scheduler_name: Annotated[
        list[str],
        Meta(
            title="NAME",
            description="serve only pods of this schedulerName, as the scheduler does; repeatable",
        ),
    ] = []
    kubeconfig: Kubeconfig = None
    log_level: LogLevel = "info"


MAX_BYTES = 64 * MIB
"""More than any cluster's case."""


def read_case(path: Path) -> PlanningCase:
    """Return the case in a file. Raises InvalidCase, OSError."""
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise InvalidCase(f"{path} has more than {MAX_BYTES} bytes: it is no case")
    return decode_case(text)


def decode_case(text: bytes) -> PlanningCase:
    """Return the case of this JSON. Raises InvalidCase for anything that is not understood."""
    try:
        case = documents.decode_json(text, PlanningCase, "the case")
    except documents.InvalidDocument as why:
        raise InvalidCase(str(why)) from None
    check_case(case)
    return case
