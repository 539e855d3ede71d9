"""Screens of training jobs in both layouts, drawn from values, and the data behind them."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fenka.cli import tables
from fenka.cli.compat import arena
from fenka.cli.workloads import screens
from fenka.cli.workloads import show as show_command
from fenka.cli.workloads.arguments import LogRequest
from fenka.views.workloads import (
    CardUse,
    JobEvent,
    JobProcess,
    JobStatus,
    Phase,
    ServiceVersion,
    Trainer,
    TrainingJob,
)
from tests.cli.command import Completed, fenka

GOLDEN = Path(__file__).parents[1] / "golden" / "jobs"
CREATED = datetime(2021, 1, 16, 21, 19, tzinfo=UTC).timestamp()
MINUTE = 60.0


class FakeBackend:
    """Jobs that are values."""

    def not_found(self, kind: str, name: str) -> str:
        """Return a sentence about what does not exist."""
        return f"{kind} {name} not found in namespace default"

    def __init__(self, jobs: Sequence[TrainingJob], events: Sequence[JobEvent] = ()) -> None:
        self._jobs, self._events = jobs, events

    def jobs(self, name: str | None = None, *, positions: bool = False) -> list[TrainingJob]:
        """Return those with this name."""
        del positions
        return [job for job in self._jobs if name in (None, job.name)]

    def workloads(
        self, name: str | None = None, *, positions: bool = False
    ) -> tuple[list[TrainingJob], list[ServiceVersion]]:
        """Return the jobs with this name."""
        return self.jobs(name, positions=positions), []

    def events(self, _: TrainingJob) -> list[JobEvent]:
        """Return all events."""
        return [*self._events]

    def logs(self, name: str, request: LogRequest) -> TrainingJob:
        """Print nothing."""
        raise NotImplementedError

    def attach(self, job: TrainingJob, request: LogRequest, command: Sequence[str]) -> int:
        """Run nothing."""
        raise NotImplementedError

    def delete(self, jobs: Sequence[TrainingJob]) -> None:
        """Delete nothing."""
        raise NotImplementedError


@pytest.fixture(autouse=True)
def a_user(tmp_path: Path) -> Iterator[None]:
    """A user in UTC who has chosen no layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        patch.delenv("FENKA_LAYOUT", raising=False)
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> "Show":
    """Return what runs a command about these jobs, some minutes after CREATED."""
    return Show(monkeypatch)


class Show:
    """Runs commands about jobs that are values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(
        self,
        words: str,
        *jobs: TrainingJob,
        minutes: float = 18.5,
        events: Sequence[JobEvent] = (),
    ) -> Completed:
        """Run a command and return what it left."""
        backend = FakeBackend(jobs, events)
        with self._monkeypatch.context() as patch:
            patch.setattr(show_command, "open_backend", lambda *_, **__: backend)
            patch.setattr("time.time", lambda: CREATED + minutes * MINUTE)
            return fenka(*words.split())


def instance(
    role: str,
    *,
    job: str = "mpi-dist",
    index: int = 0,
    requested: float | None = 0,
    phase: Phase = "Running",
    address: str = "192.168.1.137",
    cards: tuple[CardUse, ...] = (),
) -> JobProcess:
    """Return an instance of a job; a launcher or a chief is the job's chief."""
    return JobProcess(
        f"{job}-{role}-{index}",
        f"{job}-{role}-0-{index}-x",
        role,
        index,
        role in ("launcher", "chief"),
        phase,
        phase,
        CREATED,
        node=f"cn-beijing.{address}",
        node_address=address,
        requested=requested,
        allocated=(requested or 0) if phase == "Running" else 0,
        cards=cards,
    )


def job(
    *instances: JobProcess,
    name: str = "mpi-dist",
    status: JobStatus = "RUNNING",
    trainer: Trainer = "mpijob",
    created: float = CREATED,
    ended: float | None = None,
    tensorboard: str = "",
    note: str = "",
) -> TrainingJob:
    """Return a job."""
    return TrainingJob(
        name,
        "default",
        f"uid-{name}",
        status,
        trainer,
        created,
        ended,
        instances,
        tensorboard=tensorboard,
        note=note,
    )


