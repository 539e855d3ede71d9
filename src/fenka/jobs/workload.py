"""PodOptions and WorkloadSpec: what trainings, services and notebooks have in common.

The options of commands, files and annotations have the same fields. A field's `Meta` is its option's metavar
and help.
"""

import math
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fenka.core.request import ComputeMode, InvalidRequest
from fenka.jobs.job_spec import GpuResources, Topology

PullPolicy = Literal["Always", "IfNotPresent", "Never"]
SecurityLevel = Literal["auto", "restricted", "baseline", "none"]
ServiceType = Literal["LoadBalancer", "NodePort", "ClusterIP"]
"""How an object of Kubernetes that is called Service is reached."""
DEFAULT_SERVICE: ServiceType = "ClusterIP"

MAX_NAME_CHARACTERS = 43
"""A pod is called `NAME-evaluator-0-0-xxxxx`, which has at most 63 characters."""

NAME = re.compile(rf"[a-z](?:[a-z0-9-]{{0,{MAX_NAME_CHARACTERS - 2}}}[a-z0-9])?")

_CLAIM = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")

_USER = re.compile(r"[0-9]{1,9}(:[0-9]{1,9})?")

DEFAULT_WORKING_DIR = "/root"

QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?([mkMGTPE]|[KMGTPE]i)?")
"""An amount in Kubernetes' notation."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,252}")
"""The name of an environment variable, as Kubernetes accepts it."""


class RoleSpec(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="kebab"
):
    """The amounts of each process of one role.

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
    mig: Annotated[
        str,
        Meta(title="PROFILE", description="MIG instances of its own, as many as --cards: 1g.5gb"),
    ] = ""
    inside: Annotated[
        str,
        Meta(title="PROFILE", description="slices within a MIG instance: mig for any, 3g.20gb"),
    ] = ""
    topology: Annotated[
        Topology,
        Meta(
            description="required: only cards that NVLink connects; preferred: the best connected"
        ),
    ] = "any"
    selector: Annotated[dict[str, str], Meta(title="K=V", description="label of the nodes")] = {}

    @property
    def gpu(self) -> GpuResources | None:
        """Each process's request for cards; None without any."""
        if self.gpus:
            gpu = GpuResources(cards=self.gpus, whole=True)
        elif self.mig:
            gpu = GpuResources(self.gpu_mem, self.gpu_core, cards=self.cards)
        elif self.gpu_mem:
            gpu = GpuResources(self.gpu_mem, self.gpu_core, self.gpu_core_mode, self.cards)
        else:
            return None
        return msgspec.structs.replace(
            gpu, mig=self.mig, inside=self.inside, topology=self.topology
        )

    def validate_cards(self, prefix: str = "") -> None:
        """Check the request for cards; `prefix` is that of the role's options. Raises InvalidRequest."""
        if self.gpus and self.gpu_mem:
            raise InvalidRequest(
                f"--{prefix}gpus takes whole cards: leave out --{prefix}gpu-mem, or leave out --{prefix}gpus"
            )
        for option, value in (("gpus", self.gpus), ("gpu-core", self.gpu_core)):
            if value < 0:
                raise InvalidRequest(f"--{prefix}{option} must not be negative, got {value}")
        if self.inside and not (self.gpu_mem or self.gpus or self.mig):
            raise InvalidRequest(f"--{prefix}inside requires --{prefix}gpu-mem")
        if self.gpu_core and not (self.gpu_mem or self.mig):
            raise InvalidRequest(f"--{prefix}gpu-core requires --{prefix}gpu-mem")
        if self.topology != "any" and not self.gpu:
            raise InvalidRequest(f"--{prefix}topology is about several cards: use --{prefix}gpus")
        if self.gpu_core_mode != "hard" and not self.gpu_core:
            raise InvalidRequest(f"--{prefix}gpu-core-mode requires --{prefix}gpu-core")
        validate_amounts(self.cpu, self.memory, prefix)
        if self.cards < 1:
            raise InvalidRequest(f"--{prefix}cards must be at least 1, got {self.cards}")
        if self.gpu:
            self.gpu.validate()


