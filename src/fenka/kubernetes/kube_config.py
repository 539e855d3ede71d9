"""Reads kubeconfigs and service accounts as kubectl does, and runs credential plugins.

Kubernetes' own clients import a class for every kind of object, which takes over a second of each command.
"""

import asyncio
import base64
import itertools
import os
import ssl
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec

from fenka.core.errors import FenkaError
from fenka.core.units import MIB
from fenka.formats import documents

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its account's token."""

_REREAD_S = 60.0
"""Kubernetes writes a service account's next token long before the token expires."""

_EARLY = timedelta(minutes=1)
"""A credential plugin runs again this long before its token expires."""

_MAX_BYTES = 4 * MIB
"""A kubeconfig is no larger, also with the certificates of many clusters."""


class InvalidKubeConfig(FenkaError):
    """A kubeconfig, a service account or a credential plugin is unusable; the message says why."""


async def _anonymous() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """An API server and the user's credentials."""

    url: str
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    """In the server's certificate, if it is not the URL's."""
    proxy: str | None = None
    """A URL."""
    authorization: Callable[[], Awaitable[str]] = _anonymous
    """Returns the header Authorization, which may be empty. Raises InvalidKubeConfig, OSError."""


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None
    extensions: list["_Extension"] = []


class _Extension(msgspec.Struct):
    """Settings of a cluster for other programs, among them credential plugins."""

    name: str
    extension: object = None


class _Variable(msgspec.Struct):
    name: str
    value: str = ""


class _Plugin(msgspec.Struct, rename="camel"):
    command: str
    api_version: str
    args: list[str] = []
    env: list[_Variable] = []
    provide_cluster_info: bool = False


