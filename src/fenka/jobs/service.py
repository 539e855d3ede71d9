"""ServiceSpec: a model that answers requests, as users submit it, independent of where it runs.

A service has a name and one or several versions. Each version is a spec of its own. The gateway divides
requests among versions by their weights (`fenka serve traffic-split`).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fenka.core.request import InvalidRequest
from fenka.core.scaling import shares
from fenka.jobs import workload

ServiceKind = Literal["custom", "tensorflow", "triton"]
PortName = Literal["http-serving", "grpc-serving", "http-metrics"]
ScalerChoice = Literal["", "keda", "fenka"]

MAX_VERSION_CHARACTERS = 63 - workload.MAX_NAME_CHARACTERS - 1
"""A Deployment and a Service are called `NAME-VERSION`, which has at most 63 characters."""
VERSION = re.compile(rf"[a-z0-9](?:[a-z0-9-]{{0,{MAX_VERSION_CHARACTERS - 2}}}[a-z0-9])?")

GATEWAY = "gateway"
"""The gateway's objects are called `NAME-gateway`, so no version can have this name."""

MAX_REPLICAS = 1000
MAX_TARGET = 1_000_000
MAX_PAUSE_S = 3600
"""Kubernetes' HorizontalPodAutoscaler, which KEDA uses, remembers no longer."""

_RANGE = re.compile(r"([0-9]{1,6})(?:\.\.([0-9]{1,6}))?")

CLIENT_PORTS: tuple[PortName, ...] = ("http-serving", "grpc-serving")
"""Ports that clients connect to. Metrics belong to a replica, so a service has no common port for them."""

PORT_VARIABLES: Mapping[PortName, str] = {
    "http-serving": "PORT",
    "grpc-serving": "GRPC_PORT",
    "http-metrics": "METRICS_PORT",
}
"""The variables by which programs learn their ports."""

SOCKET_VARIABLES: Mapping[PortName, str] = {
    "http-serving": "SOCKET",
    "grpc-serving": "GRPC_SOCKET",
}
"""The variables by which programs learn the paths of their Unix sockets, instead of ports."""

_TRITON_HEALTH = "/v2/health/ready"

_FIXED = ("name", "version", "kind", "restful_port", "port", "config_file", "service")
"""Fields that other things depend on: another version has others."""

_DEFAULT_PORTS: dict[ServiceKind, tuple[int, int, int]] = {
    "custom": (0, 0, 0),
    "tensorflow": (8501, 8500, 0),
    "triton": (8000, 8001, 8002),
}
"""The ports of HTTP, gRPC and metrics that each kind's server has by default; 0 for none."""


class ReplicaRange(msgspec.Struct, frozen=True):
    """How many replicas a version has: from `least` to `most`, by its load."""

    least: int
    most: int

    @property
    def scales(self) -> bool:
        """Whether the number follows the load."""
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.scales else str(self.least)


def parse_replicas(text: str) -> ReplicaRange:
    """Return the range of `2`, `1..4` or `0..4`. Raises InvalidRequest."""
    match = _RANGE.fullmatch(text)
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    if not match or least > most or most == 0:
        raise InvalidRequest(f"invalid --replicas {text[:40]!r}: expected N or MIN..MAX")
    if most > MAX_REPLICAS:
        raise InvalidRequest(f"a version has at most {MAX_REPLICAS} replicas, not {most}")
    return ReplicaRange(least, most)


