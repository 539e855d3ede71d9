"""JobSpec: what is checked and recorded of a job, wherever it runs."""

import msgspec
import pytest

from fenka.core.request import InvalidRequest
from fenka.jobs.job_spec import NAME, GpuResources, JobSpec, generate_name, summarise

SPEC = JobSpec(["/usr/bin/python3", "x.py"], GpuResources("4"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gang": 0}, "a gang has 1 to 256 members, not 0"),
        ({"gang": 257}, "a gang has 1 to 256 members, not 257"),
        ({"time_limit_s": -1.0}, "--time-limit must be a positive number of seconds, got -1"),
        ({"time_limit_s": float("inf")}, "--time-limit must be a positive number"),
        ({"priority": -2_000_000}, "--priority must be from -1000000 to 1000000, not -2000000"),
        ({"gpu": GpuResources("4", cards=17)}, "one lease has at most 16 cards, not 17"),
        ({"gpu": GpuResources("4", models=["x"] * 65)}, "at most 64 models"),
        ({"gpu": GpuResources("4", models=["x" * 129])}, "at most 128 characters"),
        ({"gpu": GpuResources("0" * 129)}, "at most 128 characters"),
    ],
)
def test_spec_is_rejected_when_a_value_is_out_of_range(
    fields: dict[str, object], message: str
) -> None:
    """Pending jobs are kept in memory and on the disk, so nothing in them is unbounded."""
    with pytest.raises(InvalidRequest, match=message):
        msgspec.structs.replace(SPEC, **fields).validate()


@pytest.mark.parametrize("name", ["\x1b]0;x\x07", "../x", "-x", "x" * 64, "a b", "a/0", "é", "x\n"])
def test_spec_is_rejected_when_its_name_is_unsafe(name: str) -> None:
    """Names are parts of paths, and terminals of other users print them."""
    with pytest.raises(InvalidRequest, match="invalid job name"):
        msgspec.structs.replace(SPEC, name=name).validate()


@pytest.mark.parametrize(
    "command", [["/x/my prog\x1b[2J"], ["../.."], ["é"], ["-"], ["x" * 300], ["run"]]
)
def test_generated_name_is_valid_whatever_the_program(command: list[str]) -> None:
    """The program's name is shortened to the characters of job names."""
    assert NAME.fullmatch(generate_name(command))


def test_spec_is_truncated_when_its_command_is_long() -> None:
    """A command is recorded for people to recognise it; what is no text is replaced."""
    command = ["python", "-c", "x" * 9000, "y"]
    short = msgspec.structs.replace(SPEC, command=command).truncate()
    assert short.command[:2] == ["python", "-c"]
    assert len(short.command) == 3
    assert len("".join(short.command)) < 2100
    assert SPEC.truncate() == SPEC
    odd = msgspec.structs.replace(SPEC, command=["caf\udce9"], directory="/\udce9").truncate()
    assert (odd.command, odd.directory) == (["caf?"], "/?")


@pytest.mark.parametrize(
    ("gpu", "gang", "summary"),
    [
        (GpuResources("4"), None, "4"),
        (GpuResources("4096MiB", core=30, core_mode="soft"), None, "4096MiB, 30% soft"),
        (GpuResources(cards=2, whole=True), None, "2 x whole"),
        (GpuResources("4", cards=2), 3, "gang of 3: 2 x 4"),
    ],
)
def test_summary_names_what_is_requested(gpu: GpuResources, gang: int | None, summary: str) -> None:
    """As `fenka ps` shows a job that waits."""
    assert summarise(JobSpec(["x"], gpu, gang=gang).requests, gang) == summary


def test_summary_counts_members_when_they_differ() -> None:
    """Each amount is named once, in the order of ranks."""
    members = [GpuResources("4"), GpuResources("2", core=30), GpuResources("4")]
    assert summarise(members, 3) == "gang of 3: 2 of 4; 1 of 2, 30% hard"


def test_spec_survives_json() -> None:
    """The workstation's protocol carries it; unknown fields are refused."""
    spec = JobSpec(["x"], GpuResources("4", 30, "soft", models=["T4"]), "a", gang=2, time_limit_s=5)
    text = msgspec.json.encode(spec)
    assert msgspec.json.decode(text, type=JobSpec) == spec
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode(b'{"gpu": {"colour": 1}}', type=JobSpec)
