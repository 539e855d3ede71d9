"""`fenka certificates`: makes fenka's certificates, shows when they expire, writes kube-scheduler's.

Each is in a Secret. Only `--make` reads the authority's, and needs `cryptography`. The replicas mount their
own. The client's belongs on control planes.
"""

import asyncio
import os
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from fenka.cli import cluster, tables
from fenka.cli.common_options import ClusterTarget, OutputOption, Target
from fenka.cli.error_report import UserError
from fenka.cluster.objects import Secret
from fenka.kubernetes.api_client import Api, ApiError, if_accepted
from fenka.server import certificate_files

EXPIRES = "fenka.io/expires"
"""Annotation of the Secrets: when the certificate expires."""
USES = {
    certificate_files.AUTHORITY: "signs the others",
    certificate_files.SERVER: "the extender's replicas",
    certificate_files.CLIENT: "kube-scheduler, and replicas that forward requests",
}
SOON = timedelta(days=365)
"""An authority that expires earlier causes a warning: certificates on control planes expire with it."""

_TIME = "%Y-%m-%dT%H:%M:%SZ"
ATTEMPTS = 5
CONFLICT = 409


@dataclass(frozen=True, slots=True)
class Installation:
    """An installed extender. `name` is its Service's, and the prefix of the Secrets' names."""

    target: Target
    namespace: str
    name: str

    def secret(self, kind: str) -> str:
        """Return the name of a Secret."""
        return f"{self.name}-{kind}"

    @property
    def path(self) -> str:
        """The path of the Secrets on the API server."""
        return f"/api/v1/namespaces/{self.namespace}/secrets"

    @property
    def hosts(self) -> list[str]:
        """Return the names by which pods reach the extender."""
        service = f"{self.name}.{self.namespace}"
        return [self.name, service, f"{service}.svc", f"{service}.svc.cluster.local"]


def certificates(
    target: ClusterTarget,
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="write the files that kube-scheduler requires"),
    ] = None,
    make: Annotated[
        bool, typer.Option("--make", help="make certificates that are missing or expire soon")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="with --make: another name or address of the extender"),
    ] = None,
    namespace: Annotated[
        str,
        typer.Option("-n", "--namespace", envvar="POD_NAMESPACE", help="the extender's namespace"),
    ] = "fenka-system",
    service: Annotated[str, typer.Option(help="the extender's Service")] = "fenka-scheduler",
    output: OutputOption = "table",
) -> None:
    """Make, write or show the certificates."""
    installation = Installation(target.target, namespace, service)
    if make:
        _make(installation, host or ())
    if into is not None:
        _write(installation, into)
    if not make and into is None:
        _show(installation, output)


def _show(installation: Installation, output: str) -> None:
    """Print the Secrets and when their certificates expire."""
    # The authority's is read by `--make` only.
    kinds = list(USES)[1:]
    secrets = cluster.ask(installation.target, lambda api: _read_all(api, installation, kinds))
    expiries = {
        certificate_files.AUTHORITY: _authority_expires(secrets.values()),
        **{kind: _expires(secret) for kind, secret in secrets.items()},
    }
    rows = [
        {"secret": installation.secret(kind), "for": USES[kind], "expires": expires}
        for kind, expires in expiries.items()
    ]
    if not tables.print_data(rows, output):
        lines = [["SECRET", "FOR", "EXPIRES"], *(list(row.values()) for row in rows)]
        print("\n".join(tables.align(lines)))


