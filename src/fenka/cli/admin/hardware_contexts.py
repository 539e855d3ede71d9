"""The row of `fenka doctor --hardware` that says when a context of the CUDA runtime is charged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fenka import hardware
from fenka.cli.admin.hardware_report import Row
from fenka.cli.admin.hardware_station import NotPossible, Station
from fenka.core.units import MIB
from fenka.workstation.screens.snapshot import read_account

NAME = "context of the CUDA runtime"
_JOB = "fenka-check-context"


def runtime_context(station: Station, python: str) -> Row:
    """Compare what a program's lease is charged before and after its first byte.

    python: a Python that has the CUDA runtime; empty for this one. Raises NotPossible.
    """
    context = station.card.context_mib
    if not context:
        why = "nobody knows what a context costs" if context is None else "a context costs nothing"
        raise NotPossible(f"{why} on this card")
    program = [
        python or sys.executable,
        str(Path(hardware.__file__).with_name("runtime_program.py")),
        station.cuda,
    ]
    process = station.start("", lease=["--name", _JOB], program=program)
    try:
        made = _answer(station, process)
        if made.get("missing"):
            raise NotPossible(
                f"{program[0]} finds no libcudart: name one that does with --torch PYTHON"
            )
        _refuse(made["code"], f"{made.get('way', 'cuInit')} returned")
        before = _charged_mib(station)
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
        _refuse(_answer(station, process)["code"], "the first byte was refused with")
        after = _charged_mib(station)
    finally:
        process.kill()
        process.communicate()
    return judge(made["way"], before, after, context)


def judge(way: str, before: int, after: int, context: int) -> Row:
    """Return the row. before, after: MiB that the lease is charged, around the first allocation."""
    if before >= context:
        when = "charged when it is made"
    else:
        when = "charged by the first allocation" if after >= context else "charged to nobody"
    return Row(
        NAME,
        "ok" if after >= context else "differs",
        f"by {way}: {before} MiB before the first byte, {after} MiB after it: {when}",
        f"{context} MiB after the first byte",
        "" if after >= context else "programs on the CUDA runtime exceed their slices by a context",
    )


def _answer(station: Station, process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        station.finish(process)
        raise NotPossible("the program ended at once")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _refuse(code: int, what: str) -> None:
    if code:
        raise NotPossible(f"{what} {code}")


def _charged_mib(station: Station) -> int:
    """Return what the program's account says. Raises NotPossible."""
    jobs = [job for job in station.snapshot().jobs if job.name == _JOB and job.slices]
    account = read_account(station.runtime, jobs[-1].id) if jobs else None
    if account is None:
        raise NotPossible("the account of the program's lease cannot be read")
    return account.memory_bytes[0] // MIB
