"""Options of the program, apart from the program: `fenka autoscaler plan` need not load it."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta


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
    name: Annotated[
        str,
        Meta(description="this replica's name; default: the host's", extra={"envvar": "POD_NAME"}),
    ] = ""
    hami_names: Annotated[
        bool, Meta(description="also accept nvidia.com/gpumem and nvidia.com/gpucores")
    ] = False
    scheduler_name: Annotated[
        list[str],
        Meta(
            title="NAME",
            description="serve only pods of this schedulerName, as the scheduler does; repeatable",
        ),
    ] = []
    kubeconfig: Annotated[
        Path | None,
        Meta(
            title="FILE",
            description="default: the pod's service account, then $KUBECONFIG, then ~/.kube/config",
        ),
    ] = None
