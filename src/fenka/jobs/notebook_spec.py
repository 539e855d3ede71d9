"""NotebookSpec: a notebook on a cluster, as users ask for it.

The options of `fenka notebook --cluster` make it, and the annotation of its root object keeps it.
"""

import math
from typing import Literal, get_args

import msgspec

from fenka.core.request import InvalidRequest
from fenka.jobs.spec import GpuResources
from fenka.jobs.workload import ServiceType, parse_mount, validate_amounts, validate_name

SERVICE_TYPES: tuple[ServiceType, ...] = get_args(ServiceType)

MIN_IDLE_S = 60
"""A notebook that ends sooner would end while its user reads."""

MAX_PASSWORD_BYTES = 1024


class NotebookSpec(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="kebab"
):
    """A notebook.

    Attributes:
        name: The name of all its objects.
        image: An image with Jupyter.
        gpu: What it gets of the cards.
        cpu: Processors in Kubernetes' notation; empty for no limit.
        memory: Memory in Kubernetes' notation; empty for no limit.
        service: How it is reached.
        data: Claims and their paths, `CLAIM:PATH`. The first path is the notebook's root directory.
        interruptible: It may run on spot instances, which the cloud takes back.
        idle_s: It ends after so many seconds without use of its cards; None to run indefinitely.
    """

    name: str
    image: str
    gpu: GpuResources = GpuResources()
    cpu: str = ""
    memory: str = ""
    service: ServiceType = "LoadBalancer"
    data: list[str] = []
    interruptible: bool = False
    idle_s: float | None = msgspec.field(default=None, name="idle")
    kind: Literal["notebook"] = "notebook"

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Claims and their paths. Raises InvalidRequest."""
        return [parse_mount(text) for text in self.data]

    def validate(self) -> None:
        """Check what can be checked without a cluster. Raises InvalidRequest."""
        validate_name(self.name)
        if not self.image:
            raise InvalidRequest(
                "--image is required on Kubernetes; for a notebook on this machine use --local"
            )
        if self.service not in SERVICE_TYPES:
            raise InvalidRequest(
                f"invalid --service {self.service[:40]!r}: expected {', '.join(SERVICE_TYPES)}"
            )
        validate_amounts(self.cpu, self.memory)
        paths = [path for _, path in self.mounts]
        if len(set(paths)) < len(paths):
            raise InvalidRequest("two --data have the same path: use different paths")
        if self.idle_s is not None:
            validate_idle(self.idle_s)
        self.gpu.validate()


def validate_idle(seconds: float) -> None:
    """Check the time after which an idle notebook ends. Raises InvalidRequest."""
    if not MIN_IDLE_S <= seconds < math.inf:
        raise InvalidRequest(f"--idle must be at least {MIN_IDLE_S}s, got {seconds:g}s")


def validate_password(password: str) -> None:
    """Check the password of a notebook that others can reach. Raises InvalidRequest."""
    if not password:
        raise InvalidRequest(
            "a notebook on a cluster requires a password: set PASSWORD in the environment, or use "
            "--password-file FILE"
        )
    if len(password.encode(errors="replace")) > MAX_PASSWORD_BYTES or not password.isprintable():
        raise InvalidRequest(
            f"the password is not usable: use printable characters, at most {MAX_PASSWORD_BYTES} bytes"
        )
