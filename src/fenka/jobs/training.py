"""TrainingSpec: a distributed training as users submit it, independent of where it runs.

The options of `fenka submit`, a file (`fenka submit -f`) and the annotation of a submitted job have the same
fields. A field's `Meta` is its option's metavar and help. `roles.py` has a training's processes.
"""

import math
from pathlib import PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from fenka.core.request import InvalidRequest
from fenka.jobs.workload import RoleSpec, WorkloadSpec, validate_claim, validate_name

TrainingKind = Literal["mpi", "tensorflow", "pytorch"]
SuccessPolicy = Literal["ChiefWorker", "AllWorkers"]
CleanTaskPolicy = Literal["Running", "All"]

MAX_MEMBERS = 4096
"""Of one role: more than any cluster's scheduler places at once, and few enough to be listed."""


class TensorFlowRole(RoleSpec, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A role of TensorFlow beside the workers. port: the processes listen on it."""

    replicas: Annotated[int, Meta(title="N", description="number of processes")] = 0
    port: Annotated[int, Meta(title="PORT", description="port of their servers")] = 2222


class TrainingSpec(WorkloadSpec, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A training.

    The fields of RoleSpec are those of each worker. TensorFlow's other roles have their own.
    """

    kind: TrainingKind = "mpi"
    workers: Annotated[int, Meta(title="N", description="number of workers")] = 1

    sync_mode: Annotated[str, Meta(title="git", description="where the code comes from")] = ""
    sync_source: Annotated[str, Meta(title="URL", description="the repository")] = ""
    sync_image: Annotated[str, Meta(title="IMAGE", description="image with git")] = ""
    code: Annotated[str, Meta(title="DIR", description="send this directory's files along")] = ""

    tensorboard: Annotated[
        bool, Meta(description="show the job's logs in TensorBoard, which needs no login")
    ] = False
    tensorboard_image: Annotated[str, Meta(title="IMAGE", description="image of TensorBoard")] = ""
    logdir: Annotated[str, Meta(title="PATH", description="directory of TensorBoard's logs")] = (
        "/training_logs"
    )

    backfill: Annotated[
        bool, Meta(description="use what others leave idle; restarted after each eviction")
    ] = False
    queue: Annotated[str, Meta(title="NAME", description="Kueue's local queue")] = ""
    gang: Annotated[bool, Meta(description="start all processes together or none")] = True
    time_limit_s: Annotated[
        float | None, Meta(title="TIME", description="end each process after 10m, 2h, 90s")
    ] = msgspec.field(default=None, name="time-limit")
    running_timeout_s: Annotated[
        float | None, Meta(title="TIME", description="end the job this long after its start")
    ] = msgspec.field(default=None, name="running-timeout")
    ttl_after_finished_s: Annotated[
        float | None, Meta(title="TIME", description="delete the job this long after its end")
    ] = msgspec.field(default=None, name="ttl-after-finished")
    retry: Annotated[int, Meta(title="N", description="restarts after failures")] = 0
    checkpoint: Annotated[
        str, Meta(title="CLAIM", description="claim for checkpoints, mounted at /checkpoint")
    ] = ""
    clean_task_policy: Annotated[
        CleanTaskPolicy, Meta(description="which processes end with the job: those that run")
    ] = "Running"
    success_policy: Annotated[
        SuccessPolicy, Meta(description="TensorFlow: whose success is that of the job")
    ] = "ChiefWorker"
    nproc_per_node: Annotated[
        str, Meta(title="auto|cpu|gpu|N", description="torchrun's processes on each worker")
    ] = ""
    mounts_on_launcher: Annotated[bool, Meta(description="mount --data on the launcher too")] = (
        False
    )

    worker: RoleSpec = RoleSpec()
    worker_port: Annotated[int, Meta(title="PORT", description="port of workers' servers")] = 2222
    ps: TensorFlowRole = TensorFlowRole()
    chief: TensorFlowRole = TensorFlowRole()
    evaluator: TensorFlowRole = TensorFlowRole()

    @property
    def project(self) -> str:
        """The directory of the code below `code/`: the repository's name."""
        return PurePosixPath(urlsplit(self.sync_source).path or self.sync_source).name.removesuffix(
            ".git"
        )

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Claims and their paths, that of `--checkpoint` included. Raises InvalidRequest."""
        mounts = super().mounts
        if not self.checkpoint:
            return mounts
        validate_claim(self.checkpoint, "--checkpoint")
        return [*mounts, (self.checkpoint, CHECKPOINT)]

    def validate(self) -> None:
        """Check what can be checked without a cluster or a daemon. Raises InvalidRequest."""
        validate_name(self.name)
        if not self.command:
            raise InvalidRequest("no command given: write it after --")
        self.validate_workload()
        self._validate_roles()
        self._validate_code()
        self._validate_numbers()
        self._validate_texts()

    def validate_tensorboard(self) -> None:
        """Check that pods see each other's logs. Raises InvalidRequest."""
        if self.tensorboard and not any(
            PurePosixPath(self.logdir).is_relative_to(path) for _, path in self.mounts
        ):
            raise InvalidRequest(
                f"--tensorboard requires --logdir inside a --data mount: {self.logdir} is local to each pod"
            )

    def _validate_roles(self) -> None:
        numbers = {
            "workers": self.workers,
            "ps": self.ps.replicas,
            "chief": self.chief.replicas,
            "evaluator": self.evaluator.replicas,
        }
        for option, number in numbers.items():
            least = 1 if option == "workers" else 0
            if not least <= number <= MAX_MEMBERS:
                raise InvalidRequest(
                    f"--{option} must be from {least} to {MAX_MEMBERS}, got {number}"
                )
        for prefix, role in (
            ("worker-", self.worker),
            ("ps-", self.ps),
            ("chief-", self.chief),
            ("evaluator-", self.evaluator),
        ):
            role.validate_cards(prefix)
            if self.kind != "tensorflow" and role not in (RoleSpec(), TensorFlowRole()):
                raise InvalidRequest(
                    f"--{prefix.removesuffix('-')} and its options are TensorFlow's: use fenka "
                    "submit tensorflow"
                )
        for option, number in (
            ("chief", self.chief.replicas),
            ("evaluator", self.evaluator.replicas),
        ):
            if number > 1:
                raise InvalidRequest(f"a training has at most one {option}, got {number}")

    def _validate_code(self) -> None:
        if self.sync_mode not in ("", "git"):
            raise InvalidRequest(
                f"sync mode {self.sync_mode!r} is not supported: use --sync-mode git, --code DIR or "
                "--data CLAIM:PATH"
            )
        if self.sync_mode and not self.sync_source:
            raise InvalidRequest("--sync-mode git requires --sync-source URL")
        if self.sync_source and not self.sync_mode:
            raise InvalidRequest("--sync-source requires --sync-mode git")
        if self.sync_source and self.code:
            raise InvalidRequest("--code and --sync-source both bring the code: use one of them")
        if self.sync_source and (
            self.project in ("", ".", "..") or self.sync_source.startswith("-")
        ):
            raise InvalidRequest(
                f"invalid --sync-source {self.sync_source!r}: expected the URL of a repository"
            )
        for variable in ("GIT_SYNC_BRANCH", "GIT_SYNC_REV"):
            revision = self.env.get(variable, "")
            # git would read it as an option.
            if revision.startswith("-"):
                raise InvalidRequest(
                    f"invalid {variable} {revision[:80]!r}: expected a branch, a tag or a commit"
                )

    def _validate_texts(self) -> None:
        if not self.working_dir:
            raise InvalidRequest("--working-dir must be an absolute path, got ''")
        processes = self.nproc_per_node
        if processes not in ("", "auto", "cpu", "gpu") and not (
            processes.isdecimal() and 0 < int(processes[:9]) <= MAX_MEMBERS
        ):
            raise InvalidRequest(
                f"invalid --nproc-per-node {processes[:40]!r}: expected auto, cpu, gpu or a number"
            )
        if self.backfill and self.priority:
            raise InvalidRequest("--backfill sets the priority: leave out --priority")

    def _validate_numbers(self) -> None:
        for option, seconds in (
            ("time-limit", self.time_limit_s),
            ("running-timeout", self.running_timeout_s),
        ):
            if seconds is not None and not 0 < seconds < math.inf:
                raise InvalidRequest(f"--{option} must be a positive time, got {seconds:g}s")
        for option, number in (
            ("retry", self.retry),
            ("ttl-after-finished", self.ttl_after_finished_s or 0),
        ):
            if not 0 <= number < math.inf:
                raise InvalidRequest(f"--{option} must not be negative, got {number:g}")


CHECKPOINT = "/checkpoint"
"""Where `--checkpoint` mounts its claim."""