def _write(installation: Installation, directory: Path) -> None:
    """Write the files that kube-scheduler's configuration names. Raises UserError."""
    secret = cluster.ask(
        installation.target, lambda api: _read(api, installation, certificate_files.CLIENT)
    )
    name = f"{installation.namespace}/{installation.secret(certificate_files.CLIENT)}"
    if secret is None:
        raise UserError(
            f"the Secret {name} is not there: install the chart with scheduler.tls.enabled=true, or name its "
            "namespace with --namespace"
        )
    files = {"ca.crt": "ca.crt", "client.crt": "tls.crt", "client.key": "tls.key"}
    contents = {file: _decoded(secret, key) for file, key in files.items()}
    if not all(contents.values()):
        raise UserError(
            f"the Secret {name} is incomplete: make it again with `fenka certificates --make`"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, content in contents.items():
            _replace(directory / file, content)
    except OSError as why:
        raise UserError(f"{why.filename or directory} cannot be written: {why.strerror}") from None
    print(f"wrote {', '.join(files)} to {directory}; the certificate expires {_expires(secret)}")


def _make(installation: Installation, hosts: Sequence[str]) -> None:
    """Make the certificates that are missing or expire soon. `hosts` are more names of the extender."""
    # Users who only show or write certificates need no cryptography.
    from fenka.server import certificates as maker

    async def question(api: Api) -> dict[str, datetime]:
        for _ in range(ATTEMPTS):
            try:
                return await _renew(api, installation, hosts, maker)
            except ApiError as why:
                # Another process makes them at the same time.
                if why.status != CONFLICT:
                    raise
            await asyncio.sleep(1)
        raise UserError(f"the Secrets of {installation.namespace} keep changing: try again")

    try:
        made = cluster.ask(installation.target, question)
    except (certificate_files.InvalidPair, ValueError) as why:
        raise UserError(f"no certificate was made: {why}") from None
    for kind, until in made.items():
        print(f"made {installation.secret(kind)}: {USES[kind]}, until {until:%Y-%m-%d}")
    if not made:
        print("all certificates are valid")


async def _renew(
    api: Api, installation: Installation, hosts: Sequence[str], maker: ModuleType
) -> dict[str, datetime]:
    """Store what `maker`, the module that makes certificates, has made. Return their ends."""
    secrets = await _read_all(api, installation, USES)
    current = {kind: _pair(secret) for kind, secret in secrets.items()}
    now = datetime.now(UTC)
    made = maker.due(current, [*installation.hosts, *hosts], now)
    authority = made.get(certificate_files.AUTHORITY) or current[certificate_files.AUTHORITY]
    assert authority is not None
    ends = maker.expiry(authority)
    if ends - now < SOON:
        print(
            f"the authority and all certificates of it expire on {ends:%Y-%m-%d}: delete the Secret "
            f"{installation.secret(certificate_files.AUTHORITY)}, make new certificates, and copy "
            "them to the control planes"
        )
    # The authority first: certificates that it has signed are useless without it.
    expiries = {kind: maker.expiry(made[kind]) for kind in USES if kind in made}
    for kind, until in expiries.items():
        content = {
            "tls.crt": made[kind].certificate,
            "tls.key": made[kind].key,
            "ca.crt": authority.certificate,
        }
        body = {
            "metadata": {
                "name": installation.secret(kind),
                "labels": {"app.kubernetes.io/name": "fenka"},
                "annotations": {EXPIRES: f"{until:{_TIME}}"},
            },
            "data": {key: b64encode(value).decode() for key, value in content.items()},
        }
        await _store(api, installation, secrets[kind], body)
    return expiries


async def _store(
    api: Api, installation: Installation, known: Secret | None, body: dict[str, Any]
) -> None:
    if known is None:
        kind = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls"}
        await api.create(installation.path, Secret, kind | body)
        return
    body["metadata"]["resourceVersion"] = known.metadata.resource_version
    await api.patch(f"{installation.path}/{known.metadata.name}", Secret, body)


async def _read_all(
    api: Api, installation: Installation, kinds: Iterable[str]
) -> dict[str, Secret | None]:
    return {kind: await _read(api, installation, kind) for kind in kinds}


async def _read(api: Api, installation: Installation, kind: str) -> Secret | None:
    return await if_accepted(api.get(f"{installation.path}/{installation.secret(kind)}", Secret))


def _pair(secret: Secret | None) -> certificate_files.Pair | None:
    return (
        certificate_files.Pair(_decoded(secret, "tls.crt"), _decoded(secret, "tls.key"))
        if secret
        else None
    )


def _decoded(secret: Secret, key: str) -> bytes:
    try:
        return b64decode(secret.data.get(key, ""), validate=True)
    except NotBase64:
        return b""


def _expires(secret: Secret | None) -> str:
    return secret.metadata.annotations.get(EXPIRES, "unknown") if secret else "missing"


def _authority_expires(secrets: Collection[Secret | None]) -> str:
    """Return when the authority expires: its certificate is in the Secrets of those that it has signed."""
    if not any(secrets):
        return "missing"
    ends = (
        certificate_files.authority_expiry(_decoded(secret, "ca.crt"))
        for secret in secrets
        if secret
    )
    first = min((end for end in ends if end is not None), default=None)
    return "unknown" if first is None else f"{first:{_TIME}}"


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner only."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
