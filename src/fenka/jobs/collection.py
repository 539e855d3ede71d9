"""Collects what a submission carries besides its spec: code, files, the commit, keys.

Contents: what a submission carries besides its spec, read or made once when it is submitted.

Packs the directory of `--code`: without what .gitignore lists, and the same bytes for the same files.

Finds out which commit a repository's branch is at, how to clone it, and which credentials its URL has.
"""

import gzip
import io
import os
import re
import secrets
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from fenka.core.request import InvalidRequest
from fenka.core.units import MIB
from fenka.jobs.training import TrainingSpec
from fenka.jobs.workload import WorkloadSpec

GIT_USERNAME = "GIT_SYNC_USERNAME"
GIT_PASSWORD = "GIT_SYNC_PASSWORD"
GIT_CREDENTIALS = (GIT_USERNAME, GIT_PASSWORD)
"""Variables that are kept in a Secret: neither pods nor annotations show them."""


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


LIMIT_BYTES = 900 * 1024
"""A ConfigMap has at most 1 MiB."""

_STOP_BYTES = 64 * MIB
"""Nothing larger is packed only to tell its size."""

_GIT_TIMEOUT_S = 60


def pack(directory: str) -> bytes:
    """Return the archive of a directory. Raises InvalidRequest, OSError."""
    root = Path(directory)
    if not root.is_dir():
        raise InvalidRequest(f"--code {directory} is not a directory")
    data = _Sink(directory)
    # Neither times, owners nor the archive's own name are in it.
    with (
        gzip.GzipFile("", "wb", 6, data, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in files(root):
            _add(archive, root, name)
    packed = data.getvalue()
    if len(packed) > LIMIT_BYTES:
        raise _too_large(directory, f"{len(packed) / MIB:.1f}")
    return packed


class _Sink(io.BytesIO):
    """Receives an archive, up to a size."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def write(self, data: object, /) -> int:
        if self.tell() > _STOP_BYTES:
            raise _too_large(self._directory, f"more than {_STOP_BYTES >> 20}")
        return super().write(data)  # type: ignore[arg-type]


def _too_large(directory: str, mib: str) -> InvalidRequest:
    return InvalidRequest(
        f"--code {directory} is {mib} MiB compressed, the limit is {LIMIT_BYTES / MIB:.1f} MiB: use "
        "--sync-mode git or --data"
    )


def files(root: Path) -> list[bytes]:
    """Return the files below a directory that git would not ignore, sorted."""
    try:
        listed = _git_files(root)
    except FileNotFoundError:
        if (root / ".gitignore").exists():
            raise InvalidRequest(
                f"git is required to read {root}/.gitignore: install it, or use --data"
            ) from None
        paths = (Path(base, name) for base, _, names in os.walk(root) for name in names)
        listed = [os.fsencode(path.relative_to(root)) for path in paths]
    return sorted(name for name in set(listed) if b".git" not in name.split(b"/"))


def _git_files(root: Path) -> list[bytes]:
    """Return what git lists: tracked files, and others that are not ignored."""
    root = root.absolute()  # git changes its directory before it looks for the work tree
    listing = ["ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    tracked = _git(["-C", str(root), *listing])
    if tracked is not None:
        return tracked
    # No repository: an empty one whose work tree is the directory.
    with tempfile.TemporaryDirectory() as empty:
        _git(["init", "-q", "--bare", empty])
        listed = _git(["--git-dir", empty, "--work-tree", str(root), "-C", str(root), *listing])
    if listed is None:
        raise InvalidRequest(f"git cannot list the files of {root}: run `git ls-files` there")
    return listed


def _git(arguments: list[str]) -> list[bytes] | None:
    """Return the names that a command of git prints; None if it fails."""
    result = subprocess.run(
        ["git", *arguments], capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
    )
    return None if result.returncode else list(filter(None, result.stdout.split(b"\0")))


def _add(archive: tarfile.TarFile, root: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(root), name)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        # Tracked, and deleted in the work tree.
        return
    entry = tarfile.TarInfo(os.fsdecode(name))
    if stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(path))
        archive.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        with open(path, "rb") as file:
            content = file.read(_STOP_BYTES + 1)
        if len(content) > _STOP_BYTES:
            raise InvalidRequest(
                f"--code: {os.fsdecode(path)} has more than {_STOP_BYTES >> 20} MiB: use --data for it"
            )
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


_TIMEOUT_S = 15.0
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
CLONE = """\
set -eu
git() { command git -c safe.directory='*' -c credential.helper="$HELPER" "$@"; }
git init -q "$DIRECTORY"
cd "$DIRECTORY"
git remote add origin "$SOURCE"
if git fetch -q --depth 1 origin "$REVISION" || git fetch -q origin "$REVISION"; then
    git checkout -q --detach FETCH_HEAD
else
    git fetch -q --tags origin '+refs/heads/*:refs/remotes/origin/*'
    git checkout -q --detach "$REVISION"
fi
if [ -f .gitmodules ]; then git submodule -q update --init --recursive; fi
git rev-parse HEAD
"""
"""Some servers have no shallow fetch, others give no commit by its name: then everything is fetched."""

_HELPER = """\
!f() {
    test "$1" = get || return 0
    while IFS= read -r line; do
        case "$line" in
            protocol=*) protocol="${line#protocol=}" ;;
            host=*) host="${line#host=}" ;;
        esac
    done
    test "$protocol://$host" = "$ORIGIN" || return 0
    printf 'username=%s\\npassword=%s\\n' "$GIT_SYNC_USERNAME" "$GIT_SYNC_PASSWORD"
}; f"""
"""Submodules and redirects name other hosts, whose owners must not receive the source's credentials."""

