"""`fenka doctor`: checks drivers, cards, limits and the daemon."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from fenka import native
from fenka.cli import tables
from fenka.cli.admin import hardware_check
from fenka.cli.common_options import OutputOption
from fenka.cli.error_report import UserError
from fenka.core.errors import INVALID_INPUT
from fenka.core.units import card_units
from fenka.formats.quantities import UNITS_MIB
from fenka.hardware import driver_places
from fenka.hardware.driver_places import Looked
from fenka.hardware.nvml import Driver, NoDriver
from fenka.history.series import NOT_RECORDED
from fenka.isolation import closed_nodes, sandbox
from fenka.workstation import paths, protocol
from fenka.workstation.client import (
    DaemonConnection,
    DaemonUnavailable,
    RequestFailed,
    get_snapshot,
)
from fenka.workstation.containers import cdi_devices
from fenka.workstation.paths import UnsafeDirectory

UNKNOWN_MEMORY = "unknown memory"
"""Of a card whose driver reports none."""


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check. `note` is information that is neither good nor bad.

    looked: for the driver's files, where they were searched and what was found there.
    """

    subject: str
    status: Literal["ok", "note", "wrong"]
    detail: str
    looked: list[Looked] = []


def doctor(
    output: OutputOption = "table",
    hardware: Annotated[
        bool,
        typer.Option(
            "--hardware",
            help="try limits, shares and the driver's answers on a card: at most 8 minutes, in what is free",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="with --hardware: half a minute, less exact")
    ] = False,
    torch: Annotated[
        str,
        typer.Option(
            "--torch", metavar="PYTHON", help="with --hardware: a Python that has PyTorch"
        ),
    ] = "",
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="with --hardware: write JSON there, too"),
    ] = None,
) -> None:
    """Print the checks; exit code 1 if anything is wrong."""
    if hardware:
        hardware_check.check(output, quick=quick, torch_python=torch, file=report)
        return
    if quick or torch or report:
        raise UserError("--quick, --torch and --report require --hardware", INVALID_INPUT)
    checks = [
        _libraries(),
        _places(),
        *_daemon(),
        _isolation(),
        _compute(),
        _containers(),
        _jupyter(),
    ]
    if not tables.print_data(checks, output):
        rows = [(check.status, check.subject, check.detail) for check in checks]
        print("\n".join(tables.align(rows)))
    if any(check.status == "wrong" for check in checks):
        sys.exit(1)


def _libraries() -> Check:
    shim = native.DIRECTORY / "libfenka.so"
    if shim.exists():
        return Check("shim", "ok", str(shim))
    return Check("shim", "wrong", str(native.missing(shim)))


def _places() -> Check:
    """Say where the driver's files were searched and found. The dynamic linker may know other ones."""
    search = driver_places.search()
    looked = list(search.looked)
    refused = [
        f"{look.directory}: {look.result}"
        for look in looked
        if look.result and not look.result.startswith("driver ")
    ]
    if search.driver is None:
        return Check("driver files", "note", f"{search.problem}; `-o json` lists them", looked)
    if search.problem:
        return Check("driver files", "wrong", search.problem, looked)
    others = [f"{one.version} in {one.directory}" for one in search.found if one != search.driver]
    detail = f"{search.driver.version} in {search.driver.directory}, of {len(looked)} places"
    if others:
        detail += f"; also {', '.join(others)}, which is not used"
    return Check("driver files", "note" if refused else "ok", "; ".join([detail, *refused]), looked)


def _daemon() -> list[Check]:
    runtime = paths.current()
    try:
        snapshot = get_snapshot(runtime)
    except DaemonUnavailable as why:
        check = Check("daemon", "wrong", str(why))
        if not runtime.foreign:
            hint = f"none runs at {runtime.socket}; commands start it by themselves"
            check = Check("daemon", "note", hint)
        return [check, *_cards_without_daemon()]
    except (protocol.ProtocolMismatch, UnsafeDirectory) as why:
        return [Check("daemon", "wrong", str(why))]
    unit = "GiB" if snapshot.unit_mib == UNITS_MIB["GiB"] else f"{snapshot.unit_mib} MiB"
    detail = (
        f"fenka {snapshot.version}, process {snapshot.pid}, {runtime.socket}, "
        f"policy {snapshot.policy}, unit {unit}"
    )
    libraries = snapshot.library_dir if snapshot.simulated else None
    return [
        Check("daemon", "ok", detail),
        _driver(snapshot.driver, snapshot.cuda, libraries),
        *(_card(card, snapshot) for card in snapshot.cards),
        _leases(snapshot),
        *_violations(snapshot),
        *_unreadable(snapshot),
        _history(runtime),
        *_device_nodes(runtime),
    ]


