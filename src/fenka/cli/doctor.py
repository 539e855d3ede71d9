"""`fenka doctor`: what is found, what is enforced, what is wrong."""

import sys
from typing import Literal

import msgspec

from fenka import native
from fenka.cli import tables
from fenka.cli.options import OutputOption
from fenka.core.units import card_units
from fenka.dialects.sizes import UNITS_MIB
from fenka.hardware.nvml import Driver, NoDriver
from fenka.isolation import sandbox
from fenka.workstation import paths, protocol
from fenka.workstation.client import DaemonUnavailable, get_snapshot
from fenka.workstation.paths import UnsafeDirectory


class Check(msgspec.Struct, frozen=True):
    """One thing looked at. `note` is neither good nor bad."""

    what: str
    status: Literal["ok", "note", "wrong"]
    detail: str


def doctor(output: OutputOption = "table") -> None:
    """Print the checks; exit code 1 if anything is wrong."""
    checks = [_libraries(), *_daemon(), _isolation(), _compute(), _jupyter()]
    if not tables.show(checks, output):
        print(
            "\n".join(
                tables.columns([(check.status, check.what, check.detail) for check in checks])
            )
        )
    if any(check.status == "wrong" for check in checks):
        sys.exit(1)


def _libraries() -> Check:
    shim = native.DIRECTORY / "libfenka.so"
    if shim.exists():
        return Check("shim", "ok", str(shim))
    return Check("shim", "wrong", f"{shim} is missing: run `make build`")


def _daemon() -> list[Check]:
    runtime = paths.current()
    try:
        world = get_snapshot(runtime)
    except DaemonUnavailable as why:
        by_itself = f"none runs at {runtime.socket}; commands start it by themselves"
        return [
            Check("daemon", "wrong", str(why))
            if runtime.foreign
            else Check("daemon", "note", by_itself),
            *_cards_without_daemon(),
        ]
    except (protocol.ProtocolMismatch, UnsafeDirectory) as why:
        return [Check("daemon", "wrong", str(why))]
    unit = "GiB" if world.unit_mib == UNITS_MIB["GiB"] else f"{world.unit_mib} MiB"
    return [
        Check(
            "daemon",
            "ok",
            f"fenka {world.version}, process {world.pid}, {runtime.socket}, "
            f"policy {world.policy}, unit {unit}",
        ),
        _driver(world.driver, world.cuda, simulated=world.simulated, library_dir=world.library_dir),
        *(_card(card, world) for card in world.cards),
        _leases(world),
        *_offences(world),
        *_unreadable(world),
    ]


def _cards_without_daemon() -> list[Check]:
    try:
        with Driver.open() as driver:
            found = [_driver(driver.version, driver.cuda_version, simulated=driver.simulated)]
            found += [
                Check(
                    f"card {card.index}", "ok", f"{card.model}, {card.memory_mib} MiB, {card.uuid}"
                )
                for card in driver.cards()
            ]
            return found
    except NoDriver as why:
        return [Check("driver", "wrong", str(why))]


def _driver(version: str, cuda: str, *, simulated: bool, library_dir: str = "") -> Check:
    if not simulated:
        return Check("driver", "ok", f"NVIDIA {version}, CUDA {cuda}")
    hint = f"; see its cards from outside a lease with LD_LIBRARY_PATH={library_dir}"
    return Check("driver", "note", f"simulated {version}, CUDA {cuda}{hint if library_dir else ''}")


def _card(card: protocol.CardView, world: protocol.Snapshot) -> Check:
    units = card_units(card.memory_mib, world.unit_mib)
    context = "unknown" if card.context_mib is None else f"{card.context_mib} MiB"
    detail = (
        f"{card.model}, {card.memory_mib} MiB = {units} units, {card.leased_mib} MiB leased, "
        f"context {context} a process, {card.uuid}"
    )
    if not card.healthy:
        return Check(f"card {card.index}", "wrong", f"{detail}; the driver has lost it")
    outside = [_outside(it) for it in world.unleased if it.card == card.index]
    if outside:
        why = (
            f"outside of any lease it is used by {', '.join(outside)}: start such programs with `fenka run`, "
            "or leave a part of the card unleased for them"
        )
        return Check(f"card {card.index}", "note", f"{detail}; {why}")
    if card.used_mib is not None and card.used_mib > card.leased_mib:
        over = card.used_mib - card.leased_mib
        why = f"{over} MiB or more are in use outside of any lease, by no process that the driver names"
        return Check(f"card {card.index}", "note", f"{detail}; {why}")
    return Check(f"card {card.index}", "ok", detail)


def _outside(process: protocol.ProcessView) -> str:
    used = "" if process.used_mib is None else f", {process.used_mib} MiB"
    return f"process {process.pid} of {process.user} ({process.program}{used})"


def _offences(world: protocol.Snapshot) -> list[Check]:
    return [
        Check(
            "limit",
            "wrong",
            f"{job.name} of {job.user} {offence}: end it with `fenka stop {job.name}`",
        )
        for job in world.jobs
        for offence in job.violations
    ] + [
        Check("slice", "note", f"{job.name} of {job.user} has ended, but {job.reason}")
        for job in world.jobs
        if job.state == "completing"
    ]


def _leases(world: protocol.Snapshot) -> Check:
    loose = [
        job.name
        for job in world.jobs
        if job.slices and (job.isolation == "cooperative" or job.allow_user_namespaces)
    ]
    held = sum(1 for job in world.jobs if job.slices)
    waiting = len(world.jobs) - held
    text = f"{held} held, {waiting} waiting"
    if loose:
        return Check(
            "leases", "note", f"{text}; a program could undo its limit: {', '.join(loose)}"
        )
    return Check("leases", "ok", text)


def _unreadable(world: protocol.Snapshot) -> list[Check]:
    """Jobs whose slice is held on suspicion."""
    return [
        Check(
            f"job {job.name}",
            "note",
            f"processes {', '.join(map(str, job.unreadable_pids))} may be in its lease and cannot be read: "
            "it holds its slice until they end",
        )
        for job in world.jobs
        if job.unreadable_pids
    ]


def _isolation() -> Check:
    why_not = sandbox.probe()
    if why_not:
        return Check("memory limit", "wrong", why_not)
    return Check(
        "memory limit",
        "ok",
        "hard, per program and card, by the shim in user and mount namespaces of the lease's own, in which "
        "programs can make no further user namespace",
    )


def _compute() -> Check:
    return Check(
        "compute limit",
        "ok",
        "by the shim, of measured kernel time; corrected by what the driver says of each process, "
        "where it does (not on MIG slices)",
    )


def _jupyter() -> Check:
    from fenka.jobs.notebook import NoJupyter, find

    try:
        return Check("jupyter", "ok", " ".join(find()))
    except NoJupyter as why:
        return Check("jupyter", "note", str(why))