CARD = CardUse(0, duty_percent=35.0, used_mib=4019.0, total_mib=15079)
MPI = job(instance("launcher"), instance("worker", requested=1, cards=(CARD,)))
WITH_BOARD = job(
    instance("launcher"),
    instance("worker", requested=1, cards=(CARD,)),
    tensorboard="http://192.168.1.137:31234",
)
PULLED = JobEvent(
    "pod/mpi-dist-worker-0-0-x", "Normal", CREATED + MINUTE, "Pulled", "image is present"
)
TWO_CARDS = job(instance("launcher"), instance("worker", requested=2))
FINISHED = job(
    instance("chief", job="tf-git", requested=1, phase="Succeeded", address="192.168.1.112"),
    name="tf-git",
    status="SUCCEEDED",
    trainer="tfjob",
    created=CREATED - 5 * MINUTE,
    ended=CREATED + 9.5 * MINUTE,
)


@pytest.mark.parametrize(
    ("words", "jobs", "minutes", "golden"),
    [
        ("list", (TWO_CARDS, FINISHED), 15.5, "list.txt"),
        ("ls --layout old", (TWO_CARDS, FINISHED), 15.5, "list.txt"),
        ("list --layout arena", (TWO_CARDS, FINISHED), 15.5, "arena-list.txt"),
        ("get mpi-dist --layout arena", (MPI,), 18.5, "arena-get.txt"),
        ("get mpi-dist --layout arena -g -e", (WITH_BOARD,), 18.5, "arena-get-g-e.txt"),
        ("get mpi-dist", (WITH_BOARD,), 18.5, "get-tensorboard.txt"),
        ("top job", (TWO_CARDS,), 18.5, "top-job.txt"),
        ("top job --layout arena", (TWO_CARDS,), 18.5, "arena-top-job.txt"),
        ("top job mpi-dist", (MPI,), 18.5, "arena-top-job-name.txt"),
    ],
)
def test_screen_is_arenas(
    show: Show, words: str, jobs: tuple[TrainingJob, ...], minutes: float, golden: str
) -> None:
    """Byte for byte, in the layout of before 0.2 or of today."""
    shown = show(words, *jobs, minutes=minutes, events=[PULLED])
    assert shown == Completed(0, (GOLDEN / golden).read_text(), "")


def test_slices_are_fractions_of_cards_on_every_screen(show: Show) -> None:
    """Three times 0.3 is 0.9; arena counts none of them."""
    sliced = job(*(instance("worker", index=index, requested=0.3) for index in range(3)))
    assert show("list --layout arena", sliced).stdout.split()[-3:] == ["0.9", "0.9", "N/A"]
    assert show("top job", sliced).stdout.splitlines()[-1] == "0.9   "
    (data,) = json.loads(show("list -o json", sliced).stdout)
    assert (data["requestGPUs"], data["instances"][0]["requestGPUs"]) == (0.9, 0.3)


def test_unknown_numbers_of_cards_are_shown_as_such(show: Show) -> None:
    """No node tells the size of a card."""
    unknown = job(instance("worker", requested=None, phase="Pending"))
    assert "N/A" in show("top job", unknown).stdout.splitlines()[1]
    assert json.loads(show("get mpi-dist -o json", unknown).stdout)["requestGPUs"] is None


def test_namespace_comes_first_when_all_are_shown(show: Show) -> None:
    """`-A`, in every table of jobs."""
    for words in ("list -A", "list -A --layout arena", "top job -A", "top job -A --layout arena"):
        header, row, *_ = show(words, MPI).stdout.splitlines()
        assert (header.split()[:2], row.split()[0]) == (["NAMESPACE", "NAME"], "default")


def test_top_job_begins_with_the_most_cards(show: Show) -> None:
    """Then by name."""
    jobs = [
        job(instance("worker", requested=count), name=name)
        for name, count in (("b", 1), ("c", 4), ("a", 1))
    ]
    lines = show("top job", *jobs).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["c", "a", "b"]