class PodOptions(RoleSpec, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The pod options of trainings, services and notebooks.

    The fields of RoleSpec are those of each worker or replica.
    """

    name: Annotated[str, Meta(title="NAME", description="its name")] = ""
    env: Annotated[dict[str, str], Meta(title="K=V", description="environment variable")] = {}
    data: Annotated[
        list[str], Meta(title="CLAIM:PATH", description="mount a PersistentVolumeClaim")
    ] = []
    priority: Annotated[
        str, Meta(title="CLASS", description="PriorityClass; on a workstation a number")
    ] = ""
    interruptible: Annotated[
        bool, Meta(description="may run on spot instances, which the cloud takes back")
    ] = False
    toleration: Annotated[
        list[str], Meta(title="all|KEY|K=V:EFFECT", description="tolerate a taint")
    ] = []
    annotation: Annotated[dict[str, str], Meta(title="K=V", description="annotation of pods")] = {}
    label: Annotated[dict[str, str], Meta(title="K=V", description="label of pods")] = {}
    scheduler: Annotated[str, Meta(title="NAME", description="scheduler of the pods")] = ""
    image_pull_secret: Annotated[list[str], Meta(title="NAME", description="of the registry")] = []
    image_pull_policy: Annotated[PullPolicy, Meta(description="when to pull the images")] = (
        "IfNotPresent"
    )
    security: Annotated[
        SecurityLevel,
        Meta(
            description="what pods may do: as restricted or baseline; none: what the image and the cluster "
            "allow; auto: restricted where the namespace enforces it, else baseline"
        ),
    ] = "auto"
    run_as: Annotated[
        str, Meta(title="UID[:GID]", description="user of the processes; default: the image's")
    ] = ""

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Claims and their paths. Raises InvalidRequest."""
        return [parse_mount(text) for text in self.data]

    @property
    def user(self) -> tuple[int, int] | None:
        """The user and the group of the processes; None for the image's."""
        user, _, group = self.run_as.partition(":")
        return (int(user), int(group or user)) if user else None

    def validate_pods(self) -> None:
        """Check these fields, except for the name. Raises InvalidRequest."""
        self.validate_cards()
        for name in self.env:
            if not VARIABLE.fullmatch(name) or name.startswith("FENKA_"):
                raise InvalidRequest(
                    f"invalid --env {name[:80]!r}: a variable's name has letters, digits and '_', and "
                    "those that begin with FENKA_ are fenka's own"
                )
        if self.run_as and not _USER.fullmatch(self.run_as):
            raise InvalidRequest(
                f"invalid --run-as {self.run_as[:40]!r}: expected UID or UID:GID, for example 1000:100"
            )
        if self.security == "restricted" and self.user is not None and not self.user[0]:
            raise InvalidRequest(
                "--security restricted does not allow root: choose another --run-as"
            )
        _ = self.mounts


class WorkloadSpec(PodOptions, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A training, or a version of a service."""

    command: list[str] = []
    shell: Annotated[str, Meta(title="SHELL", description="runs a command given as one word")] = (
        "sh"
    )
    data_dir: Annotated[
        list[str], Meta(title="HOST[:PATH]", description="mount a directory of the node")
    ] = []
    config_file: Annotated[
        list[str], Meta(title="FILE:PATH", description="copy a file of this machine to PATH")
    ] = []
    working_dir: Annotated[str, Meta(title="PATH", description="working directory")] = (
        DEFAULT_WORKING_DIR
    )
    share_memory: Annotated[str, Meta(title="SIZE", description="size of /dev/shm")] = "2Gi"
    grace_s: Annotated[float, Meta(title="TIME", description="between SIGTERM and SIGKILL")] = (
        msgspec.field(default=30, name="grace")
    )
    device: Annotated[dict[str, str], Meta(title="NAME=N", description="other resource")] = {}

    @property
    def argv(self) -> list[str]:
        """The program and its arguments. One word is a shell's script, as arena has it."""
        return [self.shell, "-c", *self.command] if len(self.command) == 1 else self.command

    @property
    def host_mounts(self) -> list[tuple[str, str]]:
        """Directories of the machine that runs a process, and their paths in it. Raises InvalidRequest."""
        return [_host_mount(text) for text in self.data_dir]

    @property
    def config_files(self) -> list[tuple[str, str]]:
        """Files of the machine that submits, and their paths in the processes. Raises InvalidRequest."""
        return [_config_file(text) for text in self.config_file]

    def validate_workload(self) -> None:
        """Check these fields, except for the name and the command. Raises InvalidRequest."""
        self.validate_pods()
        if self.share_memory and not QUANTITY.fullmatch(self.share_memory):
            raise InvalidRequest(
                f"invalid --share-memory {self.share_memory[:40]!r}: expected an amount such as 2Gi"
            )
        if self.working_dir and not self.working_dir.startswith("/"):
            raise InvalidRequest(
                f"--working-dir must be an absolute path, got {self.working_dir!r}"
            )
        if not 0 <= self.grace_s < math.inf:
            raise InvalidRequest(f"--grace must not be negative, got {self.grace_s:g}")
        _ = self.host_mounts, self.config_files


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


def validate_amounts(cpu: str, memory: str, prefix: str = "") -> None:
    """Check the values of `--cpu` and `--memory`; `prefix` is that of a role. Raises InvalidRequest."""
    for option, amount, example in (("cpu", cpu, "500m"), ("memory", memory, "4Gi")):
        if amount and not QUANTITY.fullmatch(amount):
            raise InvalidRequest(
                f"invalid --{prefix}{option} {amount[:40]!r}: expected an amount such as 2 or {example}"
            )


def validate_name(name: str, kind: str = "job") -> None:
    """Check the name of what a cluster may run. Raises InvalidRequest."""
    if not name:
        raise InvalidRequest(f"the {kind} has no name: add --name NAME")
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"invalid {kind} name {name[:80]!r}: use lowercase letters, digits and '-', starting with "
            f"a letter, at most {MAX_NAME_CHARACTERS} characters"
        )


def parse_mount(text: str) -> tuple[str, str]:
    """Return the claim and the path of `CLAIM:PATH`. Raises InvalidRequest."""
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise InvalidRequest(
            f"invalid --data {text!r}: expected CLAIM:PATH, for example training-data:/data"
        )
    validate_claim(claim, "--data")
    return claim, path


def validate_claim(name: str, option: str) -> None:
    """Check the name of a claim. Raises InvalidRequest."""
    if not _CLAIM.fullmatch(name):
        raise InvalidRequest(
            f"invalid {option} {name[:80]!r}: name a claim by lowercase letters, digits, '-' and '.'"
        )