_ADVICE = (
    "fatal: Could not read from remote repository.",
    "Please make sure you have the correct access rights",
    "and the repository exists.",
)
"""Git's lines after the reason why a repository cannot be read."""


def split_credentials(url: str) -> tuple[str, str, str]:
    """Return a URL without its user name and password, and these.

    A user name alone is an access token, unless it is that of an SSH account.
    """
    parts = urlsplit(url)
    token = parts.username if parts.scheme in {"http", "https"} else None
    if not (parts.password or token):
        return url, "", ""
    address = parts.netloc.rpartition("@")[2]
    bare = urlunsplit(parts._replace(netloc=address))
    return bare, unquote(parts.username or ""), unquote(parts.password or "")


def _origin(url: str) -> str:
    """Return the scheme and host of a URL, as git names them to a credential helper."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def failure_reason(output: str) -> str:
    """Return the line of git's output that says why it failed; empty if it printed none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = [line for line in lines if line not in _ADVICE]
    return next(reversed(reasons or lines), "")


def current_commit(url: str, branch: str, credentials: Mapping[str, str]) -> str:
    """Return the commit of a branch or tag, empty if the repository cannot be reached from here.

    Raises:
        InvalidRequest: The repository has no such branch.
    """
    helper = (
        ["-c", "credential.helper=", "-c", f"credential.helper={_HELPER}"] if credentials else []
    )
    environment = {
        **os.environ,
        **credentials,
        "ORIGIN": _origin(url),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=5",
    }
    try:
        result = subprocess.run(
            ["git", *helper, "ls-remote", "--", url],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    if result.returncode:
        return ""
    lines = (line.split("\t") for line in result.stdout.decode(errors="replace").splitlines())
    commits = {line[1]: line[0] for line in lines if len(line) == 2 and _COMMIT.fullmatch(line[0])}
    # A tag with a message is an object of its own; ^{} is its commit.
    names = [f"refs/heads/{branch}", f"refs/tags/{branch}^{{}}", f"refs/tags/{branch}", branch]
    commit = next((commits[name] for name in names if name in commits), "")
    if not commit and commits:
        raise InvalidRequest(f"branch {branch} not found in {url}: check GIT_SYNC_BRANCH")
    return commit


def clone_variables(
    spec: TrainingSpec, directory: str, revision: str, *, credentials: bool
) -> dict[str, str]:
    """Return the environment of CLONE besides the credentials.

    Args:
        spec: The training.
        directory: The directory of the clone.
        revision: The commit; empty for that of the branch or tag that the training names.
        credentials: GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD are set.
    """
    wanted = spec.env.get("GIT_SYNC_REV") or spec.env.get("GIT_SYNC_BRANCH") or "HEAD"
    return {
        "SOURCE": spec.sync_source,
        "REVISION": revision or wanted,
        "DIRECTORY": directory,
        "HELPER": _HELPER if credentials else "",
        "ORIGIN": _origin(spec.sync_source),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }


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
