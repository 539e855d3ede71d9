"""`fenka containers`: serve containers with slices of this machine's cards, or no more."""

import os
from typing import Annotated, Literal

import typer

from fenka.cli.error_report import UserError
from fenka.workstation import files, paths
from fenka.workstation.client import get_snapshot
from fenka.workstation.containers import cdi_devices


def containers(
    state: Annotated[
        Literal["on", "off"], typer.Argument(help="whether engines know fenka's devices")
    ],
) -> None:
    """Write or remove the devices that engines know."""
    if os.geteuid() != 0:
        raise UserError(
            f"only root changes {cdi_devices.DIRECTORY}: use `sudo fenka containers {state}`"
        )
    if state == "off":
        removed = cdi_devices.remove()
        print("containers get no slices any more; those that run keep theirs" if removed else "off")
        return
    runtime = paths.own()
    snapshot = get_snapshot(runtime)
    config = files.load_config(runtime) or files.DaemonConfig()
    machine = cdi_devices.describe(
        [card.memory_mib for card in snapshot.cards],
        snapshot.unit_mib,
        "" if snapshot.simulated else snapshot.driver,
        config.driver,
    )
    changed = cdi_devices.write(machine, runtime)
    names = ", ".join(map(str, cdi_devices.files().values()))
    print(f"{names}: {'written' if changed else 'unchanged'}")
    print("try: docker run --rm --device fenka.io/slice=1 IMAGE nvidia-smi")
