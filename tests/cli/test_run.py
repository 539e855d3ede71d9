"""What `fenka run` refuses before it asks for a slice, and `fenka why` for jobs of this machine."""

from pathlib import Path

import msgspec
import pytest

from fenka.cli.run import JobOptions
from fenka.jobs.service import PortName, ServiceSpec
from fenka.local.records import ServiceRecord
from fenka.local.service_commands import _ignored_ports
from fenka.workstation import client
from fenka.workstation.protocol import MachineSnapshot
from tests.cli.command import Completed, fenka
from tests.cli.test_queue import job, snapshot_of


def refusal(code: int, sentence: str) -> Completed:
    """Return a command's result that has only this sentence."""
    return Completed(code, "", f"fenka: {sentence}\n")


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let no daemon be found or started."""
    monkeypatch.setenv("FENKA_RUNTIME", str(tmp_path))
    monkeypatch.setenv("FENKA_START_DAEMON", "never")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpu-mem", "4", "--gpu-memm", "3"), "--gpu-memm: did you mean --gpu-mem"),
        (("--gpu-mem", "4", "--zzz=1"), "--zzz: a program follows the options after --"),
    ],
)
def test_misspelt_option_is_refused_instead_of_run(words: tuple[str, ...], sentence: str) -> None:
    """It would be taken for the program."""
    result = fenka("run", *words, "--", "python", "x.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("fenka: there is no option ")
    assert sentence in result.stderr


def test_program_may_begin_with_a_dash_after_two_dashes() -> None:
    """Then it is meant."""
    result = fenka("run", "--gpu-mem", "4", "--", "--gpucore")
    assert result == refusal(127, "there is no program called --gpucore")


def test_reason_is_named_when_a_file_is_not_executable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there; what is missing is its mode, its directory, or a program that runs it."""
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text("echo\n")
    Path("code").mkdir()
    run = ("run", "--gpu-mem", "1", "--")
    assert fenka(*run, "./job.sh") == refusal(
        126,
        "./job.sh is not executable: make it so (chmod +x ./job.sh), or name the program that runs it, such "
        "as sh ./job.sh",
    )
    assert fenka(*run, "./code") == refusal(126, "./code is a directory: name the program in it")
    assert fenka(*run, "job.sh") == refusal(
        127, "there is no program called job.sh: for the file here, write ./job.sh"
    )
    assert fenka(*run, "./ghost") == refusal(127, "there is no program called ./ghost")


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h", 3600), ("90", 90), ("0.5", 0.5), ("1h30m", 5400)]
)
def test_time_limit_is_a_duration_or_seconds(text: str, seconds: float) -> None:
    """As for `fenka submit`; seconds are still understood."""
    spec = JobOptions(gpu_mem="1", time_limit=text).spec("run", ["true"])
    assert spec.time_limit_s == seconds


def test_timeout_of_zero_means_now() -> None:
    """No answer could come in no time."""
    options = JobOptions(gpu_mem="1", timeout=0)
    launcher = options.launcher(options.spec("run", ["true"]))
    assert (launcher.wait, launcher.timeout_s) == (False, None)


def test_ignored_port_of_a_further_version_is_named() -> None:
    """All versions are reached at the service's port."""
    spec = ServiceSpec(name="m", command=["x"], restful_port=9000)
    ports: dict[PortName, int] = {"http-serving": 8000}
    record = ServiceRecord("uid", "127.0.0.1", ports, [], {})
    assert _ignored_ports(record, spec) == (
        "port 9000 is ignored: all versions of service m are reached at port 8000"
    )
    same = msgspec.structs.replace(spec, restful_port=8000)
    assert _ignored_ports(record, same) == ""


def test_pending_job_of_this_machine_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place, its reason, its reserved cards and what helps; an unknown one is refused."""
    snapshot: MachineSnapshot = snapshot_of([job("night", 1, reserved=[0], reason="no GPU fits")])
    monkeypatch.setattr(client, "get_snapshot", lambda _: snapshot)
    monkeypatch.setattr(client, "get_helps", lambda _, __: ["the end of day"])
    shown = fenka("why", "--local", "night")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("night waits at position 1 of 1 for ")
    assert shown.stdout.endswith(
        ": no GPU fits; card 0 is reserved for it\n\nWhat helps:\n  - the end of day\n"
    )
    assert fenka("why", "--local", "ghost") == refusal(
        1, "no job is called ghost: `fenka ps -a` lists jobs"
    )
