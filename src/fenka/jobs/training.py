"""TrainingSpec: a distributed training as users submit it, independent of where it runs.

The options of `fenka submit`, a file (`fenka submit -f`) and the annotation of a submitted job have the same
fields. A field's `Meta` is its option's metavar and help. `roles.py` has a training's processes.
"""

import math
import re
from pathlib import PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from fenka.core.request import InvalidRequest
from fenka.isolation.control import ComputeMode
from fenka.jobs.spec import GpuResources

TrainingKind = Literal["mpi", "tensorflow", "pytorch"]
SuccessPolicy = Literal["ChiefWorker", "AllWorkers"]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
CleanTaskPolicy = Literal["Running", "All"]

MAX_NAME_CHARACTERS = 43
"""A pod is called `NAME-evaluator-0-0-xxxxx`, which has at most 63 characters."""

NAME = re.compile(rf"[a-z](?:[a-z0-9-]{{0,{MAX_NAME_CHARACTERS - 2}}}[a-z0-9])?")

QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?([mkMGTPE]|[KMGTPE]i)?")
"""An amount in Kubernetes' notation."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,252}")
"""The name of an environment variable, as Kubernetes accepts it."""

MAX_MEMBERS = 4096
"""Of one role: more than any cluster's scheduler places at once, and few enough to be listed."""


class RoleSpec(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="kebab"
):
    """What each process of one role gets.

    Empty fields of a role of TensorFlow mean that the training's own value holds, except for cards:
    only the roles that request cards get some.
    """

    image: Annotated[str, Meta(title="IMAGE", description="container image")] = ""
    gpus: Annotated[int, Meta(title="N", description="whole cards of each process")] = 0
    gpu_mem: Annotated[
        str, Meta(title="SIZE", description="GPU memory per card: 4 (units), 4096MiB")
    ] = ""
    gpu_core: Annotated[int, Meta(title="PERCENT", description="share of each card's time")] = 0
    gpu_core_mode: Annotated[
        ComputeMode,
        Meta(description="hard: never more; soft: more if idle; weight: relative share"),
    ] = "hard"
    cards: Annotated[int, Meta(title="N", description="slices on this many different cards")] = 1
    cpu: Annotated[str, Meta(title="N", description="processors, for example 2 or 500m")] = ""
    memory: Annotated[str, Meta(title="SIZE", description="memory, for example 4Gi")] = ""
    selector: Annotated[dict[str, str], Meta(title="K=V", description="label of the nodes")] = {}

    @property
    def gpu(self) -> GpuResources | None:
        """What each process gets of the cards; None without any."""
        if self.gpus:
            return GpuResources(cards=self.gpus, whole=True)
        if self.gpu_mem:
            return GpuResources(self.gpu_mem, self.gpu_core, self.gpu_core_mode, self.cards)
        return None

    def validate_cards(self, prefix: str = "") -> None:
        """Check the request for cards; `prefix` is that of the role's options. Raises InvalidRequest."""
        if self.gpus and self.gpu_mem:
            raise InvalidRequest(
                f"--{prefix}gpus takes whole cards: leave out --{prefix}gpu-mem, or leave out --{prefix}gpus"
            )
        for option, value in (("gpus", self.gpus), ("gpu-core", self.gpu_core)):
            if value < 0:
                raise InvalidRequest(f"--{prefix}{option} must not be negative, got {value}")
        if self.gpu_core and not self.gpu_mem:
            raise InvalidRequest(f"--{prefix}gpu-core requires --{prefix}gpu-mem")
        if self.gpu_core_mode != "hard" and not self.gpu_core:
            raise InvalidRequest(f"--{prefix}gpu-core-mode requires --{prefix}gpu-core")
        for option, amount, example in (("cpu", self.cpu, "500m"), ("memory", self.memory, "4Gi")):
            if amount and not QUANTITY.fullmatch(amount):
                raise InvalidRequest(
                    f"invalid --{prefix}{option} {amount[:40]!r}: expected an amount such as 2 or {example}"
                )
        if self.cards < 1:
            raise InvalidRequest(f"--{prefix}cards must be at least 1, got {self.cards}")
        if self.gpu:
            self.gpu.validate()


