"""`fenka doctor --hardware`, on simulated cards: so that it works when there is a real one."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fenka.cli.admin.hardware_check import _guarded
from fenka.cli.admin.hardware_contexts import judge
from fenka.cli.admin.hardware_station import NotPossible, Partial
from fenka.core.errors import TEMPORARY_FAILURE
from fenka.hardware.assumptions import ASSUMPTIONS, Asked, _answer, _asked
from fenka.hardware.cuda_calls import PTX
from tests.workstation.conftest import HOLD, Workstation, refused

QUICK = ("doctor", "--hardware", "--quick", "-o", "json")
CERTAIN = (
    "driver",
    "memory limit, driver API",
    "context of the CUDA runtime",
    "memory of a program in NVML",
    "memory after SIGKILL",
)
"""Checks whose verdict does not depend on how busy the machine is."""


def by_name(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the rows of a report by check."""
    return {row["check"]: row for row in report["rows"]}


def test_check_with_a_daemon_of_its_own(station: Workstation) -> None:
    """It compares everything, keeps to the options' file, and leaves neither daemon nor files."""
    options = station.root / "config" / "fenka"
    options.mkdir(parents=True)
    spec = station.root / "spec.toml"
    spec.write_text('version = 1\n[[card]]\nmodel = "T4"\ncontext_mib = 300\n')
    (options / "daemon.toml").write_text(f'simulate = "{spec}"\n')
    place = station.root / "t"
    place.mkdir()
    station.environment["TMPDIR"] = str(place)
    file = station.root / "report.json"
    done = station.fenka(*QUICK, "--report", str(file))
    report = json.loads(done.stdout)
    assert json.loads(file.read_text()) == report
    rows = by_name(report)
    assert {name: rows[name]["verdict"] for name in CERTAIN} == dict.fromkeys(CERTAIN, "ok"), rows
    assert rows["context of the CUDA runtime"]["measured"] == (
        "by the simulated driver's table: 0 MiB before the first byte, 300 MiB after it: "
        "charged by the first allocation"
    )
    assert rows["memory limit, PyTorch"]["reason"] == "PyTorch needs a real card"
    assert rows["shares 30 and 70"]["measured"], rows["shares 30 and 70"]
    assert rows["time of a launch"]["measured"]
    differs = any(row["verdict"] == "differs" for row in report["rows"])
    assert done.returncode == int(differs), done.stderr
    assert "takes two slices of 2048 MiB" in done.stderr
    assert {one["verdict"] for one in report["assumptions"]} == {"ok"}, report["assumptions"]
    assert len(report["assumptions"]) > len(ASSUMPTIONS)
    assert len(report["places"]) > 10
    assert report["simulated"]
    assert not list(place.iterdir())


def test_check_takes_only_what_is_free(t4: Workstation) -> None:
    """A running program keeps its slice. Its compute is not free, so shares cannot be measured."""
    holder = t4.run("--gpu-mem", "1", "--name", "holder", "--gpu-core", "50", "--", *HOLD, "9")
    holder.report()
    rows = by_name(json.loads(t4.fenka(*QUICK).stdout))
    assert rows["shares 30 and 70"] == {
        **rows["shares 30 and 70"],
        "verdict": "not possible",
        "reason": "other programs hold 50 % of the card's compute",
    }
    assert rows["memory limit, driver API"]["verdict"] == "ok"
    assert list(t4.jobs()) == ["holder"]
    assert holder.process.poll() is None


def test_check_does_not_begin_while_others_need_the_card(t4: Workstation) -> None:
    """Too little is free; and then somebody waits for it."""
    t4.run("--gpu-mem", "13", "--name", "holder", "--", *HOLD, "9").report()
    refused(
        t4.fenka(*QUICK),
        TEMPORARY_FAILURE,
        r"card 0 has only \d+ MiB that nobody holds, and the check needs two slices .*",
    )
    t4.ok("run", "--detach", "--gpu-mem", "9", "--name", "next", "--", "true")
    refused(
        t4.fenka(*QUICK), TEMPORARY_FAILURE, r"next waits for a card, .*: run it when nobody waits"
    )


