"""Operate the cluster by hand: ``python -m e2e up|down|status|kubectl …|helm …|sh NODE …``."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from e2e import images
from e2e.cluster import CONTROL_PLANE, STATE, Cluster, Layout, NodeSpec
from e2e.machine import ClusterError, Machine
from e2e.programs import BuildError
from e2e.programs import main as build_programs


def main() -> int:
    """Run the subcommand; report an expected error as one sentence and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m e2e", description=__doc__)
    default = Path(os.environ.get("FENKA_E2E_STATE") or STATE)
    parser.add_argument(
        "--state", type=Path, default=default, help=f"folder of the cluster's files ({default})"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start it")
    up.add_argument(
        "--node", action="append", metavar="NAME=ADDRESS", help="replace the two default nodes"
    )
    up.add_argument("--scheduler-config", type=Path, help="a KubeSchedulerConfiguration")
    commands.add_parser("down", help="stop it")
    commands.add_parser("status", help="list machines and daemons")
    commands.add_parser("build", help="build the programs and the images")
    for name in ("kubectl", "helm", "run"):
        commands.add_parser(name, help=f"{name} in the control plane's network", add_help=False)
    commands.add_parser("sh", help="NODE [COMMAND…]: inside a node", add_help=False)
    arguments, rest = parser.parse_known_args()
    try:
        return act(arguments, rest)
    except (ClusterError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1


def act(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run one subcommand and return its exit code."""
    match arguments.command:
        case "up":
            specs = [NodeSpec(*each.split("=", 1)) for each in arguments.node or ()]
            layout = Layout(tuple(specs)) if specs else Layout()
            cluster = Cluster(arguments.state, layout, progress=print)
            config = arguments.scheduler_config
            cluster.up(images.image_store(), config.read_text() if config else None)
        case "down":
            Cluster(arguments.state).down()
        case "status":
            status(Cluster.attach(arguments.state))
        case "build":
            Cluster.require_machine()  # Before ten minutes of building.
            return build_programs() or images.main()
        case "sh":
            cluster = Cluster.attach(arguments.state)
            name, *command = rest or [CONTROL_PLANE]
            plane = cluster.control_plane
            machine = plane if name == CONTROL_PLANE else cluster.node(name)
            inside = machine.command(*(command or ["bash"]))
            return subprocess.run(inside, env=machine.environment(), check=False).returncode
        case name:
            cluster = Cluster.attach(arguments.state)
            outside = cluster.command(*([] if name == "run" else [name]), *rest)
            return subprocess.run(outside, env=cluster.environment(), check=False).returncode
    return 0


def status(cluster: Cluster) -> None:
    """Print every machine and its daemons."""
    machines: list[Machine] = [cluster.control_plane, *cluster.nodes]
    for machine in machines:
        print(f"{machine.name}  {machine.address}  {'on' if machine.is_on() else 'off'}")
        for daemon in machine.daemons() if machine.is_on() else ():
            state = "runs" if machine.runs(daemon) else "ended"
            print(f"  {daemon:24} {state:6} {machine.log(daemon)}")


if __name__ == "__main__":
    sys.exit(main())