def test_top_job_counts_only_those_that_run_in_todays_layout(show: Show) -> None:
    """A finished or a pending job's cards are not in the total."""
    pending = job(instance("worker", requested=3, phase="Pending"), name="p", status="PENDING")
    last = show("top job --layout arena", MPI, pending, FINISHED).stdout.splitlines()[-1]
    assert last == "Total Allocated/Requested GPUs of Training Jobs: 1/1"


def test_type_selects_a_framework(show: Show) -> None:
    """By any of arena's words for it."""
    for word in ("tf", "tfjob", "tensorflow"):
        assert show(f"list -T {word}", MPI, FINISHED).stdout.splitlines()[1].startswith("tf-git")
    refused = show("list -T spark", MPI)
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_several_cards_of_an_instance_have_a_row_each(show: Show) -> None:
    """What is the same in all rows stands in the first one."""
    cards = (CardUse(1, total_mib=4308), CardUse(3, duty_percent=5, total_mib=4308))
    shown = show("get mpi-dist -g", job(instance("worker", requested=0.6, cards=cards))).stdout
    rows = shown.split("GPUs:\n")[1].splitlines()[2:4]
    assert [row.split() for row in rows] == [
        ["mpi-dist-worker-0", "192.168.1.137", "0.6", "1", "N/A", "N/A"],
        ["3", "5.0%", "N/A"],
    ]


def test_cards_of_a_job_that_succeeded_are_not_shown(show: Show) -> None:
    """It has none any more."""
    assert "GPUs:" not in show("get tf-git -g --layout arena", FINISHED).stdout


def test_note_is_shown_below_the_job(show: Show) -> None:
    """In both layouts, and in the data."""
    noted = job(status="QUEUING", note="delete it")
    for words in ("get mpi-dist", "get mpi-dist --layout arena"):
        assert show(words, noted).stdout.endswith("\n\nNote: delete it\n")
    assert yaml.safe_load(show("get mpi-dist -o yaml", noted).stdout)["note"] == "delete it"


def test_instance_selects_a_row(show: Show) -> None:
    """By its name or its pod's; what does not exist is an error."""
    for name in ("mpi-dist-worker-0", "mpi-dist-worker-0-0-x"):
        shown = show(f"top job mpi-dist -i {name}", MPI).stdout
        assert "launcher" not in shown
        assert "mpi-dist-worker-0 " in shown
    assert show("top job mpi-dist -i nobody", MPI).stderr == (
        "fenka: job mpi-dist has no instance nobody: fenka get mpi-dist lists them\n"
    )
    assert show("top job -i nobody", MPI).exit_code == 1