def _history(runtime: paths.Runtime) -> Check:
    try:
        with DaemonConnection(runtime) as daemon:
            read = daemon.request(protocol.GetHistory(since=0, until=0), protocol.HistoryRead)
    except (DaemonUnavailable, RequestFailed) as why:
        return Check("history", "note", str(why))
    if read.problem:
        recording = not read.problem.startswith(NOT_RECORDED)
        return Check("history", "note" if recording else "wrong", read.problem)
    return Check("history", "ok", "recorded; `fenka usage` adds it up")


def _device_nodes(runtime: paths.Runtime) -> list[Check]:
    """Say who can open the cards' device nodes. Of containers nothing if none is served."""
    if not runtime.system:
        return []
    try:
        with DaemonConnection(runtime) as daemon:
            read = daemon.request(protocol.GetDeviceAccess(), protocol.DeviceAccessRead)
    except (DaemonUnavailable, RequestFailed) as why:
        return [Check("device nodes", "note", str(why))] if cdi_devices.exist() else []
    parameters = closed_nodes.PARAMETERS.read_text() if closed_nodes.PARAMETERS.exists() else ""
    return [
        *([device_nodes_check(read)] if cdi_devices.exist() else []),
        *([closed_cards_check(parameters)] if read.closed else []),
    ]


def closed_cards_check(parameters: str) -> Check:
    """Return the check of closed cards. parameters: the driver's, as in /proc; empty if it has none."""
    subject, only = "closed cards", "only leases have the cards' device nodes"
    if parameters and closed_nodes.reopened_by_driver(parameters):
        return Check(
            subject,
            "wrong",
            f"{only}, but nvidia-modprobe opens them to all users whenever a program asks, until the daemon "
            "closes them within 5 s: write `options nvidia NVreg_ModifyDeviceFiles=0 "
            "NVreg_DeviceFileMode=0600` to /etc/modprobe.d/fenka.conf, and load the driver again",
        )
    return Check(
        subject,
        "ok",
        f"{only}; other programs of users, such as nvidia-smi, DCGM and X, can use them as root only, and "
        "`docker --gpus` is not stopped",
    )


def device_nodes_check(read: protocol.DeviceAccessRead) -> Check:
    """Return the check of what root's daemon does about containers' device nodes."""
    subject, only = "device nodes", "only the shim keeps its programs to their cards"
    if read.version:
        detail = (
            "each container opens its own cards' only, by its control group of version "
            f"{read.version}"
        )
        if not read.shim_only:
            return Check(subject, "ok", detail)
        return Check(
            subject, "note", f"{detail}; with --shim-only one whose group cannot: then {only}"
        )
    if read.shim_only:
        return Check(
            subject,
            "note",
            f"a container opens all cards', as --shim-only allows: {only}; {read.problem}",
        )
    return Check(
        subject,
        "wrong",
        f"no container is started, since it could open all cards': {read.problem}; `fenka daemon "
        "--shim-only` starts it all the same",
    )


def _cards_without_daemon() -> list[Check]:
    try:
        with Driver.open() as driver:
            libraries = "" if driver.simulated else None
            checks = [_driver(driver.version, driver.cuda_version, libraries)]
            for card in driver.cards():
                memory = f"{card.memory_mib} MiB" if card.memory_mib else UNKNOWN_MEMORY
                detail = f"{card.model}, {memory}, {card.uuid}"
                checks.append(Check(f"card {card.index}", "ok", detail))
            return checks
    except NoDriver as why:
        return [Check("driver", "wrong", str(why))]


