"""Collects what a submission carries besides its spec: code, files, the commit, keys."""

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fenka.core.request import InvalidRequest
from fenka.jobs.archive import pack
from fenka.jobs.repository import (
    GIT_CREDENTIALS,
    GIT_PASSWORD,
    GIT_USERNAME,
    current_commit,
    split_credentials,
)
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import WorkloadSpec


@dataclass(frozen=True, slots=True)
class Contents:
    """Files and secrets of a submission.

    Attributes:
        key: Secret of the launch agents, in hexadecimal digits.
        ssh_keys: Private and public key for images without Python; empty without.
        code: The archive of `--code`; empty without.
        config_files: Files by their paths in the pods.
        revision: The commit that all processes and restarts run; empty if it could not be found out.
        credentials: git's user name and password, by the names of their variables.
    """

    key: str = ""
    ssh_keys: tuple[str, str] | None = None
    code: bytes = b""
    config_files: Mapping[str, bytes] = field(default_factory=dict)
    revision: str = ""
    credentials: Mapping[str, str] = field(default_factory=dict)


MAX_CONFIG_BYTES = 900 * 1024
"""Of all files of `--config-file`: they are in one object of Kubernetes."""

_KEYGEN_TIMEOUT_S = 10.0


def collect(spec: TrainingSpec) -> tuple[TrainingSpec, Contents]:
    """Return the training without secrets, and its contents. Raises InvalidRequest, OSError."""
    spec, credentials = without_secrets(spec)
    contents = Contents(
        key=secrets.token_hex(32) if spec.kind == "mpi" else "",
        ssh_keys=_ssh_keys() if spec.kind == "mpi" else None,
        code=pack(spec.code) if spec.code else b"",
        config_files=read_config_files(spec),
        revision=_revision(spec, credentials),
        credentials=credentials,
    )
    return spec, contents


def without_secrets(spec: TrainingSpec) -> tuple[TrainingSpec, dict[str, str]]:
    """Take git's credentials out of the variables and the URL."""
    url, user, password = split_credentials(spec.sync_source)
    credentials = {name: spec.env[name] for name in GIT_CREDENTIALS if name in spec.env}
    if user or password:
        password = password or credentials.get(GIT_PASSWORD, "")
        credentials = {GIT_USERNAME: user, GIT_PASSWORD: password}
    env = {name: value for name, value in spec.env.items() if name not in GIT_CREDENTIALS}
    return msgspec.structs.replace(spec, env=env, sync_source=url), credentials


def _revision(spec: TrainingSpec, credentials: dict[str, str]) -> str:
    if not spec.sync_source or spec.env.get("GIT_SYNC_REV"):
        return ""
    return current_commit(spec.sync_source, spec.env.get("GIT_SYNC_BRANCH", "HEAD"), credentials)


def read_config_files(spec: WorkloadSpec) -> dict[str, bytes]:
    """Return the files of `--config-file` by their paths in the processes. Raises InvalidRequest."""
    files = dict[str, bytes]()
    left = MAX_CONFIG_BYTES
    for file, path in spec.config_files:
        try:
            with Path(file).open("rb") as source:
                files[path] = source.read(left + 1)
        except OSError as why:
            raise InvalidRequest(f"--config-file {file} cannot be read: {why.strerror}") from None
        left -= len(files[path])
        if left < 0:
            raise InvalidRequest("the files of --config-file have more than 0.9 MiB: use --data")
    return files


def _ssh_keys() -> tuple[str, str] | None:
    """Return a pair of keys for images without Python; None if this machine has no ssh-keygen."""
    program = shutil.which("ssh-keygen")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        key = Path(directory, "key")
        made = subprocess.run(
            [program, "-q", "-t", "ed25519", "-N", "", "-C", "fenka", "-f", str(key)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_KEYGEN_TIMEOUT_S,
            check=False,
        )
        if made.returncode:
            return None
        return key.read_text(), key.with_suffix(".pub").read_text()