class ServiceSpec(workload.WorkloadSpec, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A version of a service. The fields of RoleSpec are those of each replica."""

    kind: ServiceKind = "custom"
    version: Annotated[str, Meta(title="VERSION", description="this version's name")] = ""
    replicas: Annotated[
        str, Meta(title="N|MIN..MAX", description="number of replicas, or its range")
    ] = "1"
    target: Annotated[
        int, Meta(title="N", description="of a range: requests in flight of each replica")
    ] = 4
    up_after_s: Annotated[
        float, Meta(title="TIME", description="add replicas after this time of more load")
    ] = msgspec.field(default=0, name="up-after")
    down_after_s: Annotated[
        float, Meta(title="TIME", description="remove replicas after this time of less load")
    ] = msgspec.field(default=300, name="down-after")
    scaler: Annotated[
        ScalerChoice,
        Meta(
            title="keda|fenka",
            description="what follows the load of a range; default: KEDA where it is",
        ),
    ] = ""
    buffer_timeout_s: Annotated[
        float, Meta(title="TIME", description="how long requests wait for a replica")
    ] = msgspec.field(default=60, name="buffer-timeout")
    restful_port: Annotated[int, Meta(title="PORT", description="port of HTTP")] = 0
    port: Annotated[int, Meta(title="PORT", description="port of gRPC")] = 0
    metrics_port: Annotated[int, Meta(title="PORT", description="port of /metrics")] = 0
    unix_socket: Annotated[
        bool,
        Meta(description="replicas listen at Unix sockets ($SOCKET, $GRPC_SOCKET), not on ports"),
    ] = False
    health_path: Annotated[
        str, Meta(title="PATH", description="GET answers when ready; default: the port is open")
    ] = ""
    service: Annotated[workload.ServiceType, Meta(description="type of the Service")] = (
        workload.DEFAULT_SERVICE
    )
    model_name: Annotated[str, Meta(title="NAME", description="TensorFlow: the model")] = ""
    model_path: Annotated[
        str, Meta(title="PATH", description="TensorFlow: directory of the model's versions")
    ] = ""
    model_repository: Annotated[
        str, Meta(title="PATH", description="Triton: directory of models")
    ] = ""
    # That of the image.
    working_dir: Annotated[str, Meta(title="PATH", description="working directory")] = ""

    @property
    def range(self) -> ReplicaRange:
        """How many replicas the version has. Raises InvalidRequest."""
        return parse_replicas(self.replicas)

    @property
    def ports(self) -> dict[PortName, int]:
        """The ports that each replica listens on, by the names of its Services."""
        http, grpc, metrics = _DEFAULT_PORTS[self.kind]
        named: dict[PortName, int] = {
            "http-serving": self.restful_port or http,
            "grpc-serving": self.port or grpc,
            "http-metrics": self.metrics_port or metrics,
        }
        return {name: port for name, port in named.items() if port}

    @property
    def readiness(self) -> tuple[PortName, str]:
        """The port of a replica that is ready, and the path that answers there; empty if open is enough."""
        path = self.health_path or (_TRITON_HEALTH if self.kind == "triton" else "")
        return next(name for name in CLIENT_PORTS if name in self.ports), path

    @property
    def argv(self) -> list[str]:
        """The program of each replica and its arguments."""
        ports = self.ports
        if self.kind == "tensorflow":
            return [
                "tensorflow_model_server",
                f"--port={ports['grpc-serving']}",
                f"--rest_api_port={ports['http-serving']}",
                f"--model_name={self.model_name}",
                f"--model_base_path={self.model_path}",
                *self.command,
            ]
        if self.kind == "triton":
            return [
                "tritonserver",
                f"--http-port={ports['http-serving']}",
                f"--grpc-port={ports['grpc-serving']}",
                f"--metrics-port={ports['http-metrics']}",
                f"--model-repository={self.model_repository}",
                *self.command,
            ]
        return super().argv

    def validate(self) -> None:
        """Check what can be checked without a cluster or a daemon. Raises InvalidRequest."""
        workload.validate_name(self.name, "service")
        if not VERSION.fullmatch(self.version):
            raise InvalidRequest(
                f"invalid --version {self.version[:80]!r}: use lowercase letters, digits and '-', at most "
                f"{MAX_VERSION_CHARACTERS} characters"
            )
        if self.version == GATEWAY:
            raise InvalidRequest(
                f"invalid --version {GATEWAY!r}: {self.name}-{GATEWAY} is the service's gateway, use another"
            )
        self.validate_workload()
        self._validate_program()
        self._validate_ports()
        self._validate_scaling()

    def _validate_program(self) -> None:
        required = {
            "custom": {},
            "tensorflow": {"model-name": self.model_name, "model-path": self.model_path},
            "triton": {"model-repository": self.model_repository},
        }
        if self.kind == "custom" and not self.command:
            raise InvalidRequest("no command given: write it after --")
        for kind, options in required.items():
            for option, value in options.items():
                if kind == self.kind and not value:
                    raise InvalidRequest(f"fenka serve {kind} requires --{option}")
        others = {"model-name": self.model_name, "model-path": self.model_path}
        others["model-repository"] = self.model_repository
        for option, value in others.items():
            if value and option not in required[self.kind]:
                raise InvalidRequest(f"--{option} is not an option of fenka serve {self.kind}")

    def _validate_ports(self) -> None:
        ports = self.ports
        if self.unix_socket and self.kind != "custom":
            raise InvalidRequest(
                f"--unix-socket is not an option of fenka serve {self.kind}: its server listens on ports only"
            )
        for option, port in (
            ("restful-port", self.restful_port),
            ("port", self.port),
            ("metrics-port", self.metrics_port),
        ):
            if not 0 <= port <= 65535:
                raise InvalidRequest(f"--{option} must be from 1 to 65535, got {port}")
        if not ports.keys() - {"http-metrics"}:
            raise InvalidRequest("no port given: use --restful-port or --port")
        if self.health_path and not (self.health_path.startswith("/") and "http-serving" in ports):
            raise InvalidRequest(
                f"--health-path must be an absolute path at --restful-port, got {self.health_path[:80]!r}"
            )
        # A model server may show its metrics where it answers requests.
        if ports.get("http-serving") == ports.get("grpc-serving"):
            raise InvalidRequest(
                f"--restful-port and --port must differ, both are {ports['http-serving']}"
            )

    def _validate_scaling(self) -> None:
        _ = self.range
        if not 1 <= self.target <= MAX_TARGET:
            raise InvalidRequest(f"--target must be from 1 to {MAX_TARGET}, got {self.target}")
        for option, seconds in (("up-after", self.up_after_s), ("down-after", self.down_after_s)):
            if not 0 <= seconds <= MAX_PAUSE_S:
                raise InvalidRequest(f"--{option} must be from 0s to 1h, got {seconds:g}s")
        if not 1 <= self.buffer_timeout_s <= MAX_PAUSE_S:
            raise InvalidRequest(
                f"--buffer-timeout must be from 1s to 1h, got {self.buffer_timeout_s:g}s"
            )


def parse_weights(texts: Sequence[str]) -> dict[str, int]:
    """Return the weights of `v1:90`, `v2:10` by version. Raises InvalidRequest."""
    weights: dict[str, int] = {}
    for text in texts:
        version, _, weight = text.rpartition(":")
        if not VERSION.fullmatch(version) or not re.fullmatch("[0-9]{1,6}", weight):
            raise InvalidRequest(
                f"invalid version weight {text[:40]!r}: expected VERSION:WEIGHT, for example v1:90"
            )
        if version in weights:
            raise InvalidRequest(f"version {version} is given twice: give each version one weight")
        weights[version] = int(weight)
    total = sum(weights.values())
    if total != 100:
        raise InvalidRequest(f"version weights must add up to 100, got {total}")
    return weights


def check_versions(service: str, weights: Mapping[str, int], existing: Collection[str]) -> None:
    """Check that a service has the versions that get weights. Raises InvalidRequest."""
    for version in weights:
        if version not in existing:
            raise InvalidRequest(
                f"service {service} has no version {version}: existing versions are "
                f"{', '.join(sorted(existing)) or 'none'}"
            )


def check_change(old: ServiceSpec, new: ServiceSpec) -> None:
    """Check that a version may be changed in this way. Raises InvalidRequest."""
    for field in _FIXED:
        if getattr(old, field) != getattr(new, field):
            raise InvalidRequest(
                f"--{field.replace('_', '-')} of a version cannot be changed: deploy another version by "
                f"fenka serve {old.kind}"
            )
    if old.buffer_timeout_s != new.buffer_timeout_s:
        raise InvalidRequest(
            "--buffer-timeout is the gateway's, which is created once: delete the service, and deploy it "
            "again"
        )


def weights_with(
    weights: Mapping[str, int] | None, versions: Collection[str], new: str
) -> dict[str, int]:
    """Return the weights after a version was added: it gets no requests, unless nobody else does."""
    known = shares(weights, versions)
    return {**known, new: 0 if known else 100}