def test_doctor_says_where_it_looked_for_the_driver(t4: Workstation) -> None:
    """The table in a line; JSON with each place."""
    assert re.search(r"^\w+ +driver files +.*/\d*", t4.fenka("doctor").stdout, re.M)
    (check,) = (
        check
        for check in json.loads(t4.fenka("doctor", "-o", "json").stdout)
        if check["subject"] == "driver files"
    )
    looked = {place["directory"]: place["who"] for place in check["looked"]}
    assert looked["/usr/lib64"] == "Red Hat, SUSE, Amazon Linux"
    assert looked["/run/nvidia/driver/usr/lib64"].startswith("GPU Operator")
    assert looked["/run/opengl-driver/lib"] == "NixOS"


def test_report_that_cannot_be_written_is_refused_first(t4: Workstation) -> None:
    """Not after minutes."""
    sentence = "the report cannot be written to /proc/none: No such file or directory"
    refused(t4.fenka(*QUICK, "--report", "/proc/none"), 1, sentence)


def test_options_of_the_check_need_it(t4: Workstation) -> None:
    """Alone they would have no effect."""
    refused(t4.fenka("doctor", "--quick"), 2, "--quick, --torch and --report require --hardware")


def test_without_a_card_there_is_one_sentence(station: Workstation) -> None:
    """It says what to install, or how to try simulated cards."""
    done = station.fenka(*QUICK)
    if done.returncode == 0:
        pytest.skip("this machine has a card")
    refused(done, 1, "(this machine has no NVIDIA driver|the NVIDIA driver does not answer).*")


@pytest.mark.parametrize("card", ["sm_60", "sm_75", "sm_90", "sm_100"])
def test_kernels_are_valid_for_real_cards(card: str, tmp_path: Path) -> None:
    """NVIDIA's assembler accepts the text, which simulated cards only read."""
    wheel = importlib.util.find_spec("nvidia.cuda_nvcc")
    if wheel is None or not wheel.submodule_search_locations:
        pytest.skip("the wheel with ptxas is not installed")
    assembler = Path(wheel.submodule_search_locations[0]) / "bin" / "ptxas"
    (tmp_path / "kernels.ptx").write_text(PTX)
    done = subprocess.run(
        [assembler, "-arch", card, "-o", tmp_path / "kernels.cubin", tmp_path / "kernels.ptx"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("before", "after", "verdict", "words"),
    [
        (300, 300, "ok", "charged when it is made"),
        (0, 300, "ok", "charged by the first allocation"),
        (0, 0, "differs", "charged to nobody"),
    ],
)
def test_contexts_of_the_runtime_are_judged_by_their_charge(
    before: int, after: int, verdict: str, words: str
) -> None:
    """A program that holds a context without a charge exceeds its slice."""
    row = judge("libcudart.so.12", before, after, 300)
    assert row.verdict == verdict
    assert row.measured.endswith(words)
    assert bool(row.reason) == (verdict == "differs")


def test_verdicts() -> None:
    """Of an answer that is not the assumed one, a function that is missing, and programs that fail."""
    by_assumption = {one.name: one for one in ASSUMPTIONS}
    nothing = by_assumption["an allocation of 0 bytes"]
    kind = SimpleNamespace(allocate=lambda _: (0, None))
    answer = _asked(nothing.ask, cast("Asked", SimpleNamespace(cuda=kind)))
    assert _answer(nothing.name, nothing.assumed, answer)["verdict"] == "differs"

    def missing(_: object) -> str:
        raise AttributeError("/usr/lib/libcuda.so.1: undefined symbol: cuNew")

    assert _answer("new", "yes", _asked(missing, None)) == {
        "name": "new",
        "assumed": "yes",
        "answer": "the driver lacks cuNew",
        "verdict": "not possible",
    }

    def fails() -> Any:
        raise NotPossible("it is busy")

    def dies() -> Any:
        raise Partial("it ended with -11", [])

    assert [(row.verdict, row.reason) for step in (fails, dies) for row in _guarded("c", step)] == [
        ("not possible", "it is busy"),
        ("differs", "the program died: it ended with -11"),
    ]
