"""`fenka node`: the program on every GPU node of a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from fenka.cli import node_process
from fenka.cli.options import HamiOption
from fenka.dialects.sizes import parse_unit
from fenka.node.config import Config


def node(
    name: Annotated[
        str, typer.Option("--name", envvar="NODE_NAME", help="this node's name in the cluster")
    ],
    unit: Annotated[
        str, typer.Option(help="unit of aliyun.com/gpu-mem: GiB, MiB, 256MiB …")
    ] = "GiB",
    simulated: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="use the simulated cards of `fenka sim node`"),
    ] = None,
    host_root: Annotated[
        Path, typer.Option(help="where this process sees the node's root directory")
    ] = Path("/"),
    kubeconfig: Annotated[
        Path | None, typer.Option(help="default: the pod's service account")
    ] = None,
    exclusive: Annotated[
        bool, typer.Option(help="offer nvidia.com/gpu while the node is not shared")
    ] = True,
    labelled_only: Annotated[
        bool, typer.Option("--labelled-only", help="offer nothing on nodes with neither label")
    ] = False,
    hami_names: HamiOption = False,
    assume_cdi: Annotated[
        bool, typer.Option("--assume-cdi", help="containerd 1.7 has enable_cdi set")
    ] = False,
    over_limit: Annotated[
        str, typer.Option(help="reaction to a pod that exceeds its limit: report or evict")
    ] = "report",
    unmanaged_process: Annotated[
        str,
        typer.Option(help="reaction to a pod's process without fenka's library: kill or report"),
    ] = "kill",
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="serve /metrics, /healthz and /readyz")
    ] = None,
) -> None:
    """Serve the kubelet until SIGTERM or SIGINT."""
    node_process.start(
        Config(
            node=name,
            unit_mib=parse_unit(unit),
            simulated=simulated,
            host=host_root,
            kubeconfig=kubeconfig,
            exclusive=exclusive,
            labelled_only=labelled_only,
            hami=hami_names,
            assume_cdi=assume_cdi,
            over_limit=over_limit,
            unmanaged_process=unmanaged_process,
            metrics_port=metrics_port,
        )
    )