class _KubeUser(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    password: str = ""
    exec: _Plugin | None = None
    auth_provider: dict[str, object] | None = None


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedItem(msgspec.Struct):
    """A cluster, a user or a context."""

    name: str
    cluster: _Cluster = msgspec.field(default_factory=_Cluster)
    user: _KubeUser = msgspec.field(default_factory=_KubeUser)
    context: _Context = msgspec.field(default_factory=_Context)


class _KubeConfig(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: list[_NamedItem] = []
    users: list[_NamedItem] = []
    contexts: list[_NamedItem] = []


class _PluginStatus(msgspec.Struct, rename="camel"):
    token: str = ""
    expiration_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    client_certificate_data: str = ""
    client_key_data: str = ""


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    status: _PluginStatus


async def api_server(kubeconfig: Path | None = None, context: str | None = None) -> ApiServer:
    """Return the server of the kubeconfig, else of $KUBECONFIG, of the pod, or of ~/.kube/config.

    Raises InvalidKubeConfig, OSError.
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (ACCOUNT / "token").exists()
    files = _files(kubeconfig)
    if in_pod and kubeconfig is None and not (files and os.environ.get("KUBECONFIG")):
        return _of_pod()
    if not files:
        raise InvalidKubeConfig("there is no such file: name one by --kubeconfig or KUBECONFIG")
    return await _of_files(files, context)


def namespace(kubeconfig: Path | None = None, context: str | None = None) -> str:
    """Return the namespace of the context; `default` if it has none. Raises InvalidKubeConfig, OSError."""
    files = _files(kubeconfig)
    name = _context_name(files, context)
    contexts = (item for file in files for item in file.contexts if item.name == name)
    return next((item.context.namespace for item in contexts), "") or "default"


def _files(kubeconfig: Path | None) -> list[_KubeConfig]:
    """Return the files that exist of the one given, or else of $KUBECONFIG, which may name several."""
    named = [kubeconfig]
    if kubeconfig is None:
        names = os.environ.get("KUBECONFIG") or "~/.kube/config"
        named = [Path(name) for name in names.split(os.pathsep) if name]
    paths = [path.expanduser() for path in named if path]
    return [_read(path) for path in paths if path.exists()]


def _context_name(files: list[_KubeConfig], context: str | None) -> str:
    return context or next((file.current_context for file in files if file.current_context), "")


def _of_pod() -> ApiServer:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return ApiServer(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        _tls((ACCOUNT / "ca.crt").read_bytes()),
        authorization=_FileToken(ACCOUNT / "token"),
    )


def _read(path: Path) -> _KubeConfig:
    """Return a kubeconfig. Paths in it are relative to its folder."""
    try:
        value = documents.without_nulls(documents.parse_yaml(path.read_bytes(), limit=_MAX_BYTES))
        config = documents.convert(value or {}, _KubeConfig, "the kubeconfig", known_only=False)
    except documents.InvalidYaml as why:
        raise InvalidKubeConfig(f"{path} {why}") from None
    except documents.InvalidDocument as why:
        raise InvalidKubeConfig(f"{path}: {why}") from None
    for item in config.clusters:
        _resolve(path.parent, item.cluster, "certificate_authority")
    for user in (item.user for item in config.users):
        _resolve(path.parent, user, "token_file", "client_certificate", "client_key")
        if user.exec and "/" in user.exec.command:
            _resolve(path.parent, user.exec, "command")
    return config


def _resolve(folder: Path, record: msgspec.Struct, *names: str) -> None:
    for name in names:
        if path := getattr(record, name):
            setattr(record, name, str(folder / path))


async def _of_files(files: list[_KubeConfig], context: str | None) -> ApiServer:
    """Return the server of a context. An earlier file's items precede those of later files."""
    name = _context_name(files, context)
    if not name:
        raise InvalidKubeConfig("no current-context is set: name a context by --context")
    selected = _named("context", name, (file.contexts for file in files)).context
    cluster = _named("cluster", selected.cluster, (file.clusters for file in files)).cluster
    user = _KubeUser()
    if selected.user:
        user = _named("user", selected.user, (file.users for file in files)).user
    if user.auth_provider:
        raise InvalidKubeConfig(
            f"user {selected.user} has an auth-provider, which is not supported: use an exec plugin"
        )
    if not cluster.server:
        raise InvalidKubeConfig(f"cluster {selected.cluster} has no server")
    status = await _run(user.exec, cluster) if user.exec else _PluginStatus()
    return ApiServer(
        cluster.server.rstrip("/"),
        _tls_of(cluster, user, status),
        cluster.tls_server_name,
        cluster.proxy_url,
        _authorization(user, status, cluster),
    )


def _named(kind: str, name: str, lists: Iterable[list[_NamedItem]]) -> _NamedItem:
    known: dict[str, _NamedItem] = {}
    for item in itertools.chain(*lists):
        known.setdefault(item.name, item)
    if name not in known:
        raise InvalidKubeConfig(f"there is no {kind} {name}{documents.similar(name, known)}")
    return known[name]


def _tls_of(cluster: _Cluster, user: _KubeUser, status: _PluginStatus) -> ssl.SSLContext:
    context = _tls(_pem(cluster, "certificate_authority"))
    if cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate = status.client_certificate_data.encode() or _pem(user, "client_certificate")
    if certificate:
        key = status.client_key_data.encode() or _pem(user, "client_key") or b""
        # OpenSSL reads only files.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _tls(authority: bytes | None) -> ssl.SSLContext:
    """Return a context that trusts an authority; the system's if None."""
    if authority is not None and not authority.strip():
        raise InvalidKubeConfig("the file of the certificate authority is empty")
    known = None if authority is None else authority.decode("ascii", "ignore")
    context = ssl.create_default_context(cadata=known)
    # Python 3.13 refuses authorities without the extensions of RFC 5280. Many clusters have such ones, and
    # kubectl accepts them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _pem(record: _Cluster | _KubeUser, name: str) -> bytes | None:
    """Return a certificate or key that a kubeconfig contains, or whose file it names; None without either."""
    if data := getattr(record, f"{name}_data"):
        try:
            return base64.b64decode(data)
        except ValueError:
            field = f"{name}_data".replace("_", "-")
            raise InvalidKubeConfig(f"{field} is not in base64") from None
    path = getattr(record, name)
    return Path(path).read_bytes() if path else None


def _authorization(
    user: _KubeUser, status: _PluginStatus, cluster: _Cluster
) -> Callable[[], Awaitable[str]]:
    if user.exec:
        return _PluginToken(user.exec, status, cluster)
    if user.token_file:
        return _FileToken(Path(user.token_file))
    header = ""
    if user.token:
        header = f"Bearer {user.token}"
    elif user.username:
        header = f"Basic {base64.b64encode(f'{user.username}:{user.password}'.encode()).decode()}"

    async def constant() -> str:
        return header

    return constant


class _FileToken:
    """The header Authorization by a token in a file, which is read again as it may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._header, self._reread_at = path, "", float("-inf")

    async def __call__(self) -> str:
        if time.monotonic() >= self._reread_at:
            token = self._path.read_text().strip()
            if not token:
                raise InvalidKubeConfig(f"the token in {self._path} is empty")
            self._header, self._reread_at = f"Bearer {token}", time.monotonic() + _REREAD_S
        return self._header


class _PluginToken:
    """The header Authorization by a plugin's token, which runs again before the token expires."""

    def __init__(self, plugin: _Plugin, status: _PluginStatus, cluster: _Cluster) -> None:
        self._plugin, self._status, self._cluster = plugin, status, cluster
        self._lock = asyncio.Lock()

    async def __call__(self) -> str:
        async with self._lock:
            expiry = self._status.expiration_timestamp
            if self._status.token and expiry and expiry - _EARLY <= datetime.now(UTC):
                self._status = await _run(self._plugin, self._cluster)
        return f"Bearer {self._status.token}" if self._status.token else ""


def _cluster_info(cluster: _Cluster) -> dict[str, object]:
    """Return a cluster as credential plugins read it: https://kubernetes.io/docs/reference/config-api/client-authentication.v1/."""
    authority = _pem(cluster, "certificate_authority")
    settings = {field.name: field.extension for field in cluster.extensions}
    info = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": authority and base64.b64encode(authority).decode(),
        "proxy-url": cluster.proxy_url,
        "config": settings.get("client.authentication.k8s.io/exec"),
    }
    return {name: value for name, value in info.items() if value}


async def _run(plugin: _Plugin, cluster: _Cluster) -> _PluginStatus:
    """Return the status that a credential plugin prints. Raises InvalidKubeConfig, OSError."""
    spec: dict[str, object] = {"interactive": sys.stdin.isatty()}
    if plugin.provide_cluster_info:
        spec["cluster"] = _cluster_info(cluster)
    request = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    variables = {variable.name: variable.value for variable in plugin.env}
    process = await asyncio.create_subprocess_exec(
        plugin.command,
        *plugin.args,
        env=os.environ
        | variables
        | {"KUBERNETES_EXEC_INFO": msgspec.json.encode(request).decode()},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode:
        reason = errors.decode(errors="replace").strip() or f"exit code {process.returncode}"
        raise InvalidKubeConfig(f"the credential plugin {plugin.command} failed: {reason}")
    try:
        credential = msgspec.json.decode(output, type=_ExecCredential)
    except (msgspec.MsgspecError, UnicodeDecodeError) as why:
        raise InvalidKubeConfig(
            f"the credential plugin {plugin.command} printed no ExecCredential: {why}"
        ) from None
    if credential.api_version != plugin.api_version:
        raise InvalidKubeConfig(
            f"the credential plugin {plugin.command} printed {credential.api_version}, "
            f"not {plugin.api_version}"
        )
    return credential.status
