"""NotebookSpec: a notebook on a cluster, as users ask for it.

The options of `fenka notebook --cluster` make it, and the annotation of its root object keeps it.
"""

import math
import re
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from fenka.core.request import InvalidRequest
from fenka.jobs.workload import DEFAULT_SERVICE, PodOptions, ServiceType, validate_name

SERVICE_TYPES: tuple[ServiceType, ...] = get_args(ServiceType)


_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


MIN_IDLE_S = 60
"""A notebook that ends sooner would end while its user reads."""


MAX_PASSWORD_BYTES = 1024


class NotebookSpec(PodOptions, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A notebook. The first path of its claims is its root directory."""

    service: Annotated[
        ServiceType,
        Meta(description="how it is reached: ClusterIP within the cluster alone"),
    ] = DEFAULT_SERVICE
    ingress: Annotated[
        str, Meta(title="HOST", description="make an Ingress for this host name")
    ] = ""
    tls_secret: Annotated[
        str, Meta(title="NAME", description="Secret with the certificate of --ingress")
    ] = ""
    idle_s: float | None = msgspec.field(default=None, name="idle")
    kind: Literal["notebook"] = "notebook"

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
        self.validate_pods()
        if self.gpu is None:
            raise InvalidRequest(
                "a notebook needs cards: use --gpu-mem 4 for a slice, --gpus 1 for a card, or --mig 1g.5gb"
            )
        if self.ingress and not _HOST.fullmatch(self.ingress):
            raise InvalidRequest(
                f"invalid --ingress {self.ingress[:80]!r}: expected a host name, for example "
                "lab.example.com"
            )
        if self.tls_secret and not self.ingress:
            raise InvalidRequest("--tls-secret requires --ingress HOST")
        paths = [path for _, path in self.mounts]
        if len(set(paths)) < len(paths):
            raise InvalidRequest("two --data have the same path: use different paths")
        if self.idle_s is not None:
            validate_idle(self.idle_s)


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