class TensorFlowRole(RoleSpec, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A role of TensorFlow beside the workers. port: the processes listen on it."""

    replicas: Annotated[int, Meta(title="N", description="number of processes")] = 0
    port: Annotated[int, Meta(title="PORT", description="port of their servers")] = 2222


class TrainingSpec(RoleSpec, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A training.

    The fields of RoleSpec are those of each worker. TensorFlow's other roles have their own.
    """

    kind: TrainingKind = "mpi"
    name: Annotated[str, Meta(title="NAME", description="the job's name")] = ""
    command: list[str] = []
    shell: Annotated[str, Meta(title="SHELL", description="runs a command given as one word")] = (
        "sh"
    )
    workers: Annotated[int, Meta(title="N", description="number of workers")] = 1
    env: Annotated[dict[str, str], Meta(title="K=V", description="environment variable")] = {}
    data: Annotated[
        list[str], Meta(title="CLAIM:PATH", description="mount a PersistentVolumeClaim")
    ] = []
    data_dir: Annotated[
        list[str], Meta(title="HOST[:PATH]", description="mount a directory of the node")
    ] = []
    config_file: Annotated[
        list[str], Meta(title="FILE:PATH", description="copy a file of this machine to PATH")
    ] = []
    working_dir: Annotated[str, Meta(title="PATH", description="working directory")] = "/root"
    share_memory: Annotated[str, Meta(title="SIZE", description="size of /dev/shm")] = "2Gi"

    sync_mode: Annotated[str, Meta(title="git", description="where the code comes from")] = ""
    sync_source: Annotated[str, Meta(title="URL", description="the repository")] = ""
    sync_image: Annotated[str, Meta(title="IMAGE", description="image with git")] = ""
    code: Annotated[str, Meta(title="DIR", description="send this directory's files along")] = ""

    tensorboard: Annotated[bool, Meta(description="show the job's logs in TensorBoard")] = False
    tensorboard_image: Annotated[str, Meta(title="IMAGE", description="image of TensorBoard")] = ""
    logdir: Annotated[str, Meta(title="PATH", description="directory of TensorBoard's logs")] = (
        "/training_logs"
    )

    priority: Annotated[
        str, Meta(title="CLASS", description="PriorityClass; on a workstation a number")
    ] = ""
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
    grace_s: Annotated[
        float, Meta(title="TIME", description="between SIGTERM and SIGKILL, for a checkpoint")
    ] = msgspec.field(default=30, name="grace")
    retry: Annotated[int, Meta(title="N", description="restarts after failures")] = 0
    checkpoint: Annotated[
        str, Meta(title="CLAIM", description="claim for checkpoints, mounted at /checkpoints")
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

    toleration: Annotated[
        list[str], Meta(title="all|KEY|K=V:EFFECT", description="tolerate a taint")
    ] = []
    annotation: Annotated[dict[str, str], Meta(title="K=V", description="annotation of pods")] = {}
    label: Annotated[dict[str, str], Meta(title="K=V", description="label of pods")] = {}
    device: Annotated[dict[str, str], Meta(title="NAME=N", description="other resource")] = {}
    scheduler: Annotated[str, Meta(title="NAME", description="scheduler of the pods")] = ""
    image_pull_secret: Annotated[list[str], Meta(title="NAME", description="of the registry")] = []
    image_pull_policy: Annotated[PullPolicy, Meta(description="when to pull the images")] = (
        "IfNotPresent"
    )

    worker: RoleSpec = RoleSpec()
    worker_port: Annotated[int, Meta(title="PORT", description="port of workers' servers")] = 2222
    ps: TensorFlowRole = TensorFlowRole()
    chief: TensorFlowRole = TensorFlowRole()
    evaluator: TensorFlowRole = TensorFlowRole()

    @property
    def argv(self) -> list[str]:
        """The program and its arguments. One word is a shell's script, as arena has it."""
        return [self.shell, "-c", *self.command] if len(self.command) == 1 else self.command

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Claims and their paths, that of `--checkpoint` included. Raises InvalidRequest."""
        mounts = [parse_mount(text) for text in self.data]
        return [*mounts, (self.checkpoint, CHECKPOINTS)] if self.checkpoint else mounts

    @property
    def host_mounts(self) -> list[tuple[str, str]]:
        """Directories of the machine that runs a process, and their paths in it. Raises InvalidRequest."""
        return [_host_mount(text) for text in self.data_dir]

    @property
    def config_files(self) -> list[tuple[str, str]]:
        """Files of the machine that submits, and their paths in the processes. Raises InvalidRequest."""
        return [_config_file(text) for text in self.config_file]

    @property
    def project(self) -> str:
        """The directory of the code below `code/`: the repository's name."""
        return PurePosixPath(urlsplit(self.sync_source).path or self.sync_source).name.removesuffix(
            ".git"
        )

    def validate(self) -> None:
        """Check what can be checked without a cluster or a daemon. Raises InvalidRequest."""
        validate_name(self.name)
        if not self.command:
            raise InvalidRequest("no command given: write it after --")
        self.validate_cards()
        self._validate_roles()
        self._validate_code()
        self._validate_numbers()
        self._validate_texts()
        _ = self.mounts, self.host_mounts, self.config_files

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
        for name in self.env:
            if not VARIABLE.fullmatch(name) or name.startswith("FENKA_"):
                raise InvalidRequest(
                    f"invalid --env {name[:80]!r}: a variable's name has letters, digits and '_', and "
                    "those that begin with FENKA_ are fenka's own"
                )
        processes = self.nproc_per_node
        if processes not in ("", "auto", "cpu", "gpu") and not (
            processes.isdecimal() and 0 < int(processes[:9]) <= MAX_MEMBERS
        ):
            raise InvalidRequest(
                f"invalid --nproc-per-node {processes[:40]!r}: expected auto, cpu, gpu or a number"
            )
        if self.share_memory and not QUANTITY.fullmatch(self.share_memory):
            raise InvalidRequest(
                f"invalid --share-memory {self.share_memory[:40]!r}: expected an amount such as 2Gi"
            )
        if not self.working_dir.startswith("/"):
            raise InvalidRequest(
                f"--working-dir must be an absolute path, got {self.working_dir!r}"
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
            ("grace", self.grace_s),
            ("ttl-after-finished", self.ttl_after_finished_s or 0),
        ):
            if not 0 <= number < math.inf:
                raise InvalidRequest(f"--{option} must not be negative, got {number:g}")


CHECKPOINTS = "/checkpoints"
"""Where `--checkpoint` mounts its claim."""


def _host_mount(text: str) -> tuple[str, str]:
    host, _, path = text.partition(":")
    path = path or host
    if not (host.startswith("/") and path.startswith("/")):
        raise InvalidRequest(
            f"invalid --data-dir {text!r}: expected HOST[:PATH], for example /mnt/data:/data"
        )
    return host, path


def _config_file(text: str) -> tuple[str, str]:
    file, _, path = text.rpartition(":")
    if not file or not path.startswith("/"):
        raise InvalidRequest(
            f"invalid --config-file {text!r}: expected FILE:PATH, for example train.ini:/etc/train.ini"
        )
    return file, path


def validate_name(name: str) -> None:
    """Check the name of a job that a cluster may run. Raises InvalidRequest."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"invalid job name {name[:80]!r}: use lowercase letters, digits and '-', starting with "
            f"a letter, at most {MAX_NAME_CHARACTERS} characters"
        )


def parse_mount(text: str) -> tuple[str, str]:
    """Return the claim and the path of `CLAIM:PATH`. Raises InvalidRequest."""
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise InvalidRequest(
            f"invalid --data {text!r}: expected CLAIM:PATH, for example training-data:/data"
        )
    return claim, path