def test_refresh_prints_again_below_a_line_with_the_time(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every two seconds, until Ctrl-C."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)
    shown = show("top job mpi-dist -r", MPI)
    assert shown.exit_code == 130
    assert pauses == [2.0, 2.0]
    assert shown.stdout.count("Allocated/Requested GPUs of Job: 1/1") == 2
    assert f"{'-' * 43} 2021-01-16 21:37:30 {'-' * 52}" in shown.stdout.splitlines()


def test_data_has_arenas_keys_and_indentation(show: Show) -> None:
    """Four blanks, no newline at the end; keys of fenka come after arena's."""
    text = show("get mpi-dist -o json", MPI).stdout
    assert text.startswith('{\n    "uuid": "uid-mpi-dist",\n')
    assert not text.endswith("\n")
    data = json.loads(text)
    assert list(data)[:16] == [
        *("uuid", "name", "namespace", "duration", "status", "trainer", "tensorboard"),
        *("chiefName", "instances", "priority", "requestGPUs", "allocatedGPUs"),
        *("creationTimestamp", "modelName", "modelVersion", "modelSource"),
    ]
    assert (data["duration"], data["trainer"], data["requestGPUs"]) == ("1110s", "mpijob", 1)
    worker = data["instances"][1]
    assert list(worker)[:10] == [
        *("ip", "status", "name", "age", "node", "nodeIP", "chief"),
        *("requestGPUs", "gpuMetrics", "creationTimestamp"),
    ]
    assert worker["gpuMetrics"]["0"]["gpuDutyCycle"] == 35.0
    assert worker["pod"] == "mpi-dist-worker-0-0-x"
    for words in ("list -o json", "top job -o json", "top job mpi-dist -o json"):
        assert json.loads(show(words, MPI).stdout) == [data]
    for words in ("list -o yaml", "top job -o yaml"):
        assert yaml.safe_load(show(words, MPI).stdout) == [data]


def test_wide_is_the_table(show: Show) -> None:
    """As in arena, whose default it is."""
    assert show("list -o wide", MPI) == show("list", MPI)


def test_job_that_does_not_exist_is_one_sentence(show: Show) -> None:
    """Exit code 1, and nothing on stdout."""
    expected = Completed(1, "", "fenka: job nothing not found in namespace default\n")
    assert show("get nothing -T mpi", MPI) == expected
    assert show("top job nothing", MPI) == expected
    assert show("get mpi-dist -T tf", MPI).exit_code == 1


# ---- whatever tenants write ----

TEXT = st.text(max_size=12)
PHASES: list[Phase] = ["Pending", "Running", "Succeeded", "Failed", "Unknown"]


@st.composite
def any_job(draw: st.DrawFn) -> TrainingJob:
    """Return a job whose texts come from a tenant."""
    shown = JobProcess(
        draw(TEXT),
        draw(TEXT),
        draw(TEXT),
        0,
        draw(st.booleans()),
        draw(TEXT),
        draw(st.sampled_from(PHASES)),
        CREATED,
        node=draw(TEXT),
        node_address=draw(TEXT),
    )
    return TrainingJob(
        draw(TEXT), draw(TEXT), "u", "RUNNING", "mpijob", CREATED, None, (shown,), draw(TEXT)
    )


@pytest.mark.parametrize(
    ("status", "position", "why", "note"),
    [
        (
            "PENDING",
            2,
            "too little memory",
            "it waits at position 2 of the queue: too little memory",
        ),
        ("PENDING", 1, "", "it waits at position 1 of the queue"),
        ("PENDING", None, "gang g is incomplete", ""),
        ("PENDING", None, "", ""),
        ("RUNNING", None, "old", ""),
    ],
)
def test_reason_and_position_are_noted_when_a_job_waits(
    status: JobStatus, position: int | None, why: str, note: str
) -> None:
    """Of the queue alone: what else a job waits for is told by its instances and events."""
    waiting = replace(job(status=status), position=position, why=why)
    assert screens.notes(waiting) == (["", f"Note: {note}"] if note else [])


@given(st.lists(any_job(), max_size=4))
def test_no_text_of_a_tenant_reaches_the_terminal_unescaped(jobs: list[TrainingJob]) -> None:
    """Each job and each instance is one line, and every character is printable."""
    for layout in (screens, arena):
        lines = layout.list_screen(jobs, CREATED, all_namespaces=True)
        assert len(lines) == len(jobs) + 1
        for each in jobs:
            lines += layout.get_screen(each, CREATED)
        assert all(tables.escape(line).isprintable() for line in lines)


def test_escape_sequences_of_tenants_are_shown_as_text(show: Show) -> None:
    """A pod's status, a label or an event cannot move the cursor."""
    evil = job(instance("worker", address="\x1b[2J\n"), name="mpi-dist", note="\x1b]0;x\x07")
    event = JobEvent("pod/x", "Normal", CREATED, "R", "a\nb\x1b[1A")
    for words in (
        "list",
        "get mpi-dist -g -e",
        "get mpi-dist -g -e --layout arena",
        "top job mpi-dist",
    ):
        text = show(words, evil, events=[event]).stdout
        assert all(line.isprintable() for line in text.splitlines())
    assert "\x1b" not in show("get mpi-dist -o json", evil).stdout