def _driver(version: str, cuda: str, libraries: str | None) -> Check:
    """Args: libraries: where those of a simulated driver are, empty if unknown; None for NVIDIA's."""
    if libraries is None:
        return Check("driver", "ok", f"NVIDIA {version}, CUDA {cuda}")
    real = "; frameworks on the CUDA runtime, such as PyTorch and CuPy, need a real card"
    hint = f"; see its cards from outside a lease with LD_LIBRARY_PATH={libraries}"
    return Check(
        "driver", "note", f"simulated {version}, CUDA {cuda}{real}{hint if libraries else ''}"
    )


def _card(card: protocol.CardView, snapshot: protocol.MachineSnapshot) -> Check:
    units = card_units(card.memory_mib, snapshot.unit_mib)
    context = "unknown" if card.context_mib is None else f"{card.context_mib} MiB"
    subject = f"card {card.index}"
    memory = f"{card.memory_mib} MiB = {units} units" if card.memory_mib else UNKNOWN_MEMORY
    detail = (
        f"{card.model}, {memory}, {card.leased_mib} MiB leased, "
        f"context {context} a process, {card.uuid}"
    )
    if not card.healthy:
        return Check(subject, "wrong", f"{detail}; {card.problem or 'it takes no new programs'}")
    unleased = [_describe(process) for process in snapshot.unleased if process.card == card.index]
    if unleased:
        why = (
            f"programs without a lease use it: {', '.join(unleased)}: start them with `fenka run`, "
            "or leave part of the card unleased for them"
        )
        return Check(subject, "note", f"{detail}; {why}")
    if card.unleased:
        return Check(subject, "note", f"{detail}; {card.unleased}: no lease can have that")
    return Check(subject, "ok", detail)


def _describe(process: protocol.ProcessView) -> str:
    used = "" if process.used_mib is None else f", {process.used_mib} MiB"
    return f"process {process.pid} of {process.user} ({process.program}{used})"


def _violations(snapshot: protocol.MachineSnapshot) -> list[Check]:
    checks = []
    for job in snapshot.jobs:
        for violation in job.violations:
            detail = f"{job.name} of {job.user} {violation}: end it with `fenka stop {job.name}`"
            checks.append(Check("limit", "wrong", detail))
    return checks


def _leases(snapshot: protocol.MachineSnapshot) -> Check:
    unenforced = [
        job.name
        for job in snapshot.jobs
        if job.slices
        and (
            job.isolation == "cooperative"
            or job.allow_user_namespaces
            or (job.allow_unlimited_drivers and not job.whole)
        )
    ]
    running = sum(1 for job in snapshot.jobs if job.slices)
    waiting = len(snapshot.jobs) - running
    text = f"{running} held, {waiting} waiting"
    if not unenforced:
        return Check("leases", "ok", text)
    undo = f"these programs could undo their limits: {', '.join(unenforced)}"
    return Check("leases", "note", f"{text}; {undo}")


def _unreadable(snapshot: protocol.MachineSnapshot) -> list[Check]:
    """Return jobs that keep their slice because of processes that cannot be read."""
    return [
        Check(
            f"job {job.name}",
            "note",
            f"processes {', '.join(map(str, job.unreadable_pids))} may be in its lease and cannot be read: "
            "it holds its slice until they end",
        )
        for job in snapshot.jobs
        if job.unreadable_pids
    ]


def _isolation() -> Check:
    obstacle = sandbox.probe()
    if obstacle:
        return Check("memory limit", "wrong", obstacle)
    return Check(
        "memory limit",
        "ok",
        "hard, per program and card, by the shim in a user and mount namespace of each lease, in which "
        "programs cannot create user namespaces",
    )


def _compute() -> Check:
    return Check(
        "compute limit",
        "ok",
        "by the shim, from measured kernel times; corrected with the driver's data on each process, "
        "where it has them (not on MIG instances)",
    )


def _containers() -> Check:
    """Say whether engines know fenka's devices, and whether Docker reads them."""
    problem, names = cdi_devices.problem(), ", ".join(cdi_devices.files())
    if problem:
        return Check("containers", "wrong", problem)
    if not cdi_devices.exist():
        return Check("containers", "note", "off: `sudo fenka containers on` gives them slices")
    return Check("containers", "ok", f"engines know {names}")


def _jupyter() -> Check:
    from fenka.jobs.notebook import NoJupyter, find

    try:
        return Check("jupyter", "ok", " ".join(find()))
    except NoJupyter as why:
        return Check("jupyter", "note", str(why))
